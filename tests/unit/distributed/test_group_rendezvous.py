"""What a rank does with a store into which somebody else writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from torch.distributed import HashStore, PrefixStore

from phalanx.distributed.collective_buffers import CollectiveBuffers
from phalanx.distributed.error_store import ErrorStore
from phalanx.distributed.group_rendezvous import GroupRendezvous
from phalanx.distributed.hosts import this_host
from phalanx.errors import PeerError, PeerLost
from phalanx.ipc import ProcessIdentity, Region

TIMEOUT_S = 20.0
NAMESPACE = "0123456789abcdef"


class Liar:
    """Rank 0 of two, as far as the store shows: it answers a hello, and says whatever it likes."""

    def __init__(self, said: Callable[[str], str | None]) -> None:
        self.store = HashStore()
        self._common = PrefixStore("phalanx/", self.store)
        self._own = PrefixStore(f"{NAMESPACE}/", self._common)
        self._said = said
        self._thread = threading.Thread(target=self._speak)
        self._thread.start()

    def _speak(self) -> None:
        with suppress(RuntimeError):  # the other has given up
            hello = json.loads(self._common.get("hello/1"))
            me = [NAMESPACE, this_host(), *ProcessIdentity.current()]
            for store, key, text in (
                (self._common, "hello/0", json.dumps(me)),
                (self._common, "called", json.dumps([NAMESPACE, hello[0]])),
                (self._own, "heard", json.dumps([me, hello])),
                (self._own, "open", "1"),
                (self._own, "card/0", "0"),
            ):
                said = self._said(key)
                store.set(key, text if said is None else said)
                if said is not None:
                    return

    def close(self) -> None:
        self._thread.join()


def meet(liar: Liar) -> None:
    rendezvous = GroupRendezvous(liar.store, 1, 2, TIMEOUT_S)
    rendezvous.find_hosts()
    rendezvous.share_memory([0, 1])


@pytest.fixture
def lying() -> Iterator[Callable[..., Liar]]:
    liars: list[Liar] = []

    def begin(**said: str) -> Liar:
        liars.append(Liar(lambda key: said.get(key.replace("/", "_"))))
        return liars[-1]

    yield begin
    for liar in liars:
        liar.close()


@pytest.mark.parametrize("text", ["", "]", "[" * 50_000, "null", "7", '"a"', "[1]", '{"a": 1}'])
@pytest.mark.parametrize("key", ["hello_0", "called", "heard"])
def test_what_no_rank_writes_is_refused_by_a_sentence(key, text, lying):
    with pytest.raises(PeerError, match=f"which no rank|as `{key.replace('_', '/')}`"):
        meet(lying(**{key: text}))


@pytest.mark.parametrize("said", ['"../cwd/precious"', "-1", "true", "1.0", '{"region": 3}'])
def test_a_descriptor_is_a_number(said, lying):
    with pytest.raises(PeerError, match="which no rank of the group has written"):
        meet(lying(card_0=said))


def test_a_file_of_the_users_is_no_region(lying, tmp_path):
    path = tmp_path / "precious"
    path.write_bytes(b"A" * CollectiveBuffers.needed_bytes(2))
    with path.open("r+b") as file, pytest.raises(PeerLost, match="that is something else"):
        meet(lying(card_0=str(file.fileno())))
    assert set(path.read_bytes()) == {ord("A")}


def test_a_region_of_something_else_is_not_written_to(lying):
    with Region.create(CollectiveBuffers.needed_bytes(2), label="weights") as region:
        with pytest.raises(PeerError, match="which no rank of the group has written"):
            meet(lying(card_0=str(region.fd)))
        assert not any(region.buffer)


@pytest.mark.parametrize("text", ["", "[]", '{"kind": 3}', '{"rank": "x", "text": []}'])
def test_an_error_that_no_rank_wrote_is_read_without_another(text):
    store = HashStore()
    store.set("error", text)
    told = ErrorStore(store, 0, 2).read()
    assert told is None or isinstance(told, PeerError)

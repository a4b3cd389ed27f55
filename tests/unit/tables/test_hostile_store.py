"""The store of a job is somebody else's to read and write: he gets nothing, and is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from phalanx.cluster import Secret, make_secret
from phalanx.errors import ConfigError, PeerTimeout
from phalanx.tables import host_rendezvous
from phalanx.tables.host_rendezvous import Place, Trust, find_place

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")

SIZE = 3
WAIT_S = 0.5
PLACES = [f"phalanx/tables/place/{rank}" for rank in range(SIZE)]
RUN = "phalanx/tables/run"


class Store:
    """As the store of a job: a reader waits for a key, and gives up."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, WAIT_S):
                raise RuntimeError("wait timeout")
            return self.values[key].encode()


class HostileStore(Store):
    """One whose values somebody changes on their way; None is taken away."""

    def __init__(self, change: Callable[[str, str], str | None]) -> None:
        super().__init__()
        self._change = change

    def set(self, key: str, value: str) -> None:
        changed = self._change(key, value)
        if changed is not None:
            super().set(key, changed)


@pytest.fixture
def trust(tmp_path) -> Trust:
    make_secret(tmp_path / "secret")
    return Trust(Secret.read(tmp_path / "secret"), False)


def meet(
    store: Store, trusts: Trust | Sequence[Trust], monkeypatch: pytest.MonkeyPatch
) -> list[Place | Exception]:
    """Return where three processes, on a host each, are, or what they were told."""
    if isinstance(trusts, Trust):
        trusts = [trusts] * SIZE
    here = threading.local()
    monkeypatch.setattr(host_rendezvous, "this_host", lambda: f"host-{here.rank}")

    def look(rank: int) -> Place | Exception:
        here.rank = rank
        try:
            return find_place(store, trusts[rank], "run", rank, SIZE)
        except (ConfigError, PeerTimeout) as exc:
            return exc

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(look, range(SIZE)))


def test_processes_find_their_places_and_the_store_holds_no_secret(trust, monkeypatch):
    store = Store()
    places = meet(store, trust, monkeypatch)
    assert [place.host for place in places] == [0, 1, 2]
    assert len({place.start for place in places}) == 1
    everything = "".join(store.values.values())
    assert trust.secret.content.hex() not in everything


@pytest.mark.parametrize("key", [*PLACES, RUN])
def test_a_value_that_was_changed_is_refused_by_all_who_read_it(trust, monkeypatch, key):
    def change(at: str, value: str) -> str:
        return value[:-1] + chr(ord(value[-1]) ^ 1) if at == key else value

    told = meet(HostileStore(change), trust, monkeypatch)
    assert all("must be signed with the secret of this run" in str(each) for each in told)


@pytest.mark.parametrize("key", [*PLACES, RUN])
def test_a_value_that_was_taken_away_is_missed_by_name(trust, monkeypatch, key):
    store = HostileStore(lambda at, value: None if at == key else value)
    told = meet(store, trust, monkeypatch)
    assert all(isinstance(each, PeerTimeout) for each in told)
    author = int(key[-1]) if key in PLACES else 0
    assert any(
        str(each).startswith(f"The store of the job has no {key.removeprefix('phalanx/tables/')!r}")
        and str(each).endswith(f" See that rank {author} runs and calls `tables.join`.")
        for each in told
    )


def test_who_has_no_secret_is_named_on_both_sides(trust, monkeypatch):
    told = meet(Store(), [trust, Trust(None, True), trust], monkeypatch)
    for_those_with_it = "What rank 1 has written to the job's store ('place/1') is not signed, "
    assert [str(told[rank]).startswith(for_those_with_it) for rank in (0, 2)] == [True, True]
    assert str(told[1]).startswith(
        "What rank 0 has written to the job's store ('place/0') is signed with a secret, but this "
        "process has none. Bring the secret file of the others to this host"
    )


def test_a_value_that_stands_at_another_key_is_refused(trust, monkeypatch):
    older = Store()
    meet(older, trust, monkeypatch)
    swapped = {PLACES[1]: older.values[PLACES[2]]}
    store = HostileStore(lambda at, value: swapped.get(at, value))
    told = meet(store, trust, monkeypatch)
    assert all("must be signed with the secret of this run" in str(each) for each in told)


@pytest.mark.parametrize("keys", [[RUN], [PLACES[1]], [PLACES[2], RUN], [*PLACES, RUN]])
def test_values_of_an_older_start_are_refused_though_the_secret_has_signed_them(
    trust, monkeypatch, keys
):
    older = Store()
    assert all(isinstance(each, Place) for each in meet(older, trust, monkeypatch))
    store = HostileStore(lambda at, value: older.values[at] if at in keys else value)
    told = [each for each in meet(store, trust, monkeypatch) if isinstance(each, Exception)]
    assert told
    assert all("must be signed with the secret of this run" in str(each) for each in told)
    if RUN in keys:
        assert len(told) == SIZE


def test_who_believes_the_store_would_take_a_changed_place(trust, monkeypatch):
    """The mutation: whatever is signed fits."""
    believing = SimpleNamespace(compare_digest=lambda one, other: True)
    monkeypatch.setattr(host_rendezvous, "hmac", believing)
    store = HostileStore(lambda at, value: value.replace("host-1", "host-0"))
    assert [place.host for place in meet(store, trust, monkeypatch)] == [0, 0, 1]

"""Bugs that are planted in tables over several hosts, to see that somebody notices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from phalanx.cluster import Message, RemoteCall
from phalanx.errors import PeerTimeout
from phalanx.tables import part, snapshots
from phalanx.tables import table as table_module
from phalanx.tables.host_service import HostService
from phalanx.tables.own_part import OwnPart
from phalanx.tables.part import TablePart
from phalanx.tables.remote_host import RemoteHost
from phalanx.tables.router import Cut, Operation, Router
from phalanx.tables.spec import TableSpec

NUM_HOSTS = 3


def make_adds_in_python() -> None:
    """Have every add made by Python code, where bugs can be planted."""
    TablePart.add = TablePart._add_in_python  # type: ignore[method-assign]


def never_asked_again() -> None:
    """A request is sent once."""
    send = RemoteCall.send

    def send_once(self, *given):
        if self.title.startswith("sent "):
            raise TimeoutError("sent once")
        self.title = f"sent {self.title}"
        send(self, *given)

    RemoteCall.send = send_once  # type: ignore[method-assign]


def add_counted_twice() -> None:
    """A part does not know which adds it has taken."""

    def add_again(self, entry, timeout_s):
        self._add_in_python(entry._replace(number=0), timeout_s)

    TablePart.add = add_again  # type: ignore[method-assign]


def round_add_counted_twice() -> None:
    """A round's log takes whatever comes."""
    put = OwnPart.put

    def put_again(self, entry, timeout_s, number):
        put(self, entry._replace(number=0), timeout_s, number)

    OwnPart.put = put_again  # type: ignore[method-assign]


def undone_counts() -> None:
    """An add that was put back counts as taken."""
    put_back = TablePart._put_back

    def counting(self: TablePart) -> None:
        put_back(self)
        header = self._header
        self._done[header[part._WORKER]] = header[part._NUMBER]

    TablePart._put_back = counting  # type: ignore[method-assign]


def stale_accepted() -> None:
    """A worker that was taken for dead may write."""
    HostService._refuse_stale = lambda self, asked: None  # type: ignore[method-assign]


def lost_host_awaited() -> None:
    """The workers of a host that is gone count on."""
    HostService.lose_those_without_connection = lambda self: None  # type: ignore[method-assign]


def connection_stays_broken() -> None:
    """A worker whose connection breaks does not open another."""
    RemoteHost._keep = lambda self: None  # type: ignore[method-assign]


def one_at_a_time() -> None:
    """A server makes one get or add after the other."""
    answer, turn = HostService.answer, threading.Lock()

    def answer_in_turn(self, asked, link):
        waits_its_turn = asked.operation in (Operation.ADD, Operation.GET)
        with turn if waits_its_turn else nullcontext():
            return answer(self, asked, link)

    HostService.answer = answer_in_turn  # type: ignore[method-assign]


def written_in_place() -> None:
    """What is written takes the place of the older snapshot as it is written."""

    @contextmanager
    def in_place(path: Path) -> Iterator[Path]:
        path.write_bytes(b"")
        yield path

    snapshots.written_whole = in_place


def lost_rows_are_zeros() -> None:
    """Where a host does not answer, zeros are written for its rows."""
    begin = RemoteHost.begin_of

    def lost_rows(spec: TableSpec) -> list[torch.Tensor]:
        if spec.has_keys:
            return [torch.empty(0, dtype=torch.int64), torch.empty((0, 3), dtype=torch.int64)]
        return [torch.zeros((spec.rows, 4), dtype=torch.int64)]

    def begin_all_the_same(
        self: RemoteHost, spec: TableSpec, operation: Operation, *given, **asked
    ):
        call = begin(self, spec, operation, *given, **asked)
        wait = call.wait

        def wait_all_the_same():
            try:
                return wait()
            except PeerTimeout:
                if operation != Operation.SNAPSHOT:
                    raise
                return Message(
                    0,
                    operation,
                    tensors=lost_rows(Cut(spec, 0, NUM_HOSTS).part(self.endpoint.host)),
                )

        call.wait = wait_all_the_same
        return call

    RemoteHost.begin_of = begin_all_the_same  # type: ignore[method-assign]


def first_copy_kept() -> None:
    """Whatever is added, the first copy is written again."""
    copies: dict[str, list[torch.Tensor]] = {}

    def save_parts(spec, parts, *where) -> Path:
        return save(spec, copies.setdefault(spec.name, parts), *where)

    save, table_module.save_parts = table_module.save_parts, save_parts


def drafts_stay() -> None:
    """Each writer has a name of its own for what it writes."""

    @contextmanager
    def with_a_name_of_its_own(path: Path) -> Iterator[Path]:
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_bytes(b"")
        yield draft
        draft.replace(path)

    snapshots.written_whole = with_a_name_of_its_own


def silence_unheard() -> None:
    """Who waits for a round looks at the workers on its own host's page only."""
    Router.finish = lambda self, number, timeout_s: (  # type: ignore[method-assign]
        self.here.finish(number, timeout_s)
    )


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        never_asked_again,
        add_counted_twice,
        round_add_counted_twice,
        undone_counts,
        stale_accepted,
        lost_host_awaited,
        connection_stays_broken,
        one_at_a_time,
        written_in_place,
        lost_rows_are_zeros,
        first_copy_kept,
        drafts_stay,
        silence_unheard,
    )
}

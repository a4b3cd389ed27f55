"""Bugs that are planted in tables over several hosts, to see that somebody notices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

from phalanx.cluster import Connection, WorkerSession
from phalanx.tables.host_operations import Operation
from phalanx.tables.host_service import HostService
from phalanx.tables.part import TablePart, checked
from phalanx.tables.rounds import Rounds


def make_adds_in_python() -> None:
    """Have every add made by Python code, where bugs can be planted."""

    def add(self, entry, timeout_s):
        self.change(checked(entry), timeout_s, logged=False)

    TablePart.add = add  # type: ignore[method-assign]


def never_asked_again() -> None:
    """A request is sent once."""
    send = Connection._send

    def send_once(self, pending, connect_s):
        if pending.title.startswith("sent "):
            raise TimeoutError("sent once")
        pending.title = f"sent {pending.title}"
        send(self, pending, connect_s)

    Connection._send = send_once  # type: ignore[method-assign]


def add_counted_twice() -> None:
    """A shard does not know which adds it has taken."""
    make_adds_in_python()
    TablePart.has = lambda self, worker, number: False  # type: ignore[method-assign]


def round_add_counted_twice() -> None:
    """A round's log takes whatever comes."""
    put = Rounds.put

    def put_again(self, entry, timeout_s, number=None):
        put(self, entry._replace(number=0), timeout_s, number)

    Rounds.put = put_again  # type: ignore[method-assign]


def stale_accepted() -> None:
    """A worker that was taken for dead may write."""
    HostService._refuse_stale = lambda self, head: None  # type: ignore[method-assign]


def lost_host_awaited() -> None:
    """The workers of a host that is gone count on."""
    HostService.lose_those_without_session = lambda self: None  # type: ignore[method-assign]


def session_stays_broken() -> None:
    """A worker whose session breaks does not open it again."""
    WorkerSession._keep = lambda self: None  # type: ignore[method-assign]


def one_at_a_time() -> None:
    """A server makes one get or add after the other."""
    answer, turn = HostService.answer, threading.Lock()

    def answer_in_turn(self, request):
        waits_its_turn = request.head.operation in (Operation.ADD, Operation.GET)
        with turn if waits_its_turn else nullcontext():
            return answer(self, request)

    HostService.answer = answer_in_turn  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        never_asked_again,
        add_counted_twice,
        round_add_counted_twice,
        stale_accepted,
        lost_host_awaited,
        session_stays_broken,
        one_at_a_time,
    )
}

"""Bugs that are planted in tables over several hosts, to see that somebody notices."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.clock import now_s
from phalanx.cluster import Connection
from phalanx.tables.applied_numbers import AppliedNumbers
from phalanx.tables.host_service import HostService
from phalanx.tables.rounds import Rounds


def never_asked_again() -> None:
    """A request is sent once."""

    def wait_on(self, link, pending):
        pending.heard_s = now_s()

    Connection._send_again = wait_on  # type: ignore[method-assign]


def add_counted_twice() -> None:
    """A shard does not know which adds it has taken."""
    AppliedNumbers.taken = lambda self, worker, number, version: False  # type: ignore[method-assign]


def round_add_counted_twice() -> None:
    """A round's log takes whatever comes."""
    put_into = Rounds.put_into
    Rounds.put_into = lambda self, entry, number: put_into(self, entry._replace(number=0), number)  # type: ignore[method-assign]


def stale_accepted() -> None:
    """A worker that was taken for dead may write."""
    HostService._refuse_stale = lambda self, head: None  # type: ignore[method-assign]


def lost_host_awaited() -> None:
    """The workers of a host that does not answer count on."""
    HostService.mark_lost = lambda self, worker, incarnation: None  # type: ignore[method-assign]


def only_servers_heard() -> None:
    """A worker whose host's server is silent counts as lost, though it asks for something."""
    HostService.hear = lambda self, head: None  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        never_asked_again,
        add_counted_twice,
        round_add_counted_twice,
        stale_accepted,
        lost_host_awaited,
        only_servers_heard,
    )
}

"""The regions, workers and tables of a run, which the workers of one process share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.errors import StateError, UnsupportedError
from phalanx.ipc import OwnRegions, Region, Regions, RunDirectory, Waiting
from phalanx.tables.membership import Membership
from phalanx.tables.own_part import OwnPart
from phalanx.tables.spec import NAME, TableSpec
from phalanx.tables.table_memory import TableMemory

if TYPE_CHECKING:  # else runs on one host would import what speaks to others
    from phalanx.tables.remote_host import RemoteHost

_SPEC_BYTES = 8192


class RunContext:
    """The objects that the workers of one process share, and that a host's server has.

    Args:
        run: The run's name on this host, or None for this process alone.

    Attributes:
        run: As given.
        regions: Its memory.
        membership: Its workers.
        host: This host's number.
        num_hosts: How many there are.
        connect: Returns the other hosts, in their order, for the worker of this number.
        end: Called when this process leaves the run.
        store: The job's, kept because this process may be the one that serves it.
    """

    def __init__(self, run: str | None) -> None:
        self.run = run
        self.regions: Regions = OwnRegions() if run is None else RunDirectory.join(f"tables-{run}")
        self.host, self.num_hosts = 0, 1
        self.connect: Callable[[int], list[RemoteHost]] = lambda worker: []  # noqa: ARG005
        self.end: Callable[[float], object] = bool
        self.store: object = None
        self._mutex = threading.Lock()
        self._parts: dict[str, OwnPart] = {}  # by table
        self._num_open = 0  # workers of this process
        try:
            page = self.regions.open_region("members", Membership.needed_bytes())
        except BaseException:
            self.regions.close()
            raise
        self.membership = Membership(page, "this process" if run is None else run)

    # --- workers ----------------------------------------------------------------------------------

    def enter(
        self, worker: int | None, num_expected: int | None, timeout_s: float
    ) -> tuple[int, list[RemoteHost]]:
        """Become a worker on every host; return its number, and the other hosts as it knows them.

        Raises:
            ConfigError: As :meth:`Membership.enter`.
            UnsupportedError: There are several hosts, and it has no number.
        """
        if worker is None and self.num_hosts > 1:
            raise UnsupportedError(
                "Workers on several hosts must be the processes that were started, but one of them "
                "wants a number for a thread. Start more processes."
            )
        waiting = Waiting(timeout_s)
        number = self.membership.enter(worker, num_expected, timeout_s)
        remotes = self.connect(number)
        try:
            for remote in remotes:
                remote.enter(num_expected, waiting.remaining_s())
        except BaseException:
            for remote in remotes:  # those that it has entered see the end
                remote.close()
            self.membership.leave(number, self.membership.incarnation(number), timeout_s)
            raise
        with self._mutex:
            self._num_open += 1
        return number, remotes

    def count_out(self, timeout_s: float) -> None:
        """Let a worker of this process go; the last one closes the context."""
        with self._mutex:
            self._num_open -= 1
            is_last = self._num_open == 0
        if is_last:
            self.close(timeout_s)  # without the mutex, which a thread in a table may need

    # --- tables -----------------------------------------------------------------------------------

    def part(self, spec: TableSpec, timeout_s: float) -> OwnPart:
        """Return this host's part of a table, made if this process has none of it."""
        self._agree_on(spec, timeout_s)
        with self._mutex:
            if spec.name not in self._parts:
                self._parts[spec.name] = OwnPart(spec, self.regions, self.membership)
            return self._parts[spec.name]

    def known_part(self, name: str, timeout_s: float) -> OwnPart:
        """Return this host's part of a table that somebody here has opened.

        Raises:
            StateError: No worker has.
        """
        found = self._parts.get(name)
        if found is None:
            text = ""
            with suppress(StateError):
                if NAME.fullmatch(name):  # it may come from another host
                    text = read_text(self.regions.open_region(f"spec-{name}", 0, create=False))
            if not text:
                raise StateError(f"Table {name!r} must be opened first, but is not.")
            found = self.part(TableSpec.from_json(text), timeout_s)
        return found

    def _agree_on(self, spec: TableSpec, timeout_s: float) -> None:
        """Write the spec down as the table's first worker, or compare it with what that one gave.

        The table's memory is taken first: where there is not enough, the name stays free.
        """
        page = self.regions.open_region(f"spec-{spec.name}", _SPEC_BYTES)
        with self.membership.lock.held(timeout_s):
            if text := read_text(page):
                spec.refuse_other(json.loads(text))
                return
            TableMemory(spec, self.regions, self.membership.worker_of)
            write_text(page, spec.to_json())

    def close(self, timeout_s: float) -> None:
        """Close all tables, and leave the run."""
        self.end(timeout_s)
        self._parts.clear()
        self.regions.close()


def read_text(page: Region) -> str:
    """Return what :func:`write_text` wrote; an empty text before it has ended."""
    length = page.buffer[:8].cast("q")[0]
    return bytes(page.buffer[8 : 8 + length]).decode()


def write_text(page: Region, text: str) -> None:
    """Write a text into a page; it counts when its length is written."""
    encoded = text.encode()
    page.buffer[8 : 8 + len(encoded)] = encoded
    page.buffer[:8].cast("q")[0] = len(encoded)

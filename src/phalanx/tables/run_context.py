"""The regions, workers and tables of a run, which the workers of one process share."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.errors import PhalanxError, StateError, UnsupportedError
from phalanx.ipc import Waiting
from phalanx.tables.cut import part_of
from phalanx.tables.membership import Membership
from phalanx.tables.own_part import OwnPart
from phalanx.tables.router import Router
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import NAME, TableSpec
from phalanx.tables.table_memory import TableMemory

if TYPE_CHECKING:  # else runs on one host would import what speaks to others
    from phalanx.tables.remote_part import RemoteHost

_SPEC_BYTES = 8192
_LEAVE_S = 5.0
_CALL_S = 30.0


class RunContext:
    """What the workers of one process share, and a host's server has.

    Args:
        run: The run's name on this host, or None for this process alone.
        create: Whether to begin the run if nobody has.

    Raises:
        StateError: There is no such run, and ``create`` is False.
    """

    def __init__(self, run: str | None, *, create: bool) -> None:
        self.run = run
        self.regions = RunRegions(run)
        self._mutex = threading.Lock()
        self._parts: dict[str, OwnPart] = {}  # by table
        self.routers: weakref.WeakSet[Router] = weakref.WeakSet()
        self._num_open = 0  # workers of this process
        self.has_others(0, 1, list, lambda _: None, None)
        try:
            nbytes = Membership.needed_bytes()
            page = self.regions.open_region("members", nbytes, create=create or run is None)
        except BaseException as exc:
            self.regions.close()
            if not isinstance(exc, StateError):
                raise
            raise StateError(
                f"Run {run!r} must have been begun by another worker, but is not there. Start that "
                "one first, or join with `create=True`."
            ) from exc
        self.membership = Membership(page, "this process" if run is None else run)

    def has_others(
        self,
        host: int,
        num_hosts: int,
        connect: Callable[[], list[RemoteHost]],
        end: Callable[[float], None],
        store: object,
    ) -> None:
        """Make this the run's share of one host.

        Args:
            host: This host's number.
            num_hosts: How many there are.
            connect: Returns the others, in their order, for a new worker.
            end: Called when this process leaves the run.
            store: The job's, kept because this process may be the one that serves it.
        """
        self._host, self._num_hosts = host, num_hosts
        self._connect, self._end, self._store = connect, end, store

    # --- workers ----------------------------------------------------------------------------------

    def enter(self, worker: int | None, num_expected: int | None, timeout_s: float) -> RunWorker:
        """Become a worker on every host; the first host gives the numbers out.

        Raises:
            ConfigError: As :meth:`Membership.enter`.
        """
        waiting, remotes, number = Waiting(timeout_s), self._connect(), None
        others = list(remotes)
        try:
            if worker is None and self._host != 0:
                worker = others.pop(0).enter(None, num_expected, waiting.remaining_s())
            number = self.membership.enter(
                worker=worker, num_expected=num_expected, timeout_s=timeout_s
            )
            for remote in others:
                remote.enter(number, num_expected, waiting.remaining_s())
        except BaseException:
            for remote in remotes:  # those that it has entered see the end
                remote.close()
            if number is not None:
                self.membership.leave(number, self.membership.incarnation(number), timeout_s)
            raise
        with self._mutex:
            self._num_open += 1
        return RunWorker(self, number, remotes)

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
        host, num_hosts = self._host, self._num_hosts
        if num_hosts > 1 and not spec.updater.is_built_in:
            raise UnsupportedError(
                "`updater` must be a built-in one for tables on several hosts, but is "
                f"{spec.updater!r}. Servers run no code of yours."
            )
        self._agree_on(part_of(spec, host, num_hosts), timeout_s)
        with self._mutex:
            if spec.name not in self._parts:
                own = OwnPart(spec, self.regions, self.membership, host=host, num_hosts=num_hosts)
                self._parts[spec.name] = own
            return self._parts[spec.name]

    def _agree_on(self, spec: TableSpec, timeout_s: float) -> None:
        """Write the spec down as the table's first worker, or compare it with what that one gave.

        The table's memory is taken first: where there is not enough, the name stays free.
        """
        words = self.regions.open_region(f"spec-{spec.name}", _SPEC_BYTES).buffer
        length = words[:8].cast("q")
        with self.membership.lock.held(timeout_s):
            if length[0]:
                spec.refuse_other(json.loads(bytes(words[8 : 8 + length[0]])))
                return
            memory = TableMemory(spec, self.regions)
            if spec.has_keys:
                memory.reserve_rows(0, spec.capacity)
            text = json.dumps(spec.as_mapping()).encode()
            words[8 : 8 + len(text)] = text
            length[0] = len(text)

    def known_spec(self, name: str) -> TableSpec | None:
        """Return what the table of that name is, if somebody on this host has opened it."""
        if not NAME.fullmatch(name):  # it may come from another host
            return None
        try:
            words = self.regions.open_region(f"spec-{name}", _SPEC_BYTES, create=False).buffer
        except StateError:
            return None
        length = words[:8].cast("q")[0]
        return TableSpec.from_mapping(json.loads(bytes(words[8 : 8 + length]))) if length else None

    def close(self, timeout_s: float) -> None:
        """Close all tables, and leave the run."""
        self._end(timeout_s)
        # The memory goes, though somebody keeps a handle of a table.
        for each in (*self.routers, *self._parts.values()):
            vars(each).clear()
        self._parts.clear()
        self.regions.close()


class RunWorker:
    """A worker of this process, which is one on each host of the run.

    Args:
        context: The run.
        number: The worker's.
        remotes: The other hosts, in their order, as the worker reaches them.

    Attributes:
        number: As given.
        remotes: As given.
    """

    def __init__(self, context: RunContext, number: int, remotes: list[RemoteHost]) -> None:
        self.number = number
        self.remotes = remotes
        self._context = context
        self._membership = context.membership
        self._incarnation = context.membership.incarnation(number)
        self._routers: dict[str, Router] = {}  # one of each table, since it numbers the adds

    @property
    def is_here(self) -> bool:
        """Whether it counts: it has not left, and has not been taken for dead."""
        return self._membership.is_here(self.number, self._incarnation)

    def router(self, spec: TableSpec, timeout_s: float) -> Router:
        """Return the table's memory on all hosts, as this worker uses it.

        Raises:
            ConfigError: Another worker made a table of this name and of another kind.
            UnsupportedError: There are several hosts, and its updater is none of ours.
        """
        here = self._context.part(spec, timeout_s)
        if spec.name not in self._routers:
            router = Router(spec, here, self.number, self.remotes)
            self._routers[spec.name] = router
            self._context.routers.add(router)
        return self._routers[spec.name]

    def tick(self) -> int:
        """Count a tick on all hosts, and return how many that makes."""
        clock = self._membership.advance(self.number)
        for remote in self.remotes:
            remote.tick(clock, _CALL_S)
        return clock

    def wait_at_barrier(self, timeout_s: float) -> int:
        """Come to the first host's barrier, where all workers come, and wait for the others."""
        if self.remotes and self.remotes[0].host == 0:
            return self.remotes[0].wait_at_barrier(timeout_s)
        return self._membership.wait_at_barrier(self.number, timeout_s)

    def leave(self, timeout_s: float) -> None:
        """Stop counting on all hosts; one that does not answer finds out by itself."""
        self._membership.leave(self.number, self._incarnation, timeout_s)
        for remote in self.remotes:
            with suppress(PhalanxError):
                remote.leave(min(timeout_s, _LEAVE_S))

    def close(self, timeout_s: float) -> None:
        """Let go of everything that is this worker's alone; with the last one, of all."""
        for remote in self.remotes:
            remote.close()
        self._context.count_out(timeout_s)

"""The regions, workers and tables of a run, which the workers of one process share."""

from __future__ import annotations

import json
import threading
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
    """What the workers of one process share; on several hosts each is a worker on all of them.

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
        self._storages: dict[str, Router] = {}
        self._num_open = 0  # workers of this process
        self._remotes: dict[int, list[RemoteHost]] = {}  # by worker, in the order of hosts
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

    def enter(self, worker: int | None, num_expected: int | None, timeout_s: float) -> int:
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
            self._remotes[number] = remotes
            self._num_open += 1
        return number

    def remotes_of(self, worker: int) -> list[RemoteHost]:
        """Return the other hosts, as a worker of this process knows them.

        Raises:
            StateError: It has closed.
        """
        remotes = self._remotes.get(worker) if self._num_hosts > 1 else []
        if remotes is None:
            raise StateError(
                f"A worker must be of the run, but worker {worker} has closed. Let its calls end "
                "before `close()`."
            )
        return remotes

    def leave(self, worker: int, incarnation: int, timeout_s: float) -> None:
        """Stop counting ``worker`` on all hosts; one that does not answer finds out by itself."""
        self.membership.leave(worker, incarnation, timeout_s)
        for remote in self.remotes_of(worker):
            with suppress(PhalanxError):
                remote.leave(min(timeout_s, _LEAVE_S))

    def tick(self, worker: int) -> int:
        """Count a tick of ``worker`` on all hosts, and return how many that makes."""
        clock = self.membership.advance(worker)
        for remote in self.remotes_of(worker):
            remote.tick(clock, _CALL_S)
        return clock

    def wait_at_barrier(self, worker: int, timeout_s: float) -> int:
        """Come to the first host's barrier, where all workers come, and wait for the others."""
        if self._host == 0:
            return self.membership.wait_at_barrier(worker, timeout_s)
        return self.remotes_of(worker)[0].wait_at_barrier(timeout_s)

    # --- tables -----------------------------------------------------------------------------------

    def storage(self, spec: TableSpec, timeout_s: float) -> Router:
        """Return the memory of a table, made if this process has none of it.

        Raises:
            ConfigError: Another worker made a table of this name and of another kind.
            UnsupportedError: There are several hosts, and its updater is none of ours.
        """
        host, num_hosts = self._host, self._num_hosts
        if num_hosts > 1 and not spec.updater.is_built_in:
            raise UnsupportedError(
                "`updater` must be a built-in one for tables on several hosts, but is "
                f"{spec.updater!r}. Servers run no code of yours."
            )
        self._agree_on(part_of(spec, host, num_hosts), timeout_s)
        with self._mutex:
            if spec.name not in self._storages:
                own = OwnPart(spec, self.regions, self.membership, host=host, num_hosts=num_hosts)
                self._storages[spec.name] = Router(
                    spec, own, self.remotes_of if num_hosts > 1 else None
                )
            return self._storages[spec.name]

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

    # --- the end ----------------------------------------------------------------------------------

    def count_out(self, worker: int, timeout_s: float) -> None:
        """Let go of what a worker of this process had; the last one closes the context."""
        with self._mutex:
            remotes = self._remotes.pop(worker, [])
            self._num_open -= 1
            is_last = self._num_open == 0
        for storage in list(self._storages.values()):
            storage.forget(worker)
        for remote in remotes:
            remote.close()
        if is_last:
            self.close(timeout_s)  # without the mutex, which a thread in a table may need

    def close(self, timeout_s: float) -> None:
        """Close all tables, and leave the run."""
        self._end(timeout_s)
        for storage in list(self._storages.values()):
            storage.close()
        self.regions.close()
        self._storages.clear()

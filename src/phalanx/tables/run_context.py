"""The regions, members and tables of a run, which the workers of one process share."""

from __future__ import annotations

import json
import threading

from phalanx.errors import StateError
from phalanx.tables.cut import part_of
from phalanx.tables.membership import Membership
from phalanx.tables.own_part import OwnPart
from phalanx.tables.router import RemoteParts, Router
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import NAME, TableSpec
from phalanx.tables.table_memory import TableMemory

_SPEC_BYTES = 8192


class RunContext:
    """What the workers of one process share: the run's regions, members and tables.

    Args:
        run: The run's name, or None for this process alone.
        create: Whether to begin the run if nobody has.

    Raises:
        StateError: There is no such run, and ``create`` is False.
    """

    def __init__(self, run: str | None, *, create: bool) -> None:
        self.run = run
        self.regions = RunRegions(run)
        self._host, self._num_hosts = 0, 1
        self._mutex = threading.Lock()
        self._storages: dict[str, Router] = {}
        self._groups: set[int] = set()  # those of this process that are open, by `id`
        try:
            self.membership = self._open_membership(create or run is None)
        except BaseException:
            self.regions.close()
            raise

    def _open_membership(self, create: bool) -> Membership:
        try:
            page = self.regions.open_region("members", Membership.needed_bytes(), create=create)
        except StateError as exc:
            raise StateError(
                f"Run {self.run!r} must have been begun by another worker, but is not there. Start "
                "that one first, or join with `create=True`."
            ) from exc
        return Membership(page, "this process" if self.run is None else self.run)

    def storage(self, spec: TableSpec, timeout_s: float) -> Router:
        """Return the memory of a table, made if this process has none of it.

        Raises:
            ConfigError: Another worker made a table of this name and of another kind.
        """
        host, num_hosts = self._host, self._num_hosts
        self._agree_on(part_of(spec, host, num_hosts), timeout_s)
        with self._mutex:
            if spec.name not in self._storages:
                own = OwnPart(spec, self.regions, self.membership, host=host, num_hosts=num_hosts)
                self._storages[spec.name] = Router(spec, own, self._remote_parts(spec))
            return self._storages[spec.name]

    def _remote_parts(self, spec: TableSpec) -> RemoteParts | None:  # noqa: ARG002 - of hosts
        """Return what returns a table's parts on other hosts, where there are others."""
        return None

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

    def enter(self, worker: int | None, num_expected: int | None, timeout_s: float) -> int:
        """Become a worker, and return its number; see :meth:`Membership.enter`."""
        return self.membership.enter(worker=worker, num_expected=num_expected, timeout_s=timeout_s)

    def leave(self, worker: int, incarnation: int, timeout_s: float) -> None:
        """Stop counting ``worker``."""
        self.membership.leave(worker, incarnation, timeout_s)

    def tick(self, worker: int) -> int:
        """Count a tick of ``worker``, and return how many that makes."""
        return self.membership.advance(worker)

    def wait_at_barrier(self, worker: int, timeout_s: float) -> int:
        """Come to the next barrier, and wait for the others."""
        return self.membership.wait_at_barrier(worker, timeout_s)

    def count_in(self, group: object) -> None:
        """Count in what a worker of this process uses."""
        with self._mutex:
            self._groups.add(id(group))

    def count_out(self, group: object, worker: int, timeout_s: float) -> None:
        """Count it out, if it still counts; the last one closes the context."""
        with self._mutex:
            self._groups.discard(id(group))
            is_last = not self._groups
        for storage in list(self._storages.values()):
            storage.forget(worker)
        if is_last:
            self.close(timeout_s)  # without the mutex, which a thread in a table may need

    def close(self, timeout_s: float) -> None:  # noqa: ARG002 - of hosts
        """Close all tables, and leave the run."""
        for storage in list(self._storages.values()):
            storage.close()
        self.regions.close()
        self._storages.clear()

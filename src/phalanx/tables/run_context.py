"""The regions, locks and tables of a run, which the workers of one process share."""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any, TypeVar

from phalanx.errors import StateError
from phalanx.ipc import Region, RunDirectory
from phalanx.tables.key_storage import KeyStorage
from phalanx.tables.membership import Barrier, Membership
from phalanx.tables.rounds import OpenRegion
from phalanx.tables.spec import TableSpec
from phalanx.tables.storage import Storage

__all__ = ["RunContext"]

S = TypeVar("S", Storage, KeyStorage)

_SPEC_BYTES = 8192


class RunContext:
    """What the workers of one process share: the run's regions, locks and tables."""

    def __init__(self, run: str | None) -> None:
        self.run = run
        self._directory = None if run is None else RunDirectory.join(f"tables-{run}")
        self._regions: dict[str, Region] = {}  # of a run that is this process alone
        self._mutex = threading.RLock()
        self._storages: dict[str, Any] = {}  # each of the kind that its spec says
        self._barrier: Barrier | None = None
        self._num_workers = 0
        if self._directory is not None:  # at the latest when the interpreter ends
            weakref.finalize(self, self._directory.close)

    def enter(self, *, create: bool) -> None:
        """Open the page; not in ``__init__``, so that a failure can leave the run again."""
        region = self.open_region("members", Membership.needed_bytes(), create=create)
        self.membership = Membership(region, "this process" if self.run is None else self.run)

    def open_region(self, name: str, nbytes: int, *, create: bool = True) -> Region:
        if self._directory is not None:
            return self._directory.open_region(name, nbytes, create=create)
        with self._mutex:
            if name not in self._regions:
                if not create:
                    raise StateError(f"Region {name!r} must be made first, but is not there.")
                self._regions[name] = Region.create(nbytes, label=name)
            return self._regions[name]

    def remove_region(self, name: str) -> None:
        if self._directory is not None:
            self._directory.remove_region(name)
            return
        with self._mutex:
            self._regions.pop(name, None)

    def storage(self, kind: type[S], spec: TableSpec, timeout_s: float) -> S:
        """Return the memory of a table, made if this process has none of it."""
        _agree_on(spec, kind.regions(spec), self.open_region, self.membership, timeout_s)
        with self._mutex:
            if spec.name not in self._storages:
                self._storages[spec.name] = kind(spec, self, self.membership)
            found: S = self._storages[spec.name]
            return found

    def barrier(self) -> Barrier:
        with self._mutex:
            if self._barrier is None:
                region = self.open_region("barriers", Barrier.needed_bytes())
                self._barrier = Barrier(region, self.membership)
            return self._barrier

    def count_in(self) -> None:
        """Count a worker of this process in."""
        with self._mutex:
            self._num_workers += 1

    def count_out(self, timeout_s: float) -> None:
        """Count a worker of this process out; the last one closes the context.

        Raises:
            StateError: A thread was in a table all the time. The worker still counts.
        """
        with self._mutex:
            self._num_workers -= 1
            is_last = self._num_workers == 0
        if not is_last:
            return
        try:
            self.close(timeout_s)  # without the mutex, which a thread in a table may need
        except BaseException:
            self.count_in()
            raise

    def close(self, timeout_s: float) -> None:
        for storage in list(self._storages.values()):
            storage.close(timeout_s)
        if hasattr(self, "membership"):
            self.membership.close(timeout_s)
        if self._directory is not None:
            self._directory.close()
        self._storages, self._regions = {}, {}


def _agree_on(
    spec: TableSpec,
    regions: dict[str, int],
    open_region: OpenRegion,
    membership: Membership,
    timeout_s: float,
) -> None:
    """Write the spec down as the table's first worker, or compare it with what that one gave.

    The table's memory is taken first: where there is not enough, the name stays free.

    Raises:
        ConfigError: Another worker made a table of this name and of another kind.
    """
    words = open_region(f"spec-{spec.name}", _SPEC_BYTES).buffer
    length = words[:8].cast("q")
    with membership.lock.exclusive(timeout_s):
        if length[0]:
            spec.refuse_other(json.loads(bytes(words[8 : 8 + length[0]])))
            return
        for name, nbytes in regions.items():
            open_region(name, nbytes)
        text = spec.to_json().encode()
        words[8 : 8 + len(text)] = text
        length[0] = len(text)

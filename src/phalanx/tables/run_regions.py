"""The source of a run's regions: its directory, or this process's own memory."""

from __future__ import annotations

import threading
import weakref

from phalanx.errors import StateError
from phalanx.ipc import Region, RunDirectory


class RunRegions:
    """The regions of a run, by name.

    Args:
        run: The run's name, or None for this process alone.
    """

    def __init__(self, run: str | None) -> None:
        self.directory = None if run is None else RunDirectory.join(f"tables-{run}")
        self._own: dict[str, Region] = {}  # of this process alone
        self._mutex = threading.Lock()
        if self.directory is not None:  # at the latest when the interpreter ends
            weakref.finalize(self, self.directory.close)

    def open_region(
        self, name: str, nbytes: int, *, create: bool = True, reserved: int | None = None
    ) -> Region:
        """Return the region of that name and size; see :meth:`RunDirectory.open_region`."""
        if self.directory is not None:
            return self.directory.open_region(name, nbytes, create=create, reserved=reserved)
        with self._mutex:
            if name not in self._own:
                if not create:
                    raise StateError(f"Region {name!r} must be made first, but is not there.")
                self._own[name] = Region.create(nbytes, label=name, reserved=reserved)
            return self._own[name]

    def close(self) -> None:
        """Leave the run's directory, which its last member removes."""
        if self.directory is not None:
            self.directory.close()
        self._own.clear()

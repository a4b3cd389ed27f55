"""One shard of a keys table: segments, each larger than the one before.

    line     NEWEST | OLDEST          NEWEST = number · 2^8 + log2 of the capacity: one store
    regions  keys-<shard>-<number>-<table>

A segment is filled before NEWEST names it. A writer looks at NEWEST when it has the lock, and
starts over if another segment has come. A reader may finish in the old one: it was replaced during
that read, and its rows are as they were then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from phalanx.errors import OutOfSpace, StateError
from phalanx.ipc import Mutex, Waiting, fail_point
from phalanx.tables.hash_segment import HashSegment, SegmentFull, StaleSegment, segment_bytes
from phalanx.tables.part import Entry
from phalanx.tables.row_initializer import RowInit, RowInitializer
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableSpec

__all__ = ["MAX_CAPACITY", "POINTS", "KeyShard", "first_region"]

POINTS = ("growth begun", "half the keys copied", "growth ready", "growth done")
"""Fail points of a growth, in order."""

_NEWEST, _OLDEST = range(2)
_SERIAL = 1 << 8
_LEAST_EXPONENT, _MOST_EXPONENT = 4, 30
MAX_CAPACITY = 1 << _MOST_EXPONENT  # of a shard: slots are written in 32 bits

T = TypeVar("T")


def _region_name(spec: TableSpec, index: int, serial: int) -> str:
    return f"keys-{index}-{serial}-{spec.name}"


def _exponent_for(num_keys: int) -> int:
    return max(_LEAST_EXPONENT, (num_keys - 1).bit_length())


def _first_exponent(spec: TableSpec) -> int:
    return _exponent_for(-(-spec.capacity // spec.num_shards))


def first_region(spec: TableSpec, index: int) -> tuple[str, int]:
    """Return name and size of a shard's first segment."""
    return _region_name(spec, index, 0), segment_bytes(spec, 1 << _first_exponent(spec))


class KeyShard:
    """The shard, as one process sees it; used as a :class:`~phalanx.tables.part.TablePart` is.

    Args:
        spec: The table.
        index: The shard's number.
        line: Its line of the table's page.
        lock: Held alone to change anything, or to grow.
        row_initializer: What a row holds at first.
        regions: Where segments lie.
        seed: Tells the seed of the table's indices, once it has been made.
        done: For each worker the number of its last add that is in.
        logged: Returns what of a logged add is this shard's, by worker and number.
    """

    first_row = 0  # rows are keys, and no shard counts them from elsewhere

    def __init__(
        self,
        spec: TableSpec,
        index: int,
        line: memoryview,
        lock: Mutex,
        row_initializer: RowInitializer,
        regions: RunRegions,
        seed: Callable[[], int],
        done: memoryview,
        logged: Callable[[int, int], Entry],
    ) -> None:
        self._spec = spec
        self._index = index
        self._line = line
        self._lock = lock
        self._row_initializer = row_initializer
        self._regions = regions
        self._seed = seed
        self._done = done
        self._logged = logged
        self._known: HashSegment | None = None

    def begin(self, init: RowInit) -> None:
        """Make the first segment of a new table; ``init`` is what a row holds at first."""
        self._row_initializer.write(init)
        self._line[_NEWEST] = _first_exponent(self._spec)
        self.newest().make_header()

    def close(self) -> None:
        """Let go of the segment, which knows this shard, so that both go at once."""
        self._known = None

    @property
    def num_rows(self) -> int:
        """How many keys are there."""
        return self.newest().num_keys()

    @property
    def num_undone(self) -> int:
        """How many interrupted adds were undone."""
        return self.newest().num_undone

    @property
    def nbytes(self) -> int:
        """How much memory the newest segment takes."""
        return self.newest().nbytes

    def _serial(self) -> int:
        return self._line[_NEWEST] // _SERIAL

    def newest(self) -> HashSegment:
        """Return the segment that counts now."""
        known = self._known
        while known is None or known.serial != self._serial():
            word = self._line[_NEWEST]
            try:
                known = self._open(word, create=False)
            except StateError:
                if self._line[_NEWEST] == word:
                    raise
                continue  # it was replaced, and removed, before we could open it
            self._known = known
            self._remove_older(known.serial)
        return known

    def _open(self, word: int, *, create: bool) -> HashSegment:
        serial, exponent = divmod(word, _SERIAL)
        nbytes = segment_bytes(self._spec, 1 << exponent)
        name = _region_name(self._spec, self._index, serial)
        return HashSegment(
            self._spec,
            serial,
            1 << exponent,
            self._regions.open_region(name, nbytes, create=create),
            self._lock,
            self._row_initializer,
            self._serial,
            self._seed(),
            self._done,
            self._logged,
        )

    # --- as a shard of any table ------------------------------------------------------------------

    def read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> None:
        self._call(lambda found, left_s: found.read(rows, out, left_s), timeout_s)

    def num_new(self, entry: Entry) -> int:
        """Return how many keys of an add are not there, each counted once."""
        assert entry.rows is not None
        return self.newest().num_new(entry.rows.numpy())

    def make_room(self, num_new: Callable[[], int], timeout_s: float) -> None:
        """Have room for so many new keys; ``num_new`` is asked with the lock held.

        Raises:
            OutOfSpace: There is no memory for them.
        """
        self._call(lambda found, left_s: found.require_room(num_new, left_s), timeout_s)

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all; make room for its new keys first."""
        self._call(lambda found, left_s: found.add(entry, left_s), timeout_s)

    def change(self, entry: Entry, timeout_s: float, *, logged: bool) -> None:
        self._call(lambda found, left_s: found.change(entry, left_s, logged=logged), timeout_s)

    def has(self, worker: int, number: int) -> bool:
        return self._done[worker] >= number

    def takes_at_once(self, entry: Entry) -> bool:
        return self.newest().takes_at_once(entry)

    def copy_keys(self, timeout_s: float) -> Tensor:
        return self._call(lambda found, _: found.copy_keys(), timeout_s)

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        return self._call(lambda found, left_s: found.copy_all(left_s), timeout_s)

    def _call(self, call: Callable[[HashSegment, float], T], timeout_s: float) -> T:
        waiting, left_s = Waiting(timeout_s), timeout_s
        while True:
            found = self.newest()
            try:
                return call(found, left_s)
            except StaleSegment:
                pass
            except SegmentFull as full:
                self._grow(found, full.num_keys, waiting.remaining_s())
            left_s = waiting.remaining_s()

    # --- segments ------------------------------------------------------------------------------

    def _grow(self, old: HashSegment, num_keys: int, timeout_s: float) -> None:
        if num_keys > MAX_CAPACITY:
            raise OutOfSpace(
                f"A shard of table {self._spec.name!r} must have at most {MAX_CAPACITY} keys, but "
                f"{num_keys} are to come. Make the table with more `num_shards`.",
                None,
                None,
            )
        with self._lock.held(timeout_s):
            if self._serial() == old.serial:  # else somebody else was first
                old.settle()
                self._publish(_exponent_for(num_keys), lambda new: new.grow_from(old))

    def replace_all(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Replace everything by these keys, each once, and their values and states."""
        keys, *others = parts
        with self._lock.held(timeout_s):
            old = self.newest()
            old.settle()
            exponent = max(_exponent_for(len(keys)), _first_exponent(self._spec))
            self._publish(exponent, lambda new: new.take_over(old, keys, others))

    def _publish(self, exponent: int, fill: Callable[[HashSegment], None]) -> None:
        line, serial = self._line, self._serial() + 1
        fail_point("growth begun")
        self._regions.remove_region(self._name(serial))  # of a process that died filling it
        new = self._open(serial * _SERIAL + exponent, create=True)
        fill(new)
        fail_point("growth ready")
        line[_NEWEST] = serial * _SERIAL + exponent
        self._known = new
        fail_point("growth done")
        self._remove_older(serial)

    def _remove_older(self, serial: int) -> None:
        """Let go of the memory of earlier segments; each process does so that opens a new one.

        Needs no lock: numbers are not reused, so nobody can want an older segment.
        """
        for old in range(self._line[_OLDEST], serial):
            self._regions.remove_region(self._name(old))
        self._line[_OLDEST] = serial

    def _name(self, serial: int) -> str:
        return _region_name(self._spec, self._index, serial)

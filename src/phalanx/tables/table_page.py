"""The words that a table's processes share beside its rows, at the begin of its region.

    line 0         table     READY | APPLIED | TAKEN | · | · | · | · | SEED
    line 1 + i     shard i   its header (shard.py), or its segments (key_shard.py)
    line 257 + w   worker w  CLOCK | round, count | round, count | ARRIVED_AS | CLAIMED | CLAIMED_AS
    then           the locks: of line 0, then one for each shard

Words have 8 bytes, lines 8 words. Line 0 is written with its lock held, that of a worker by this
worker alone. ARRIVED_AS and CLAIMED_AS are the incarnations that wrote CLOCK and CLAIMED; where
ARRIVED_AS is negative, the worker came to round CLOCK + 1 as well, and gave it up.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.ipc import Mutex, Region
from phalanx.tables.membership import MAX_WORKERS

__all__ = [
    "APPLIED",
    "ARRIVED_AS",
    "CLAIMED",
    "CLAIMED_AS",
    "CLOCK",
    "LOGS",
    "MAX_SHARDS",
    "READY",
    "SEED",
    "TAKEN",
    "TablePage",
]

MAX_SHARDS = 256
READY, APPLIED, TAKEN = range(3)
"""Whether the table has its first values; the last round applied, and the last begun."""
SEED = 7
"""Of the indices of a keys table, drawn by the worker that makes it."""
CLOCK, LOGS, ARRIVED_AS, CLAIMED, CLAIMED_AS = 0, 1, 5, 6, 7
"""A worker's last round, its two logs (rounds.py), and its claims (key_storage.py)."""
_WORDS = 8


class TablePage:
    """The page, as one process sees it.

    Args:
        region: The table's, zeros at first.

    Attributes:
        table: Line 0.
        workers: The lines of all workers.
    """

    LINE_BYTES = 8 * _WORDS
    _LOCKS = LINE_BYTES * (1 + MAX_SHARDS + MAX_WORKERS)
    NBYTES = _LOCKS + Mutex.NBYTES * (1 + MAX_SHARDS)

    def __init__(self, region: Region) -> None:
        self._region = region
        self._words = region.buffer[: self._LOCKS].cast("q")
        self.table = self._line(0)
        self.workers = self._words[_WORDS * (1 + MAX_SHARDS) :]

    def shard(self, index: int) -> memoryview:
        """Return the line of a shard."""
        return self._line(1 + index)

    def lock(self, index: int, label: str, rank_of: Callable[[int], int | None]) -> Mutex:
        """Return a lock: that of line 0, or of shard ``index - 1``."""
        at = self._LOCKS + Mutex.NBYTES * index
        return Mutex(self._region.buffer[at : at + Mutex.NBYTES], label, rank_of)

    def worker(self, worker: int) -> memoryview:
        """Return the line of a worker."""
        return self._line(1 + MAX_SHARDS + worker)

    def of_workers(self, word: int) -> list[int]:
        """Return one word of every worker's line."""
        return self.workers[word::_WORDS].tolist()

    def _line(self, index: int) -> memoryview:
        return self._words[_WORDS * index : _WORDS * (index + 1)]

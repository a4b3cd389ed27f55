"""The words and locks that a table's processes share beside its rows, at the begin of its region.

    table      READY | APPLIED | TAKEN | · | · | · | · | SEED
    shard i    its header (part.py)
    worker w   CLOCK | ARRIVED_AS | NUMBER | TAIL | FINISHED | ROUND, COUNT | ROUND, COUNT |
               CLAIMED | LOGGED_AS | ·
    DONE       of each shard, a word for each worker (part.py)
    UNFINISHED a byte for each log: it may hold adds that are not in all shards (log.py)
    locks      of the table; of each shard; of each worker's log

Words have 8 bytes. The table's are written with its lock held, those of a worker by this worker
alone, or with its log's lock held. LOGGED_AS is the incarnation that wrote the log, ARRIVED_AS the
one that wrote CLOCK; where it is negative, the worker came to round CLOCK + 1 as well, and gave it
up. Behind the workers' lines are two of logs of the table's own.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.ipc import Mutex, Region
from phalanx.tables.membership import MAX_WORKERS

__all__ = [
    "APPLIED",
    "ARRIVED_AS",
    "CLAIMED",
    "CLOCK",
    "FINISHED",
    "LOGGED_AS",
    "LOGS",
    "MAX_SHARDS",
    "MERGED",
    "NUMBER",
    "NUM_LOGS",
    "READY",
    "RESTORED",
    "SEED",
    "TAIL",
    "TAKEN",
    "TablePage",
]

MAX_SHARDS = 256
MERGED, RESTORED = MAX_WORKERS, MAX_WORKERS + 1
"""Under which numbers adds are made that no worker makes alone: merged rounds, and restores."""
READY, APPLIED, TAKEN = range(3)
"""Whether the table has its first values; the last round applied, and the last begun."""
SEED = 7
"""By which a keys table's keys belong to shards, drawn by the worker that makes it."""
CLOCK, ARRIVED_AS, NUMBER, TAIL, FINISHED, LOGS = range(6)
"""A worker's last round, as whom it came there, and its log's words (log.py)."""
CLAIMED, LOGGED_AS = 9, 10
"""For how many new keys a worker has claimed room in each shard (keys.py); who wrote its log."""
_LINE, _WORKER_LINE = 8, 16
NUM_LOGS = MAX_WORKERS + 2


class TablePage:
    """The page, as one process sees it.

    Args:
        region: The table's, zeros at first.
        num_shards: How many shards the table has.

    Attributes:
        table: The table's line.
        workers: The lines of all workers.
        unfinished: A byte for each log.
    """

    def __init__(self, region: Region, num_shards: int) -> None:
        self._region = region
        self._num_shards = num_shards
        self._words = region.buffer[: 8 * self._num_words(num_shards)].cast("q")
        self._locks = 8 * self._num_words(num_shards)
        self._workers = _LINE * (1 + num_shards)
        self._done = self._workers + _WORKER_LINE * NUM_LOGS
        at = 8 * (self._done + NUM_LOGS * num_shards)
        self.unfinished = region.buffer[at : at + NUM_LOGS]
        self.table = self._words[:_LINE]
        self.workers = self._words[self._workers : self._workers + _WORKER_LINE * MAX_WORKERS]

    @staticmethod
    def _num_words(num_shards: int) -> int:
        num_words = _LINE * (1 + num_shards) + _WORKER_LINE * NUM_LOGS + num_shards * NUM_LOGS
        num_words += -(-NUM_LOGS // 8)
        return -(-num_words // _LINE) * _LINE

    @classmethod
    def needed_bytes(cls, num_shards: int) -> int:
        """Return the size of the page."""
        num_locks = 1 + num_shards + NUM_LOGS
        return 8 * cls._num_words(num_shards) + Mutex.NBYTES * num_locks

    def shard(self, index: int) -> memoryview:
        """Return the line of a shard."""
        return self._words[_LINE * (1 + index) : _LINE * (2 + index)]

    def done(self, index: int) -> memoryview:
        """Return the words of a shard that say which numbered adds are in."""
        start = self._done + NUM_LOGS * index
        return self._words[start : start + NUM_LOGS]

    def lock(self, label: str, rank_of: Callable[[int], int | None]) -> Mutex:
        """Return the table's lock."""
        return self._lock(0, label, rank_of)

    def lock_of_shard(self, index: int, label: str, rank_of: Callable[[int], int | None]) -> Mutex:
        """Return the lock of a shard."""
        return self._lock(1 + index, label, rank_of)

    def lock_of_log(self, worker: int, label: str, rank_of: Callable[[int], int | None]) -> Mutex:
        """Return the lock of a worker's log."""
        return self._lock(1 + self._num_shards + worker, label, rank_of)

    def _lock(self, index: int, label: str, rank_of: Callable[[int], int | None]) -> Mutex:
        at = self._locks + Mutex.NBYTES * index
        return Mutex(self._region.buffer[at : at + Mutex.NBYTES], label, rank_of)

    def worker(self, worker: int) -> memoryview:
        """Return the line of a worker."""
        start = self._workers + _WORKER_LINE * worker
        return self._words[start : start + _WORKER_LINE]

    def of_workers(self, word: int) -> list[int]:
        """Return one word of every worker's line."""
        return self.workers[word::_WORKER_LINE].tolist()

    def num_claimed(self) -> int:
        """Return for how many new keys workers have claimed room."""
        return sum(self.of_workers(CLAIMED))

    def claimed_by_others(self, worker: int) -> int:
        """Return the same without what one worker has claimed."""
        return self.num_claimed() - self.worker(worker)[CLAIMED]

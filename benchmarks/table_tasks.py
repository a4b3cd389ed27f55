"""What the contestants of ``make bench-tables`` are asked to do.

A task is named by its place in `TASKS`, which both sides have. Nothing here runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ARRAY_ELEMENTS",
    "COLS",
    "SIZES",
    "TASKS",
    "TASKS_OF_DISK",
    "TASKS_OF_MEMORY",
    "TableTask",
]

COLS = 64
SIZES = (10, 1_000, 100_000)
ARRAY_ELEMENTS = 10_000_000  # of float32: 40 MB


@dataclass(frozen=True, kw_only=True)
class TableTask:
    """One thing that is timed, as worker 0 sees it.

    Args:
        kind: "get" or "add": of rows of the matrix. "keys get" or "keys add": the same of a table
            that finds them by key. "array get" or "array add": of all of the
            array. "flood": equally many adds by each worker at work, to random rows of 4 shards,
            from the beginning of the first to the end of the last. "snapshot": of a table, to disk.
            "disk": the same bytes, written and synced.
        rows: How many at a time; 0 for the array and the disk.
        both: Whether the other worker works meanwhile; else it has joined and is idle.
        fresh: Whether the random rows are others each time; else the same, so that a thousand of
            them are in the cache.
    """

    kind: str
    rows: int = 0
    both: bool = False
    fresh: bool = False


TASKS_OF_MEMORY = (
    *(
        TableTask(kind=kind, rows=rows, both=both, fresh=fresh)
        for both, fresh in ((False, False), (True, False), (False, True))
        for rows in SIZES
        for kind in ("get", "add")
    ),
    *(TableTask(kind=kind, rows=rows) for rows in SIZES for kind in ("keys get", "keys add")),
    TableTask(kind="array get"),
    TableTask(kind="array add"),
    *(
        TableTask(kind="flood", rows=rows, both=both, fresh=True)
        for rows in SIZES[1:]
        for both in (False, True)
    ),
)
TASKS_OF_DISK = (TableTask(kind="snapshot", both=True), TableTask(kind="disk", both=True))
TASKS = (*TASKS_OF_MEMORY, *TASKS_OF_DISK)

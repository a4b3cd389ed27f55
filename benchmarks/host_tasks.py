"""What the contestants of ``make bench-hosts`` are asked to do, and a turn of a worker.

A task is named by its place in `TASKS`, which both sides have. All use the same random rows each
time, so what is compared is what each system adds, and not how fast memory is.
"""

from __future__ import annotations

from benchmarks.table_tasks import SIZES, Steps, TableTask, repeat
from benchmarks.turns import Step
from phalanx.clock import now_s

ADDED_ROWS = 10  # by a small add
_ADDS_PER_S = 1_000  # of each client, by the length of a turn
_WARM_UP = 20

TASKS_OF_ONE = tuple(
    TableTask(kind=kind, rows=rows)
    for rows in SIZES
    for kind in ("get", "add", "local get", "local add")
)
"""What one client does, while nobody else works.

"get" and "add" are of rows of the other host, "local get" and "local add" of the client's own host.
"""

TASKS_OF_ALL = (TableTask(kind="flood", rows=ADDED_ROWS, both=True),)
"""Equally many small adds by each client, each waited for: from the first's beginning to the last's
end.
"""

TASKS = (*TASKS_OF_ONE, *TASKS_OF_ALL)


def take_turn(
    task: TableTask, steps: Steps, num_clients: int, *, is_client: bool, turn_s: float
) -> list[float]:
    """Work for a turn, and return the seconds of what counts; of adds by all, those per add."""
    make = steps.makers.get(task.kind) if is_client else None
    step = None if make is None else make(task)
    if task not in TASKS_OF_ALL:
        return [] if step is None else repeat(step, turn_s)
    num_adds = max(1, int(_ADDS_PER_S * turn_s))
    if step is not None:
        _repeat(step, _WARM_UP)
    steps.meet()
    started_s = now_s()
    if step is not None:
        _repeat(step, num_adds)
    steps.meet()
    return [] if step is None else [(now_s() - started_s) / (num_adds * num_clients)]


def _repeat(step: Step, times: int) -> None:
    for _ in range(times):
        step()

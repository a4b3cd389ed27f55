"""The work of each replica by time, for Perfetto: the trace events of Chrome's tracing, as JSON.

steps        |--- step 1 ---------||--- step 2 ---------|
lost workers      |worker 1 ...---|                         from notice to the end of the step
replica 0    |microbatch 0|2| merge||microbatch 0|2| merge|
replica 1    |microbatch 1|3| merge||microbatch 1|3| merge|
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import FitEnded, StepDone, WorkerLost
from phalanx.callbacks.log_files import finite, read_path, record_of, writing_to
from phalanx.clock import now_s
from phalanx.files import written_whole
from phalanx.plan import read_count

_PROCESS = 1
_STEPS, _LOST, _FIRST_REPLICA = 0, 1, 2  # rows

# Any: JSON.
TraceEvent = dict[str, Any]


class Trace(Callback):
    """A callback that writes a trace for https://ui.perfetto.dev or chrome://tracing.

    It has a row for the steps, one for each replica, with each microbatch, its part of the sum and
    of the optimizer's step, and one for lost workers. The file is written at the end of each `fit`,
    also of one that fails, and replaces what was there. On ranks the first one writes, about its
    replicas.

    Args:
        path: The file; its folder is made when it is needed.
        most_steps: How many steps are kept, the last ones; a step takes some 150 bytes of the file
            for each microbatch.

    Raises:
        ConfigError: ``path`` is no path; ``most_steps`` is less than 1.
    """

    def __init__(self, path: str | Path, *, most_steps: int = 10_000) -> None:
        self._path = read_path(path)
        most = read_count("most_steps", most_steps, 1, "step")
        self._steps: deque[StepDone] = deque(maxlen=most)
        self._lost: deque[tuple[float, WorkerLost]] = deque(maxlen=most)  # with their moments

    def attach(self, trainer: Any) -> None:
        """Start over, with the training of ``trainer``."""
        super().attach(trainer)
        self._steps.clear()
        self._lost.clear()

    def on_step_end(self, event: StepDone) -> None:
        """Keep the step; nothing is written before the end."""
        self._steps.append(event)

    def on_worker_lost(self, event: WorkerLost) -> None:
        """Keep the event."""
        self._lost.append((now_s(), event))

    def on_fit_end(self, event: FitEnded) -> None:  # noqa: ARG002
        """Write the file."""
        self.write()

    def write(self) -> None:
        """Write the file; nothing where no step was made."""
        if self._steps and self.is_writer:
            events = finite(lay_out_trace(self._steps, self._lost))
            text = json.dumps({"traceEvents": events}, separators=(",", ":"), allow_nan=False)
            with writing_to(self._path), written_whole(self._path) as draft:
                draft.write_text(text, encoding="utf-8")


def lay_out_trace(
    steps: Iterable[StepDone], lost: Iterable[tuple[float, WorkerLost]]
) -> list[TraceEvent]:
    """Return trace events of steps, and of lost workers with their moments."""
    steps = list(steps)
    replicas = sorted({span.replica for step in steps for span in step.spans})
    rows = {_STEPS: "steps", _LOST: "lost workers"}
    rows |= {_FIRST_REPLICA + replica: f"replica {replica}" for replica in replicas}
    found: list[TraceEvent] = []
    for row, name in rows.items():
        place = {"ph": "M", "pid": _PROCESS, "tid": row}
        found.append({**place, "name": "thread_name", "args": {"name": name}})
        found.append({**place, "name": "thread_sort_index", "args": {"sort_index": row}})
    for step in steps:
        found += _of_step(step)
    for told_s, each in lost:
        told = {"reason": each.reason, "microbatch": each.microbatch, "step": each.step}
        name = f"worker {each.worker} lost"
        found.append(_slice(_LOST, name, told_s - each.seconds, told_s, told))
    return found


def _of_step(step: StepDone) -> Iterator[TraceEvent]:
    start_s = min(span.start_s for span in step.spans)
    stop_s = max(span.stop_s for span in step.spans)
    yield _slice(_STEPS, f"step {step.step}", start_s, stop_s, record_of(step))
    for span in step.spans:
        is_merge = span.microbatch is None
        name = "merging and optimizer" if is_merge else f"microbatch {span.microbatch}"
        row = _FIRST_REPLICA + span.replica
        yield _slice(row, name, span.start_s, span.stop_s, {"step": step.step})


def _slice(row: int, name: str, start_s: float, stop_s: float, told: TraceEvent) -> TraceEvent:
    """Return a slice of a row; times are microseconds of the monotonic clock."""
    begun, took = round(1e6 * start_s, 3), round(1e6 * (stop_s - start_s), 3)
    place = {"ph": "X", "pid": _PROCESS, "tid": row}
    return {**place, "name": name, "ts": begun, "dur": took, "args": told}

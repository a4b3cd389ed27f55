"""The work of each replica by time, for Perfetto: the trace events of Chrome's tracing, as JSON.

steps        |--- step 1 ---------||--- step 2 ---------|
replica 0    |microbatch 0|2| merge||microbatch 0|2| merge|
replica 1    |microbatch 1|3| merge||microbatch 1|3| merge|
lost workers      |worker 1 ...---|                         from notice to the end of the step
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import AttachedTrainer, FitBegun, FitEnded, StepDone, WorkerLost
from phalanx.callbacks.log_files import read_path, writing_to
from phalanx.clock import now_s
from phalanx.errors import ConfigError
from phalanx.files import written_whole
from phalanx.plan import read_count

__all__ = ["Trace"]

_MARK = '{"otherData":{"writer":"phalanx"}'  # what our files begin with
_PROCESS = 1
_STEPS, _LOST, _FIRST_REPLICA = 0, 1, 2  # rows
_PER_S = 1e6  # microseconds

# Any: JSON.
TraceEvent = dict[str, Any]


class Trace(Callback):
    """A callback that writes a trace for https://ui.perfetto.dev or chrome://tracing.

    It has a row for the steps, one for each replica, with each microbatch, its part of the sum and
    of the optimizer's step, and one for lost workers. The file is written at the end of each `fit`,
    also of one that fails, and replaces an earlier trace. On ranks the first one writes, about its
    replicas.

    Args:
        path: The file; its folder is made when it is needed.
        most_steps: How many steps are kept, the last ones; a step takes some 150 bytes of the file
            for each microbatch.

    Raises:
        ConfigError: ``path`` is no path, or something else than a trace lies there; ``most_steps``
            is less than 1.
    """

    def __init__(self, path: str | Path, *, most_steps: int = 10_000) -> None:
        self._path = read_path(path)
        self._most_steps = read_count("most_steps", most_steps, 1, "step")
        # Each with the moment of its event.
        self._steps: deque[tuple[float, StepDone]] = deque(maxlen=self._most_steps)
        self._lost: deque[tuple[float, WorkerLost]] = deque(maxlen=self._most_steps)

    def attach(self, trainer: AttachedTrainer) -> None:
        """Start over, with the training of ``trainer``."""
        super().attach(trainer)
        self._steps.clear()
        self._lost.clear()

    def on_fit_begin(self, event: FitBegun) -> None:  # noqa: ARG002
        """Refuse a file that is no trace."""
        self._refuse_other_files()

    def on_step_end(self, event: StepDone) -> None:
        """Keep the step; nothing is written before the end."""
        self._steps.append((now_s(), event))

    def on_worker_lost(self, event: WorkerLost) -> None:
        """Keep the event."""
        self._lost.append((now_s(), event))

    def on_fit_end(self, event: FitEnded) -> None:  # noqa: ARG002
        """Write the file."""
        self.write()

    def write(self) -> None:
        """Write the file; nothing where no step was made."""
        if not self._steps or not self.is_writer:
            return
        self._refuse_other_files()
        events = lay_out_trace(self._steps, self._lost)
        text = json.dumps({"traceEvents": events}, separators=(",", ":"), allow_nan=False)
        with writing_to(self._path), written_whole(self._path) as draft:
            draft.write_text(f"{_MARK},{text[1:]}\n", encoding="utf-8")

    def _refuse_other_files(self) -> None:
        if not self.is_writer or not self._path.exists():
            return
        with writing_to(self._path), self._path.open("rb") as file:
            begin = file.read(len(_MARK))
        if begin != _MARK.encode():
            raise ConfigError(
                f"`path` must be a new file or an earlier trace, but {str(self._path)!r} holds "
                "something else. Name another."
            )


def lay_out_trace(
    steps: Iterable[tuple[float, StepDone]], lost: Iterable[tuple[float, WorkerLost]]
) -> list[TraceEvent]:
    """Return trace events of steps and lost workers, each with its moment.

    Times are microseconds since the first of all. Workers that were lost before the first step
    are left out.
    """
    steps = list(steps)
    begins = [span.start_s for _, step in steps for span in step.spans]
    origin_s = min(begins, default=steps[0][0] - steps[0][1].seconds)
    replicas = {span.replica for _, step in steps for span in step.spans}
    found = [*_named_rows(sorted(replicas))]
    for told_s, step in steps:
        found += _of_step(step, told_s, origin_s)
    found += [
        _of_lost_worker(each, told_s, origin_s) for told_s, each in lost if told_s >= origin_s
    ]
    return found


def _named_rows(replicas: Iterable[int]) -> Iterator[TraceEvent]:
    rows = {_STEPS: "steps", _LOST: "lost workers"}
    rows |= {_FIRST_REPLICA + replica: f"replica {replica}" for replica in replicas}
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "phalanx"}}
    for row, name in rows.items():
        place = {"ph": "M", "pid": _PROCESS, "tid": row}
        yield {**place, "name": "thread_name", "args": {"name": name}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": row}}


def _of_step(step: StepDone, told_s: float, origin_s: float) -> Iterator[TraceEvent]:
    stop_s = max((span.stop_s for span in step.spans), default=told_s)
    start_s = min((span.start_s for span in step.spans), default=stop_s - step.seconds)
    told = {
        "loss": step.loss,
        "samples": step.samples,
        "epoch": step.epoch,
        "batch": step.batch,
        "seconds": step.seconds,
        "shares": list(step.shares),
        "learning rates": [rate for rate in step.learning_rates if math.isfinite(rate)],
        "norm of the gradients": step.grad_norm,
    }
    yield _slice(_STEPS, f"step {step.step}", start_s, stop_s, origin_s, told)
    for span in step.spans:
        name = _name_of(span.microbatch)
        row = _FIRST_REPLICA + span.replica
        yield _slice(row, name, span.start_s, span.stop_s, origin_s, {"step": step.step})


def _of_lost_worker(lost: WorkerLost, told_s: float, origin_s: float) -> TraceEvent:
    told = {
        "process": lost.pid,
        "reason": lost.reason,
        "microbatch": lost.microbatch,
        "step": lost.step,
    }
    begun_s = max(origin_s, told_s - lost.seconds)
    return _slice(_LOST, f"worker {lost.worker} lost", begun_s, told_s, origin_s, told)


def _slice(
    row: int, name: str, start_s: float, stop_s: float, origin_s: float, told: dict[str, Any]
) -> TraceEvent:
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": row,
        "name": name,
        "ts": _microseconds(start_s - origin_s),
        "dur": _microseconds(stop_s - start_s),
        "args": _finite(told),
    }


def _name_of(microbatch: int | None) -> str:
    return "merging and optimizer" if microbatch is None else f"microbatch {microbatch}"


def _microseconds(seconds: float) -> float:
    return round(_PER_S * seconds, 3)


def _finite(told: dict[str, Any]) -> dict[str, Any]:
    """Leave out numbers that JSON has no word for."""
    return {
        name: value
        for name, value in told.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }

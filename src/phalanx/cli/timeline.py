"""What each replica did in the last steps, laid out on one axis of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.execution import Span
from phalanx.train import StepDone

_MAX_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of consecutive steps, in milliseconds since the first of them began.

    Args:
        spans: ``(replica, microbatch or None, start_ms, length_ms)``.
        step_starts: ``(step, start_ms)`` of each step.
        num_replicas: Rows.
        busy: For each replica, the fraction of the steps' time in which it worked.
    """

    spans: tuple[tuple[int, int | None, float, float], ...]
    step_starts: tuple[tuple[int, float], ...]
    num_replicas: int
    busy: tuple[float, ...]


def lay_out_timeline(steps: Iterable[StepDone]) -> Timeline:
    """Choose the last steps that belong together and put their spans on one axis.

    Only steps that follow each other directly belong together: between two of them that do not,
    something else was done, such as a test, and the gap would be most of the picture.
    """
    chosen = _last_neighbours([step for step in steps if step.spans])
    if not chosen:
        return Timeline(spans=(), step_starts=(), num_replicas=0, busy=())
    origin_s = min(span.start_s for span in chosen[0].spans)
    seconds = sum(step.seconds for step in chosen)
    num_replicas = len(chosen[-1].busy_s)
    return Timeline(
        spans=tuple(_in_ms(span, origin_s) for step in chosen for span in step.spans),
        step_starts=tuple(
            (step.step, 1e3 * (min(span.start_s for span in step.spans) - origin_s))
            for step in chosen
        ),
        num_replicas=num_replicas,
        busy=tuple(
            min(1.0, sum(step.busy_s[replica] for step in chosen) / seconds) if seconds else 0.0
            for replica in range(num_replicas)
        ),
    )


def _last_neighbours(steps: Sequence[StepDone]) -> Sequence[StepDone]:
    chosen = list(steps[-1:])
    for earlier in reversed(steps[:-1]):
        if len(chosen) == _MAX_STEPS or earlier.epoch != chosen[0].epoch:
            break
        chosen.insert(0, earlier)
    return chosen


def _in_ms(span: Span, origin_s: float) -> tuple[int, int | None, float, float]:
    start_ms, length_ms = 1e3 * (span.start_s - origin_s), 1e3 * (span.stop_s - span.start_s)
    return span.replica, span.microbatch, start_ms, length_ms

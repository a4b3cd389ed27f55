"""Which replica is slow: told by its own work, not by how long the others made it wait."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from phalanx.callbacks import StepDone
from phalanx.errors import ConfigError

__all__ = ["Straggler", "Stragglers"]


@dataclass(frozen=True)
class Straggler:
    """A replica that takes longer for a row than the others, and that they wait for.

    Attributes:
        replica: Its number.
        seconds_per_row: Of its own work, before any merging or waiting.
        times_slower: Than the median of the others.
    """

    replica: int
    seconds_per_row: float
    times_slower: float

    def __str__(self) -> str:
        return (
            f"replica {self.replica} takes {self.times_slower:.1f} times as long for a row as the "
            f"others ({self.seconds_per_row * 1e3:.3g} ms)"
        )


class Stragglers:
    """Listens to a trainer and names slow replicas.

    Where each replica has a slice of its own, one is slow only if it takes longer for its slice,
    too: what every slice costs makes the rows of a small one dear.

    Args:
        factor: From how many times the others' median on a replica counts as slow.
        window: Over how many steps.

    Example:
        >>> def step(*work_s):
        ...     return StepDone(
        ...         step=1,
        ...         epoch=1,
        ...         batch=0,
        ...         loss=0.0,
        ...         samples=8,
        ...         seconds=1.0,
        ...         shares=(4, 4),
        ...         busy_s=work_s,
        ...         spans=(),
        ...         work_s=work_s,
        ...     )
        >>> stragglers = Stragglers()
        >>> stragglers(step(0.1, 0.3))
        >>> [str(each) for each in stragglers.report()]
        ['replica 1 takes 3.0 times as long for a row as the others (75 ms)']
    """

    def __init__(self, *, factor: float = 1.5, window: int = 64) -> None:
        if not factor > 1:
            raise ConfigError(f"`factor` must be above 1, but is {factor!r}.")
        if window < 1:
            raise ConfigError(f"`window` must be at least 1 step, but is {window!r}.")
        self._factor = factor
        self._steps: deque[StepDone] = deque(maxlen=window)

    def __call__(self, event: object) -> None:
        """Take in one of the trainer's events."""
        if not isinstance(event, StepDone):
            return
        if self._steps and len(self._steps[-1].work_s) != len(event.work_s):
            self._steps.clear()  # the run was resized
        self._steps.append(event)

    def report(self) -> list[Straggler]:
        """Return the slow replicas of the last steps, the slowest first."""
        pace = self._seconds_per_row()
        found = []
        for replica, own in pace.items():
            others = [seconds for other, seconds in pace.items() if other != replica]
            usual = statistics.median(others) if others else own
            if usual > 0 and own > self._factor * usual and self._keeps_waiting(replica):
                found.append(Straggler(replica, own, own / usual))
        return sorted(found, key=lambda each: -each.times_slower)

    def _keeps_waiting(self, replica: int) -> bool:
        """Tell whether it is late with its slice; with several microbatches each, pace is all."""
        if any(_takes_several(step) for step in self._steps):
            return True
        own = statistics.median(step.work_s[replica] for step in self._steps)
        others = [
            statistics.median(step.work_s[other] for step in self._steps)
            for other in range(len(self._steps[-1].work_s))
            if other != replica and any(step.shares[other] for step in self._steps)
        ]
        return own > self._factor * statistics.median(others)

    def _seconds_per_row(self) -> dict[int, float]:
        """Return the median over the steps in which a replica had rows."""
        count = len(self._steps[-1].work_s) if self._steps else 0
        pace = {}
        for replica in range(count):
            each = [e.work_s[replica] / e.shares[replica] for e in self._steps if e.shares[replica]]
            if each:
                pace[replica] = statistics.median(each)
        return pace


def _takes_several(step: StepDone) -> bool:
    """Tell whether some replica had more than one microbatch."""
    took = [span.replica for span in step.spans if span.microbatch is not None]
    return len(took) > len(set(took))

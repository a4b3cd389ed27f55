"""From measured seconds to workloads: who is slow gets less, once that is sure.

    rows, seconds ── seconds per row ── deviation ── median of the last 3, 6, … ── sure? ── move
                                                                                    │
                     by device           from the mean of the step's devices        no: stay

A deviation is logarithmic: of what a device's slice takes at its share, against the others in the
same step. What makes all of them slower, such as other work on the machine, is no deviation. At
the right workloads all deviations are 0, so a constant cost per step beside the cost per row only
makes the way there longer.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from phalanx.errors import ConfigError
from phalanx.plan.slices import check_workloads, workload_sizes

__all__ = ["Balancer", "Decision", "fixed_workloads"]

# Steps that are looked at together: the shortest sees a sudden change, the longest a small one.
_WINDOWS = (3, 6, 12, 24, 48)
_SHORTEST = _WINDOWS[0]
_MEDIAN_ERROR = 1.25  # standard error of a median, as a multiple of the mean's

# How far from 0 a deviation must be for a move: a median in its standard errors, or each of a few
# values in standard deviations. After a move the devices are known to be unequal, so that for some
# steps the best guess is good enough.
_SURE, _FEW, _SURE_OF_EACH = 5.0, 5, 2.8
_REFINED_STEPS, _REFINING_WINDOW = 12, 6

_DAMPING = 0.9  # the part of a deviation that one move takes away

# Until there are measurements, noise is taken to be this; never to be less than the least.
_FIRST_NOISE, _FIRST_NOISE_COUNTS = 0.1, 6
_LEAST_NOISE = 0.02
_JUMP_OF_NOISE = 0.954  # median distance of two values in a row, as a multiple of their deviation
_NOISE_STEPS = 100

_TRY_AGAIN_STEPS, _TRY_AGAIN_STEPS_AT_MOST = 16, 1024
_ONE_ROW = 1.01  # a hair more, which rounding cannot take away
_LEAST_LOG_SHARE = -30.0
_TRACE_LENGTH = 10_000


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What became of one step's measurements.

    Attributes:
        step: Its number, from 1.
        seconds_per_row: By device; None where nothing was measured.
        proposed: Shares that would have been best in the last steps; they add up to 1.
        chosen: Shares for the next step.
        reason: Why it is these.
    """

    step: int
    seconds_per_row: tuple[float | None, ...]
    proposed: tuple[float, ...]
    chosen: tuple[float, ...]
    reason: str


@dataclass(frozen=True)
class _Deviations:
    """What the last ``steps`` steps say: each device's deviation, and whether one is sure."""

    steps: int
    deviations: list[float]
    is_sure: bool


@dataclass
class _Trial:
    """A device that gets a row again, for as long as it takes to measure it."""

    device: int
    steps_left: int = _SHORTEST


class Balancer:
    """Workloads that follow measured speeds: damped, and at rest where nothing is to be gained.

    They change only when a deviation stands out from the noise, which is measured too, and when the
    last batch's rows, cut anew, would have been done sooner by ``least_gain``. A device whose share
    has become less than a row is tried again from time to time.

    Args:
        num_devices: How many share the work.
        workloads: Where to begin; equal by default.
        least_gain: The fraction of a step's time for which rows are moved.

    Raises:
        ConfigError: A number does not fit.

    Determinism: the same measurements give the same workloads; no clock is read here.

    Example:
        >>> balancer = Balancer(2)
        >>> for _ in range(9):  # the second device takes three times as long for a row
        ...     rows = workload_sizes(100, balancer.workloads)
        ...     _ = balancer.observe(rows, [0.01 * rows[0], 0.03 * rows[1]])
        >>> workload_sizes(100, balancer.workloads)
        [75, 25]
    """

    def __init__(
        self,
        num_devices: int,
        *,
        workloads: Sequence[float] | None = None,
        least_gain: float = 0.03,
    ) -> None:
        if num_devices < 1:
            raise ConfigError(f"`num_devices` must be at least 1, but is {num_devices!r}.")
        if not 0 < least_gain < 1:
            raise ConfigError(f"`least_gain` must be between 0 and 1, but is {least_gain!r}.")
        if workloads is None:
            workloads = [1.0] * num_devices
        check_workloads(workloads, num_devices)
        if not all(workloads):
            raise ConfigError(
                f"`workloads` must be above 0 to be balanced, but are {list(workloads)!r}. Leave "
                "devices out that shall not work."
            )
        self._num_devices = num_devices
        self._least_gain = least_gain
        self._settled = _normalised([math.log(workload) for workload in workloads])
        self._chosen = self._settled
        self._deviations: list[deque[float]] = [
            deque(maxlen=_WINDOWS[-1]) for _ in range(num_devices)
        ]
        self._jumps = deque(
            [_FIRST_NOISE * _JUMP_OF_NOISE] * _FIRST_NOISE_COUNTS,
            maxlen=_NOISE_STEPS * num_devices,
        )
        self._refined_until = 0
        self._idle = [0] * num_devices
        self._patience = [_TRY_AGAIN_STEPS] * num_devices
        self._trial: _Trial | None = None
        self._step = 0
        self._trace: deque[Decision] = deque(maxlen=_TRACE_LENGTH)

    @property
    def workloads(self) -> tuple[float, ...]:
        """The shares for the next step; they add up to 1."""
        return self._chosen

    @property
    def settled(self) -> tuple[float, ...]:
        """The same without the row that a device is being tried with: where to begin again."""
        return self._settled

    @property
    def trace(self) -> tuple[Decision, ...]:
        """All decisions, in order; the last 10,000 are kept."""
        return tuple(self._trace)

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.3f}" for share in self._chosen)
        return f"Balancer({shares} after {self._step} steps)"

    def observe(self, rows: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
        """Take in what one step has measured, and return the workloads for the next one.

        Args:
            rows: Of each device's slice.
            seconds: That each device took for it, without waiting for others or merging; 0 where it
                did nothing or too little to be measured.

        Raises:
            ConfigError: There is not one number for each device.
        """
        for name, values in (("rows", rows), ("seconds", seconds)):
            if len(values) != self._num_devices:
                raise ConfigError(
                    f"`{name}` must hold one number per device ({self._num_devices}), but holds "
                    f"{len(values)}."
                )
        self._step += 1
        costs = [_cost(count, time_s) for count, time_s in zip(rows, seconds, strict=True)]
        self._note_activity(costs)
        self._take_in(costs)
        proposed, reason = self._settle(sum(rows))
        self._chosen, reason = self._try_idle(sum(rows), reason)
        self._trace.append(
            Decision(
                step=self._step,
                seconds_per_row=tuple(costs),
                proposed=proposed,
                chosen=self._chosen,
                reason=reason,
            )
        )
        return self._chosen

    # -- evidence ----------------------------------------------------

    def _take_in(self, costs: Sequence[float | None]) -> None:
        """Add the step's deviations to what is known, and what they jumped by to the noise."""
        times = {
            device: math.log(cost) + math.log(self._settled[device])
            for device, cost in enumerate(costs)
            if cost is not None
        }
        if len(times) < 2:  # one device alone may be slow because the machine is
            return
        mean = statistics.fmean(times.values())
        for device, time in times.items():
            known = self._deviations[device]
            if known:
                self._jumps.append(abs(time - mean - known[-1]))
            known.append(time - mean)

    def _noise(self) -> float:
        """Return the standard deviation of one step's deviations, robust against outliers."""
        noise = max(_LEAST_NOISE, statistics.median(self._jumps) / _JUMP_OF_NOISE)
        return noise * (1 + 1 / self._step)  # of few steps it is not known well

    def _find(self, num_steps: int, noise: float) -> _Deviations:
        """Look at each device's last ``num_steps`` deviations, or at all that there are."""
        recent = [list(known)[-num_steps:] for known in self._deviations]
        enough = [values for values in recent if len(values) >= _SHORTEST]
        return _Deviations(
            num_steps,
            [statistics.median(values) if values in enough else 0.0 for values in recent],
            any(_stands_out(values, noise) for values in enough),
        )

    # -- decisions ---------------------------------------------------

    def _settle(self, total: int) -> tuple[tuple[float, ...], str]:
        """Move the settled workloads if that is sure to gain; return what is proposed, and why."""
        if self._num_devices == 1:
            return self._settled, "one device alone"
        length = max(len(known) for known in self._deviations)
        if length < _SHORTEST:
            return self._settled, f"measures for {_SHORTEST} steps first"
        noise = self._noise()
        findings = [self._find(steps, noise) for steps in _WINDOWS if steps <= length]
        latest = self._find(min(length, _REFINING_WINDOW), noise)
        candidates = [finding for finding in findings if finding.is_sure]
        if self._step <= self._refined_until:
            candidates.append(latest)
        for finding in candidates:
            # Where the damped move is too small to move a row, the whole one may.
            for damping in (_DAMPING, 1.0):
                moved = self._moved(finding, damping)
                gain = self._gain(finding, moved, total)
                if gain >= self._least_gain:
                    proposed = self._moved(finding, 1.0)
                    self._move_to(moved, finding)
                    return proposed, (
                        f"moves: {gain:.0%} of the step to gain, by the last {finding.steps} steps"
                    )
        reason = f"stays: less than {self._least_gain:.0%} of the step to gain"
        if not candidates:
            reason = f"stays: within the noise of {noise:.0%}"
        return self._moved(latest, 1.0), reason

    def _moved(self, finding: _Deviations, damping: float) -> tuple[float, ...]:
        return _normalised(
            [
                math.log(share) - damping * deviation
                for share, deviation in zip(self._settled, finding.deviations, strict=True)
            ]
        )

    def _gain(self, finding: _Deviations, moved: Sequence[float], total: int) -> float:
        """Return the part of the step's time that would be saved if ``total`` rows came again.

        In whole rows: where they are few, nothing may be gained by other workloads.
        """
        per_row = [
            math.exp(deviation) / share
            for share, deviation in zip(self._settled, finding.deviations, strict=True)
        ]
        now, then = (
            max(cost * rows for cost, rows in zip(per_row, sizes, strict=True))
            for sizes in (workload_sizes(total, self._settled), workload_sizes(total, moved))
        )
        return 1 - then / now if now else 0.0

    def _move_to(self, moved: tuple[float, ...], finding: _Deviations) -> None:
        """Settle on ``moved``, and keep what spoke for it as it would have been measured there."""
        if finding.is_sure and self._step > self._refined_until:
            self._refined_until = self._step + _REFINED_STEPS
        steps = [
            math.log(new) - math.log(old) for new, old in zip(moved, self._settled, strict=True)
        ]
        self._settled = moved
        for known, step in zip(self._deviations, steps, strict=True):
            recent = [deviation + step for deviation in known][-finding.steps :]
            known.clear()
            known.extend(recent)

    # -- devices without rows ----------------------------------------

    def _note_activity(self, costs: Sequence[float | None]) -> None:
        on_trial = None if self._trial is None else self._trial.device
        for device, cost in enumerate(costs):
            if cost is None:
                self._idle[device] += 1
                continue
            self._idle[device] = 0
            if device != on_trial:
                self._patience[device] = _TRY_AGAIN_STEPS

    def _try_idle(self, total: int, reason: str) -> tuple[tuple[float, ...], str]:
        """Return the settled workloads, or such with a row for a device that had none for long."""
        if self._trial is not None:
            self._trial.steps_left -= 1
            if self._trial.steps_left == 0:
                self._trial = None
        if self._trial is None and total > 1:  # one row would be measured against nothing
            device = max(range(self._num_devices), key=self._idle.__getitem__)
            if self._idle[device] >= self._patience[device]:
                self._patience[device] = min(2 * self._patience[device], _TRY_AGAIN_STEPS_AT_MOST)
                self._trial = _Trial(device)
        if self._trial is None:
            return self._settled, reason
        device = self._trial.device
        needed = min(1.0, _ONE_ROW / max(1, total))
        if self._settled[device] >= needed:
            return self._settled, reason
        scale = (1 - needed) / (1 - self._settled[device])
        shares = [scale * share for share in self._settled]
        shares[device] = needed
        return tuple(shares), f"tries device {device} again; {reason}"


# Any: whatever the user wrote.
def fixed_workloads(workloads: Any) -> Sequence[float] | None:
    """Return the workloads that are given as numbers, None for those to be balanced: ``"auto"``.

    Raises:
        ConfigError: They are another word, or no numbers.
    """
    if workloads is None or isinstance(workloads, str):
        if workloads not in (None, "auto"):
            raise _no_workloads(workloads)
        return None
    # Arrays and tensors give their numbers by `tolist`; their elements may be no numbers of Python.
    listed = workloads.tolist() if hasattr(workloads, "tolist") else workloads
    if isinstance(listed, Mapping) or not isinstance(listed, Iterable):
        raise _no_workloads(workloads)
    shares = list(listed)
    if not all(isinstance(share, Real) for share in shares):
        raise _no_workloads(shares)
    return shares


def _no_workloads(given: object) -> ConfigError:
    return ConfigError(
        f"`workloads` must hold one share per device or be 'auto', but is {given!r:.80}. Give "
        "numbers, such as [1, 2]."
    )


def _cost(rows: int, seconds: float) -> float | None:
    """Return seconds per row; None where nothing was measured."""
    measured = rows > 0 and seconds > 0 and math.isfinite(seconds)
    return seconds / rows if measured else None


def _stands_out(values: Sequence[float], noise: float) -> bool:
    """Tell whether deviations are too far from 0 to be noise."""
    if len(values) <= _FEW:  # a median of so few is no safeguard against outliers
        return min(values) > _SURE_OF_EACH * noise or max(values) < -_SURE_OF_EACH * noise
    error = _MEDIAN_ERROR * noise / math.sqrt(len(values))
    return abs(statistics.median(values)) > _SURE * error


def _normalised(logs: Sequence[float]) -> tuple[float, ...]:
    """Return shares that add up to 1, from logarithms that may be far apart."""
    largest = max(logs)
    shares = [math.exp(max(_LEAST_LOG_SHARE, log - largest)) for log in logs]
    whole = math.fsum(shares)
    return tuple(share / whole for share in shares)

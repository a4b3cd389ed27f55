"""Made-up events, as a trainer would send them."""

from __future__ import annotations

from phalanx.execution import Span
from phalanx.train import EpochDone, StepDone


def step_done(
    step: int = 1, *, per_epoch: int = 10, replicas: int = 2, **changes: object
) -> StepDone:
    """Return a step of 0.1 s that starts at 0.1 * step, with one microbatch per replica."""
    start_s = 0.1 * step
    spans = [
        span
        for replica in range(replicas)
        for span in (
            Span(replica=replica, microbatch=replica, start_s=start_s, stop_s=start_s + 0.06),
            Span(replica=replica, microbatch=None, start_s=start_s + 0.07, stop_s=start_s + 0.09),
        )
    ]
    fields = {
        "step": step,
        "epoch": (step - 1) // per_epoch,
        "batch": (step - 1) % per_epoch,
        "loss": 1.0 / step,
        "samples": 4 * replicas,
        "seconds": 0.1,
        "shares": (4,) * replicas,
        "busy_s": (0.08,) * replicas,
        "spans": tuple(spans),
    }
    return StepDone(**{**fields, **changes})


def epoch_done(epoch: int = 0, *, per_epoch: int = 10, **changes: object) -> EpochDone:
    fields = {
        "epoch": epoch,
        "steps": (epoch + 1) * per_epoch,
        "samples": 80,
        "seconds": 1.0,
        "train": {"loss": 0.5, "accuracy": 0.75},
        "validation": {"loss": 0.6, "accuracy": 0.7},
    }
    return EpochDone(**{**fields, **changes})

"""Made-up events, as a trainer would send them."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.callbacks import EpochDone, FitBegun, FitEnded, Span, StepDone


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
        "epoch": 1 + (step - 1) // per_epoch,
        "batch": 1 + (step - 1) % per_epoch,
        "loss": 1.0 / step,
        "samples": 4 * replicas,
        "seconds": 0.1,
        "shares": (4,) * replicas,
        "spans": tuple(spans),
    }
    return StepDone(**{**fields, **changes})


def epoch_done(epoch: int = 1, *, per_epoch: int = 10, **changes: object) -> EpochDone:
    fields = {
        "epoch": epoch,
        "steps": epoch * per_epoch,
        "samples": 80,
        "seconds": 1.0,
        "train": {"loss": 0.5, "accuracy": 0.75},
        "validation": {"loss": 0.6, "accuracy": 0.7},
    }
    return EpochDone(**{**fields, **changes})


def fit_begun(**changes: object) -> FitBegun:
    fields = {
        "epochs": 0,
        "steps": 0,
        "last_epoch": 3,
        "last_step": None,
        "steps_per_epoch": 10,
        "means": ("train.loss", "train.accuracy", "validation.loss", "validation.accuracy"),
    }
    return FitBegun(**{**fields, **changes})


def fit_ended() -> FitEnded:
    return FitEnded(epochs=3, steps=30)


def events_of_run(num_steps: int, *, per_epoch: int = 10) -> Iterator[StepDone | EpochDone]:
    """Yield the events of steps and of the epochs that they finish."""
    for step in range(1, num_steps + 1):
        yield step_done(step, per_epoch=per_epoch)
        if step % per_epoch == 0:
            yield epoch_done(step // per_epoch, per_epoch=per_epoch)

"""A line of a metrics file: an event as JSON holds it, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from phalanx.callbacks.events import EpochDone, RanksChanged, StepDone, WorkerLost

__all__ = ["NO_RECORD", "Record", "read_record", "record_of", "written_record"]

# Any: JSON.
Record = dict[str, Any]
# What reading something else may raise.
NO_RECORD = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def record_of(event: object) -> Record | None:
    """Return what is kept of a step, an epoch, a lost worker or changed ranks; else None."""
    if isinstance(event, StepDone):
        return {
            "kind": "step",
            "step": event.step,
            "epoch": event.epoch,
            "batch": event.batch,
            "loss": event.loss,
            "samples": event.samples,
            "seconds": event.seconds,
            "shares": event.shares,
            "busy_s": event.busy_s,
            "learning_rates": event.learning_rates,
            "grad_norm": event.grad_norm,
        }
    if isinstance(event, EpochDone):
        return {
            "kind": "epoch",
            "epoch": event.epoch,
            "last_step": event.steps,
            "samples": event.samples,
            "seconds": event.seconds,
            "train": dict(event.train),
            "validation": None if event.validation is None else dict(event.validation),
        }
    if isinstance(event, RanksChanged):
        return {"kind": "ranks", **asdict(event)}
    return {"kind": "failure", **asdict(event)} if isinstance(event, WorkerLost) else None


def written_record(record: Record) -> str:
    """Return a record's line; numbers that JSON has no word for are null."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def read_record(line: str) -> Record:
    """Read a line.

    Raises:
        NO_RECORD: It holds no record.
    """
    record: Record = json.loads(line)
    if record["kind"] == "step":
        _check_whole(record["step"])
        _check_number(record["loss"])
    elif record["kind"] == "epoch":
        _check_whole(record["epoch"])
        _check_whole(record["last_step"])
        validation = {} if record["validation"] is None else record["validation"]
        for mean in [*record["train"].values(), *validation.values()]:
            _check_number(mean)
    elif record["kind"] in ("failure", "ranks"):
        _check_whole(record["step"])
    else:
        raise ValueError(record["kind"])
    return record


# Any, here and below: JSON.
def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_whole(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r:.80} is no whole number")


def _check_number(value: Any) -> None:
    """Refuse what is neither a number nor null, which stands for one that is not finite."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"{value!r:.80} is no number")
    math.isfinite(value or 0)  # an OverflowError where it is too large for a float

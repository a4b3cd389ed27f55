"""Differences between runs: results, losses, and settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.callbacks import format_mean
from phalanx.cli.reporting.runs import RecordedRun

__all__ = ["compare_losses", "compare_settings", "final_values"]

_LONGEST = 300
_NONE = "–"


def final_values(run: RecordedRun) -> dict[str, str]:
    """Return what a run came to, by name."""
    seconds, samples = run.numbers("seconds"), run.numbers("samples")
    found = {
        "steps": f"{len(run.steps):,}",
        "epochs": f"{len(run.epochs):,}",
        "loss of the last step": format_mean("loss", run.numbers("loss")[-1]),
    }
    for name in run.names_of_means():
        for kind in ("train", "validation"):
            means = run.means(kind, name)
            if np.isfinite(means).any():
                found[f"{kind} {name}"] = format_mean(name, float(means[-1]))
    validation = run.means("validation", "loss")
    if np.isfinite(validation).any():
        best = int(np.nanargmin(validation))
        epoch = run.epochs[best]["epoch"]  # a file may begin after `--resume`
        found["best validation loss"] = f"{validation[best]:.4f} (epoch {epoch})"
    whole = np.isfinite(seconds) & np.isfinite(samples)
    total_s = float(seconds[whole].sum())
    found["seconds in steps"] = f"{total_s:,.1f}"
    found["samples/s in steps"] = f"{samples[whole].sum() / total_s:,.0f}" if total_s else _NONE
    found["replicas"] = _range_of([len(shares) for shares in run.lists("shares") if shares])
    found["lost workers"] = f"{len(run.failures):,}"
    found["weights"] = run.weights or _NONE
    return found


def compare_losses(first: RecordedRun, other: RecordedRun) -> str:
    """Say up to which step two runs had the same losses, to the last bit.

    Example:
        >>> def run(*losses):
        ...     steps = [
        ...         {"kind": "step", "step": s, "loss": loss} for s, loss in enumerate(losses, 1)
        ...     ]
        ...     return RecordedRun(name="a", steps=steps, config={})
        >>> compare_losses(run(2.0, 1.0), run(2.0, 1.0, 0.5))
        'bitwise equal in all 2 common steps'
        >>> compare_losses(run(2.0, 1.0), run(2.0, 1.5))
        'bitwise equal up to step 1; step 2: 1.5 beside 1.0'
        >>> compare_losses(run(2.0), run(2.5))
        'different from step 1 on: 2.5 beside 2.0'
    """
    mine = {step["step"]: step["loss"] for step in first.steps}
    shared = [
        (step["step"], step["loss"], mine[step["step"]])
        for step in other.steps
        if step["step"] in mine
    ]
    if not shared:
        return "no step in common"
    for at, (step, theirs, ours) in enumerate(shared):
        if theirs != ours:
            values = f"{_loss(theirs)} beside {_loss(ours)}"
            if at == 0:
                return f"different from step {step} on: {values}"
            return f"bitwise equal up to step {shared[at - 1][0]}; step {step}: {values}"
    return f"bitwise equal in all {len(shared)} common steps"


def compare_settings(
    runs: Sequence[RecordedRun],
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the settings that differ between runs, and those that do not, by name."""
    settings = [_settings_of(run.config) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    differing: dict[str, list[str]] = {}
    common: dict[str, list[str]] = {}
    for name in names:
        values = [each.get(name, _NONE) for each in settings]
        (common if len(set(values)) == 1 else differing)[name] = values
    return differing, common


# Any: JSON.
def _settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a config.json as names and texts, without its inner names."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            words = "version of " if name == "versions" else ""
            found |= {f"{words}{inner}": _text_of(each) for inner, each in value.items()}
        elif name != "format":
            found[name] = _text_of(value)
    return found


def _text_of(value: Any) -> str:
    if value is None:
        return _NONE
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value)[:_LONGEST]
    return (value if isinstance(value, str) else json.dumps(value))[:_LONGEST]


def _loss(value: float | None) -> str:
    return repr(math.nan if value is None else value)  # all digits: they may differ in the last


def _range_of(counts: Sequence[int]) -> str:
    if not counts:
        return _NONE
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"

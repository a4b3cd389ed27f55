"""Runs as they were written down: of `phalanx train`'s folders, and of files of `JSONL`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.callbacks import NO_RECORD, Record, read_record
from phalanx.cli.run_folder import RunFolder
from phalanx.errors import CheckpointError, ConfigError

__all__ = ["Floats", "RecordedRun", "number_of", "read_runs"]

_MOST_STEPS = 1 << 53  # which a float tells apart
_LARGEST, _SMALLEST = 1e140, 1e-140  # of what is drawn: their ratios must be numbers, too

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One run.

    Attributes:
        name: Another for each run of a report.
        steps: Records of its steps, one at least.
        epochs: Of its epochs.
        failures: Of lost workers.
        changes: Of ranks that were lost or came.
        config: What config.json holds; empty without one.
        weights: The beginning of a hash of the trained weights' file; None without one.
    """

    name: str
    steps: Sequence[Record]
    epochs: Sequence[Record] = ()
    failures: Sequence[Record] = ()
    changes: Sequence[Record] = ()
    config: Mapping[str, Any]  # Any: JSON
    weights: str | None = None

    def numbers(self, name: str) -> Floats:
        """Return a number of each step; nan where it is missing."""
        return np.array([number_of(step.get(name)) for step in self.steps], dtype=np.float64)

    def numbers_of_epochs(self, name: str) -> Floats:
        """Return a number of each epoch; nan where it is missing."""
        return np.array([number_of(epoch.get(name)) for epoch in self.epochs], dtype=np.float64)

    def lists(self, name: str) -> list[list[float]]:
        """Return a list of numbers of each step; an empty one where it is missing."""
        return [numbers_of(step.get(name)) for step in self.steps]

    def means(self, kind: str, name: str) -> Floats:
        """Return a "train" or "validation" mean of each epoch; nan where it is missing."""
        found = [(epoch.get(kind) or {}).get(name) for epoch in self.epochs]
        return np.array([number_of(value) for value in found], dtype=np.float64)

    def names_of_means(self) -> list[str]:
        """Return the names of the epochs' means, those of training first."""
        kinds = [epoch.get(kind) or {} for kind in ("train", "validation") for epoch in self.epochs]
        return list(dict.fromkeys(name for means in kinds for name in means))


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Read runs; those whose last parts are the same are called by their whole paths.

    Raises:
        ConfigError: One is no run, or has no step yet.
        CheckpointError: A file of one is damaged.
    """
    lasts = [path.resolve().name for path in paths]
    names = [
        last if lasts.count(last) == 1 else str(path)
        for last, path in zip(lasts, paths, strict=True)
    ]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"`RUN` must name each run once, but {name!r} is given twice.")
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_run(path: Path, name: str) -> RecordedRun:
    is_folder = path.is_dir()
    folder = RunFolder(path)
    metrics_path = folder.metrics_path if is_folder else path
    if not metrics_path.exists():
        raise ConfigError(
            f"`RUN` must be a run folder or a file of `JSONL`, but {str(metrics_path)!r} is not "
            "there. Name what `phalanx train` has written."
        )
    records = _read_metrics(metrics_path)
    by_kind: dict[str, list[Record]] = {"step": [], "epoch": [], "failure": [], "ranks": []}
    for record in records:
        _check_places(record, metrics_path)
        by_kind[record["kind"]].append(record)
    by_kind["step"].sort(key=lambda record: record["step"])
    if not by_kind["step"] or by_kind["step"][-1]["step"] < 1:
        raise ConfigError(f"`RUN` must have steps, from 1 on, but {str(metrics_path)!r} has none.")
    return RecordedRun(
        name=name,
        steps=by_kind["step"],
        epochs=by_kind["epoch"],
        failures=by_kind["failure"],
        changes=by_kind["ranks"],
        config=folder.read_config() if is_folder and folder.config_path.is_file() else {},
        weights=_hash_of(folder.model_path) if is_folder else None,
    )


def _read_metrics(path: Path) -> list[Record]:
    """Read a file of `JSONL`; the last line of a run under way may be torn."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"{path} must be a readable file, but is not: {error}.") from error
    lines = text.removesuffix("\n").split("\n")  # JSON may hold U+2028, where `splitlines` cuts
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(read_record(line))
        except NO_RECORD as error:
            if number < len(lines):
                raise CheckpointError(
                    f"Line {number} of {path} must be a step or an epoch, but is {line[:80]!r}."
                ) from error
    return records


def _check_places(record: Record, path: Path) -> None:
    """Refuse a record whose place in the run is no number that a chart can show."""
    for name in ("epoch", "last_step") if record["kind"] == "epoch" else ("step",):
        if not 0 <= record[name] < _MOST_STEPS:
            raise CheckpointError(
                f"`{name}` of each {record['kind']} in {path} must be from 0 to 2**53 - 1, but one "
                f"is {record[name]!r:.80}."
            )


def _hash_of(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


# Any, here and below: JSON.
def number_of(value: Any) -> float:
    """Return a number of a record; nan for anything else.

    Example:
        >>> number_of(3), number_of(None), number_of("3")
        (3.0, nan, nan)
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return math.nan
    if abs(value) > _LARGEST:
        return math.nan
    return 0.0 if abs(value) < _SMALLEST else float(value)


def numbers_of(value: Any) -> list[float]:
    """Return the numbers of a record's list; none where it is no list."""
    return [number_of(each) for each in value] if isinstance(value, list) else []

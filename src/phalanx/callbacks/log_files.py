"""A training written down for other programs: JSON lines, CSV, TensorBoard."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import (
    EpochDone,
    Event,
    FitBegun,
    FitEnded,
    RanksChanged,
    StepDone,
    WorkerLost,
)
from phalanx.errors import ConfigError, UnsupportedError
from phalanx.files import written_whole
from phalanx.plan import check_argument

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_EPOCH_COLUMNS = ("epoch", "steps", "samples", "seconds")

# Any: JSON.
Record = dict[str, Any]


class JSONL(Callback):
    """A callback that writes a line of JSON for each step, each epoch, each lost worker and each
    change of ranks.

    The lines are as in a run folder's `metrics.jsonl`. A file that is there is continued: its lines
    of steps that are still to come are dropped, of another run or of this one before a
    :meth:`Trainer.resume`. On ranks the first one writes.

    Args:
        path: The file; its folder is made when it is needed.

    Raises:
        ConfigError: ``path`` is no path; or, at the first event, something else lies there.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = read_path(path)
        self._is_continued = False

    def attach(self, trainer: Any) -> None:
        """Write down the training of ``trainer``."""
        super().attach(trainer)
        self._is_continued = False

    def __call__(self, event: Event) -> None:
        """Write a line, in about ten microseconds."""
        if not self.is_writer or isinstance(event, FitEnded):
            return
        with writing_to(self._path):
            if isinstance(event, FitBegun):
                self._continue(event.steps, event.epochs)
                return
            if not self._is_continued:  # a loop of the user's own calls no `fit`
                self._continue(math.inf, math.inf)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line_of(record_of(event)))

    def _continue(self, steps: float, epochs: float) -> None:
        """Keep the lines of what was done before."""
        *lines, torn = _text_of(self._path).split("\n")
        try:
            if not '{"kind": '.startswith(torn[:9]):
                raise ValueError(torn)  # not by us; our own text may end with half a line
            records = [read_record(line) for line in lines]
        except ValueError as error:
            raise ConfigError(
                f"`path` must be a file of `JSONL`, but {str(self._path)!r} holds something else: "
                f"{error!s:.80}. Name another."
            ) from error
        kept = [
            each
            for each in records
            if _step_of(each) <= steps and (each["kind"] != "epoch" or each["epoch"] <= epochs)
        ]
        with written_whole(self._path) as draft:
            draft.write_text("".join(map(_line_of, kept)), encoding="utf-8")
        self._is_continued = True


def record_of(event: Event) -> Record:
    """Return what is kept of a step, an epoch, a lost worker or changed ranks."""
    if isinstance(event, StepDone):
        numbers = {name: value for name, value in vars(event).items() if name != "spans"}
        return {"kind": "step", **numbers, "busy_s": event.busy_s}
    kinds: dict[type, str] = {EpochDone: "epoch", WorkerLost: "failure", RanksChanged: "ranks"}
    return {"kind": kinds[type(event)], **asdict(event)}


def read_record(line: str) -> Record:
    """Read a line of `JSONL`.

    Raises:
        ValueError: It holds something else.
    """
    record = json.loads(line)
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in ("step", "epoch", "failure", "ranks") or not isinstance(_step_of(record), int):
        raise ValueError(f"{line:.80} is no line of a run")
    return dict(record)


def _step_of(record: Record) -> Any:
    return record.get("steps" if record["kind"] == "epoch" else "step")


def _line_of(record: Record) -> str:
    return json.dumps(finite(record), allow_nan=False) + "\n"


# Any, here and below: JSON.
def finite(value: Any) -> Any:
    """Return ``value`` with null for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class CSV(Callback):
    """A callback that writes a row for each epoch: what it was, and its means.

    The columns are "epoch", "steps", "samples", "seconds", "train.loss" and so on. A file that is
    there is continued, as `JSONL` does. On ranks the first one writes.

    Args:
        path: The file; its folder is made when it is needed.

    Raises:
        ConfigError: ``path`` is no path; or, at the first row, something else lies there.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = read_path(path)

    def on_epoch_end(self, event: EpochDone) -> None:
        """Rewrite the file with one row more: they are few, and there may be new columns."""
        if not self.is_writer:
            return
        row = {name: getattr(event, name) for name in _EPOCH_COLUMNS} | means_of(event, ".")
        with writing_to(self._path):
            rows = [each for each in self._rows() if int(each["epoch"]) < event.epoch] + [row]
            with written_whole(self._path) as draft, draft.open("w", encoding="utf-8") as file:
                columns = dict.fromkeys(name for each in rows for name in each)
                writer = csv.DictWriter(file, list(columns), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)

    def _rows(self) -> list[dict[str, Any]]:  # Any: texts of before, and numbers
        header, *lines = [*csv.reader(_text_of(self._path).splitlines())] or [[]]
        rows = [dict(zip(header, line, strict=False)) for line in lines]
        if (header and header[0] != "epoch") or not all(x["epoch"].isdecimal() for x in rows):
            raise ConfigError(
                f"`path` must be a file of `CSV`, but {str(self._path)!r} holds something else. "
                "Name another."
            )
        return rows


class TensorBoard(Callback):
    """A callback that writes scalars for TensorBoard, which shows them during the training.

    Each step has "step/loss", "step/learning_rate" (and "…_1" for further groups of parameters) and
    "step/grad_norm"; each epoch has "train/loss", "validation/loss" and so on. After a
    :meth:`Trainer.resume` TensorBoard leaves out what was written of steps that are done again. On
    ranks the first one writes.

    Args:
        folder: Where the files go; made when it is needed.

    Raises:
        ConfigError: ``folder`` is no path.
        UnsupportedError: The package `tensorboard` is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        check_argument(isinstance(folder, (str, os.PathLike)), "folder", "be a path", folder)
        try:
            # Optional: in the extra `board`. Slow, too.
            from torch.utils.tensorboard import SummaryWriter  # noqa: F401
        except ImportError as error:
            raise UnsupportedError(
                "`TensorBoard` needs the package tensorboard, which is not installed. Install it "
                "by `pip install tensorboard`, or write a `JSONL` or a `CSV`."
            ) from error
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def attach(self, trainer: Any) -> None:
        """Write down the training of ``trainer``."""
        super().attach(trainer)
        self._close()

    def on_step_end(self, event: StepDone) -> None:
        """Write the scalars of a step."""
        if not self.is_writer:
            return
        writer = self._open(event.step)
        for name, value in _scalars_of(event).items():
            writer.add_scalar(name, value, event.step)

    def on_epoch_end(self, event: EpochDone) -> None:
        """Write the scalars of an epoch."""
        if not self.is_writer:
            return
        writer = self._open(event.steps)
        for name, value in means_of(event, "/").items():
            writer.add_scalar(name, value, event.steps)
        writer.flush()

    def on_fit_end(self, event: FitEnded) -> None:  # noqa: ARG002
        """Close the files."""
        self._close()

    def _open(self, step: int) -> SummaryWriter:
        if self._writer is None:
            # Optional and slow, as above.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        return self._writer

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _scalars_of(event: StepDone) -> dict[str, float]:
    rates = {
        "step/learning_rate" + (f"_{group}" if group else ""): rate
        for group, rate in enumerate(event.learning_rates)
        if not math.isnan(rate)
    }
    norm = {} if event.grad_norm is None else {"step/grad_norm": event.grad_norm}
    return {"step/loss": event.loss, **rates, **norm}


def means_of(event: EpochDone, between: str) -> dict[str, float]:
    """Return the means of an epoch by names such as "train.loss"."""
    validation = (event.validation or {}).items()
    return {
        **{f"train{between}{name}": value for name, value in event.train.items()},
        **{f"validation{between}{name}": value for name, value in validation},
    }


def read_path(path: Any) -> Path:  # Any: whatever the user wrote
    """Return the path of a file that is to be written; a folder is refused."""
    check_argument(isinstance(path, (str, os.PathLike)), "path", "be a path", path)
    found = Path(path)
    if found.is_dir():
        raise ConfigError(
            f"`path` must be a file, but {str(path)!r} is a folder. Name a file in it."
        )
    return found


def _text_of(path: Path) -> str:
    """Return the text of a file; an empty one where the file is missing."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Make the folder of ``path``, and name what the body cannot write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"`path` must be a file that can be written, but is {str(path)!r}: {error}. Make room "
            "and see to the permissions, or name another."
        ) from error

"""The folder that a training leaves behind.

runs/digits-cnn-001/
    config.json         the options as resolved, versions, devices
    metrics.jsonl       one line per step, per epoch and per lost worker
    model.safetensors   the trained weights, under the plain model's keys
    checkpoint/         where `--resume` goes on (written by the trainer)
    training.png        what it looked like
    trace.json          with `--trace`: what each replica did when
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from phalanx.callbacks import NO_RECORD, Record, read_record, written_record
from phalanx.errors import CheckpointError, ConfigError
from phalanx.files import open_regular, read_text, save_tensors, written_whole

_MAX_NAME_LENGTH = 60
_MOST_CONFIG_BYTES = 1 << 20


class RunFolder:
    """The files of one run; everything that the command line writes is written here.

    A file that is replaced is first written beside and then renamed, so that a reader, or a crash,
    meets the old one or the new one and never a half.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.metrics_path = path / "metrics.jsonl"
        self.model_path = path / "model.safetensors"
        self.checkpoint_path = path / "checkpoint"
        self.figure_path = path / "training.png"
        self.trace_path = path / "trace.json"

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make a new run folder, with the folders above it.

        Raises:
            ConfigError: Something is there already, or the folder cannot be made.
        """
        refuse_existing(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(_cannot_be_made(path, exc)) from exc
        return cls(path)

    @classmethod
    def create_next(cls, parent: Path, name: str) -> RunFolder:
        """Make ``parent/name-NNN`` with the first free number.

        Two trainings that start at the same moment get two numbers: only one of them can make a
        folder.

        Raises:
            ConfigError: The folder cannot be made.
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = parent / f"{name}-{number:03d}"
                try:
                    path.mkdir()
                except FileExistsError:
                    number += 1
                else:
                    return cls(path)
        except OSError as exc:
            raise ConfigError(_cannot_be_made(parent, exc)) from exc

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of a run that is to go on.

        Raises:
            ConfigError: It is no run folder, or holds nothing to go on from.
        """
        folder = cls(path)
        if not folder.config_path.is_file():
            raise ConfigError(
                f"`--resume` must name the folder of a run, but {path} has no config.json. "
                "Leave `--resume` out to start a run."
            )
        if not folder.has_checkpoint():
            raise ConfigError(
                f"`--resume` must name a run with a checkpoint, but {path} has none: it ended "
                "before the first was saved. Start the run again."
            )
        if folder.checkpoint_path.is_symlink():  # the trainer would follow it
            raise ConfigError(
                f"`--resume` must name a run with its checkpoint in its own folder, but "
                f"{folder.checkpoint_path} is a link, and what it leads to would be replaced. "
                "Put the checkpoint there."
            )
        return folder

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the folder from other processes that would train in it, for the body.

        Raises:
            ConfigError: Another one does.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"`--resume` must name a run that has stopped, but another process still "
                    f"trains in {self.path}. Stop that one first."
                ) from None
            except OSError:
                pass  # its file system knows of no locks
            yield
        finally:
            os.close(descriptor)

    def has_checkpoint(self) -> bool:
        """Say whether there is something to go on from."""
        # A trainer that was killed while it replaced a checkpoint has left the one before.
        before = self.checkpoint_path.with_name(self.checkpoint_path.name + ".previous")
        return self.checkpoint_path.is_dir() or before.is_dir()

    # Any: JSON.
    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, in place of the one before."""
        self._replace(self.config_path, json.dumps(config, indent=2) + "\n")

    # Any: JSON.
    def read_config(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            CheckpointError: It is unreadable or no JSON object.
        """
        try:
            config = json.loads(read_text(self.config_path, max_bytes=_MOST_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError) as exc:
            raise CheckpointError(
                f"{self.config_path} must be readable JSON, but is not: {exc}."
            ) from exc
        if not isinstance(config, dict):
            raise CheckpointError(f"{self.config_path} must hold a JSON object, but does not.")
        return config

    def append_metrics(self, records: Iterable[Record]) -> None:
        """Add lines to metrics.jsonl; they have reached the system when this returns."""
        lines = "".join(map(written_record, records))
        if not lines:
            return
        with (
            _trouble_named(self.metrics_path),
            self.metrics_path.open("a", encoding="utf-8") as file,
        ):
            file.write(lines)

    def rewind_metrics(self, *, steps: int, epochs: int) -> list[Record]:
        """Drop what was written after the checkpoint, and return the rest.

        A run that was killed may have written lines for steps that it will now do again, and its
        last line may be torn.

        Args:
            steps: Steps that the checkpoint holds.
            epochs: Epochs that the checkpoint holds.

        Raises:
            CheckpointError: A line other than the last is damaged, or a step is missing.
        """
        kept = [
            record
            for record in read_metrics(self.metrics_path)
            if (record["epoch"] <= epochs if record["kind"] == "epoch" else record["step"] <= steps)
        ]
        found = [record["step"] for record in kept if record["kind"] == "step"]
        if found != list(range(1, steps + 1)):
            raise CheckpointError(
                f"{self.metrics_path} must hold the steps 1 to {steps} of the checkpoint, but "
                f"holds {len(found)} of them. Put the file of that run back."
            )
        self._replace(self.metrics_path, "".join(map(written_record, kept)))
        return kept

    def remove_config(self) -> None:
        """Take config.json back, and the folder too if it holds nothing else."""
        self.config_path.unlink(missing_ok=True)
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def write_model(self, module: nn.Module) -> None:
        """Write the module's weights and buffers, each whole and on its own.

        The trainer's tensors are views of one buffer and may be shared between layers; safetensors
        files hold neither, hence the copies.
        """
        tensors = {
            name: value.detach().cpu().contiguous().clone()
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor)
        }
        with _trouble_named(self.model_path), written_whole(self.model_path) as draft:
            save_tensors(tensors, draft, metadata={"format": "pt"})

    def _replace(self, path: Path, text: str) -> None:
        with _trouble_named(path), written_whole(path) as draft:
            draft.write_text(text, encoding="utf-8")

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def read_metrics(path: Path) -> list[Record]:
    """Read a file such as metrics.jsonl; none where there is none. Its last line may be torn.

    Raises:
        CheckpointError: It cannot be read, or a line other than the last is damaged.
    """
    if not path.exists():
        return []
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8", errors="replace")
    except OSError as exc:
        raise CheckpointError(f"{path} must be a readable file, but is not: {exc}.") from exc
    lines = text.removesuffix("\n").split("\n")  # JSON may hold U+2028, where `splitlines` cuts
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(read_record(line))
        except NO_RECORD as exc:
            if number < len(lines):
                raise CheckpointError(
                    f"Line {number} of {path} must be a step or an epoch, but is {line[:80]!r}."
                ) from exc
    return records


def refuse_existing(path: Path) -> None:
    """Refuse a place for a new run that holds something already.

    Raises:
        ConfigError: It is no folder, or a folder that is not empty.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"`--out` must be a folder, but {path} is a file. Name another.")
    if any(path.iterdir()):
        resumes = RunFolder(path).has_checkpoint()
        way_out = f"Continue with `--resume {path}`, or name" if resumes else "Name"
        raise ConfigError(
            f"`--out` must be a new or empty folder, but {path} holds files already. "
            f"{way_out} another with `--out`."
        )


def name_run(data: str, model: str) -> str:
    """Make a folder name of two specs: their words, and of paths only the last part.

    Example:
        >>> name_run("digits", "cnn"), name_run("text:/data/old-books/", "my.models:Net")
        ('digits-cnn', 'text-old-books-my.models-Net')
    """
    return f"{_slug(data)}-{_slug(model)}"


def _slug(spec: str) -> str:
    reader, separator, where = spec.partition(":")
    last_part = re.split(r"[/\\]+", where.rstrip("/\\"))[-1]
    words = re.findall(r"\w[\w.]*", f"{reader}{separator}{last_part}", flags=re.ASCII)
    return "-".join(words)[:_MAX_NAME_LENGTH] or "run"


@contextlib.contextmanager
def _trouble_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} must be a file that can be written, but is not: {error}. Make room and see to "
            f"the permissions, then go on from the last checkpoint with `--resume {path.parent}`."
        ) from error


def _cannot_be_made(path: Path, exc: OSError) -> str:
    return (
        f"The run folder {path} must be a place where folders can be made, but is not: "
        f"{exc.strerror}. Name another with `--out`."
    )

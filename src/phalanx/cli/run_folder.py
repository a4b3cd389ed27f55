"""The folder that a training leaves behind.

runs/flowers-mlp-001/
    config.json         the options, the form of the data, versions
    metrics.jsonl       one line per step, per epoch and per lost worker
    checkpoints/        where `phalanx resume` continues (see `Checkpoint`)
    best/               with `--early-stopping`: the best epoch's checkpoint
    model.safetensors   the trained weights, under the plain model's keys
    trace.json          with `--trace`: each replica's work, by time
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.errors import CheckpointError, ConfigError
from phalanx.files import save_tensors, written_whole

_FORMAT = 2
_WRITABLE_BY_OTHERS = 0o022


class RunFolder:
    """The files of one run. One that is replaced is there whole, before and after."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints_path = path / "checkpoints"
        self.best_path = path / "best"
        self.model_path = path / "model.safetensors"
        self.trace_path = path / "trace.json"

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make a new run folder, with the folders above it.

        Raises:
            ConfigError: Something is there already, or the folder cannot be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not any(path.iterdir()):
                return cls(path)
        except OSError as error:
            raise ConfigError(
                f"`--out` must be a place for a new folder, but is {str(path)!r}: {error.strerror}."
            ) from error
        raise ConfigError(
            f"`--out` must be a new or empty folder, but {path} holds files. Continue its run with "
            f"`phalanx resume {path}`, or name another."
        )

    @classmethod
    def create_next(cls, parent: Path, name: str) -> RunFolder:
        """Make ``parent/name-NNN`` with the first free number; runs that race get two numbers.

        Raises:
            ConfigError: No folder can be made there.
        """
        number = 1
        try:
            parent.mkdir(parents=True, exist_ok=True)
            while True:
                path = parent / f"{name}-{number:03d}"
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    return cls(path)
                number += 1
        except OSError as error:
            raise ConfigError(
                f"`--out` must be given: no folder can be made in {str(parent)!r} "
                f"({error.strerror})."
            ) from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from training in this folder, for the body.

        Raises:
            ConfigError: One does.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"`RUN` must have stopped, but another process trains in {self.path}."
                ) from None
            except OSError:
                pass  # its file system knows of no locks
            yield
        finally:
            os.close(descriptor)

    def may_name_code(self) -> bool:
        """Tell whether only this user can write here, as ssh wants of its folder."""
        return all(
            found.st_uid == os.getuid() and not found.st_mode & _WRITABLE_BY_OTHERS
            for found in (self.path.stat(), self.config_path.stat())
        )

    # Any: JSON.
    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json."""
        with written_whole(self.config_path) as draft:
            draft.write_text(json.dumps({"format": _FORMAT, **config}, indent=2) + "\n", "utf-8")

    # Any: JSON.
    def read_config(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            ConfigError: The file is missing.
            CheckpointError: It is damaged, or of another version of Phalanx.
        """
        if not self.config_path.is_file():
            raise ConfigError(f"`RUN` must be a run folder, but {self.path} has no config.json.")
        try:
            config: Any = json.loads(self.config_path.read_text("utf-8"))
            if config["format"] == _FORMAT:
                return dict(config)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.config_path} must be a run's config.json, but is not: {error!r}."
            ) from error
        raise CheckpointError(
            f"`format` in {self.config_path} must be {_FORMAT}, but is {config['format']!r:.40}. "
            "Use the version of Phalanx that wrote it."
        )

    def discard_if_unused(self) -> None:
        """Remove the folder of a run that has done no step."""
        if not self.metrics_path.exists():
            self.config_path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds something else
                self.path.rmdir()

    def write_model(self, module: nn.Module) -> None:
        """Write the module's weights and buffers; layers that share a tensor get a copy each."""
        tensors = {
            name: value.detach().cpu().contiguous().clone()
            for name, value in module.state_dict().items()
        }
        with written_whole(self.model_path) as draft:
            save_tensors(tensors, draft, metadata={"format": "pt"})


def name_run(data: str, model: str) -> str:
    """Return a folder's name for data and model: of a path only the last part.

    Example:
        >>> name_run("/data/old books.csv", "mlp"), name_run("digits", "my.models:Net")
        ('old-books-mlp', 'digits-my.models-Net')
    """
    stem = Path(data).stem if ":" not in data else data
    return "-".join(re.findall(r"[\w.]+", f"{stem} {model}", flags=re.ASCII))[:60]

"""The folders that callbacks save checkpoints to: their names, and which may be removed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.plan import check_argument
from phalanx.warning import warn_user

__all__ = [
    "check_saved_name",
    "name_of_step",
    "newest_in",
    "read_saved_folder",
    "remove_checkpoint",
]

_NAME = re.compile(r"step-\d{8,18}")
_FILES = {"checkpoint.json", "model.safetensors", "state.pt"}


# Any: whatever the user wrote.
def read_saved_folder(name: str, folder: Any) -> Path:
    """Read the folder below which checkpoints are saved; it need not be there."""
    check_argument(isinstance(folder, (str, os.PathLike)), name, "be a path", folder)
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`{name}` must be a folder, but {str(path)!r} is a file. Name another.")
    return path


def name_of_step(step: int) -> str:
    """Return the name of the folder for a checkpoint after ``step``."""
    return f"step-{step:08d}"


def check_saved_name(name: object) -> str:
    """Check that a name is one of ours, as what has it may be removed later."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"`kept` holds {name!r:.80}, no folder of ours")
    return name


def newest_in(folder: Path) -> Path | None:
    """Return the checkpoint of the latest step below ``folder``; None for none."""
    found = [each for each in folder.glob("step-*") if _NAME.fullmatch(each.name)]
    whole = [each for each in found if (each / "checkpoint.json").is_file()]
    return max(whole, key=lambda each: int(each.name.removeprefix("step-")), default=None)


def remove_checkpoint(folder: Path) -> None:
    """Remove a folder that holds what `Trainer.save` writes, and nothing else."""
    if not folder.is_dir():
        return
    found = list(folder.iterdir())
    if folder.is_symlink() or not all(each.name in _FILES and _is_file(each) for each in found):
        warn_user(
            f"{folder} is kept no more, but stays: it is a link, or holds more than a checkpoint.",
        )
        return
    for path in found:
        path.unlink()
    folder.rmdir()


def _is_file(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()

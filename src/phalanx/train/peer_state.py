"""A trainer's state as one rank gives it to another: the files of a checkpoint, in one message."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors.numpy

from phalanx.train.state import TrainerState, capture_state

__all__ = ["pack_state_of", "unpacked_state"]


def pack_state_of(state: TrainerState) -> bytes:
    """Return all that another process needs to go on from ``state``.

    Raises:
        UnsupportedError, CheckpointError: As for `capture_state`.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-state-") as parent:
        folder = Path(parent) / "state"
        capture_state(state, folder)
        files = {path.name: np.fromfile(path, dtype=np.uint8) for path in folder.iterdir()}
        return safetensors.numpy.save(files)


@contextmanager
def unpacked_state(packed: bytes) -> Iterator[Path]:
    """Lay what :func:`pack_state_of` returned into a folder, as a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="phalanx-state-") as parent:
        folder = Path(parent)
        for name, content in safetensors.numpy.load(packed).items():
            (folder / Path(name).name).write_bytes(content.tobytes())
        yield folder

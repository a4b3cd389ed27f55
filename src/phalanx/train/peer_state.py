"""A trainer's state as one rank gives it to another: the files of a checkpoint, in one message."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from phalanx.distributed import ElasticExchange
from phalanx.errors import CheckpointError, StateError
from phalanx.train.state import TrainerState, capture_state

__all__ = ["join_ranks", "pack_state_of", "unpacked_state"]

_LAST_STEP = "last step"


def join_ranks(
    elastic: ElasticExchange,
    describe: Callable[[], dict[str, Any]],  # Any: JSON
    give: Callable[[], bytes],
    restore: Callable[[Path], None],
) -> int | None:
    """Become one of the ranks; return where the others' `fit` ends, if that is at a step.

    Args:
        describe, give: As `ElasticExchange.enter` takes them.
        restore: Takes over a checkpoint.

    Raises:
        Exception: As `ElasticExchange.enter`, or ``restore``; this is none of the ranks then.
    """
    received = elastic.enter(describe, give)
    if received is None:
        return None
    try:
        with unpacked_state(received) as (folder, last_step):
            _take_over(restore, folder)
            return last_step
    except BaseException:
        elastic.leave(finished=False)
        raise


def _take_over(restore: Callable[[Path], None], folder: Path) -> None:
    try:
        restore(folder)
    except CheckpointError as exc:
        raise StateError(
            "Every rank must train the same model with the same optimizer, but what this one has "
            f"been given by a peer does not fit: {exc}"
        ) from exc


def pack_state_of(state: TrainerState, last_step: int | None) -> bytes:
    """Return all that another process needs to go on from ``state``.

    Args:
        last_step: Where the `fit` that is under way ends; None where that goes by epochs.

    Raises:
        UnsupportedError, CheckpointError: As for `capture_state`.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-state-") as parent:
        folder = Path(parent) / "state"
        capture_state(state, folder)
        files = {path.name: np.fromfile(path, dtype=np.uint8) for path in folder.iterdir()}
        if last_step is not None:
            files[_LAST_STEP] = np.array([last_step])
        return safetensors.numpy.save(files)


@contextmanager
def unpacked_state(packed: bytes) -> Iterator[tuple[Path, int | None]]:
    """Lay what :func:`pack_state_of` returned into a folder, as a checkpoint; and the last step."""
    files = safetensors.numpy.load(packed)
    last_step = files.pop(_LAST_STEP, None)
    with tempfile.TemporaryDirectory(prefix="phalanx-state-") as parent:
        folder = Path(parent)
        for name, content in files.items():
            (folder / Path(name).name).write_bytes(content.tobytes())
        yield folder, None if last_step is None else int(last_step[0])

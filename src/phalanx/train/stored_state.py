"""Check what a checkpoint says before any of it is put into place.

A digest shows that a file is as somebody wrote it, not that it was `save()`. So the types and
ranges of the document's values are looked at here; one that cannot be taken over is a ValueError
with its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx.train.position import Position

__all__ = [
    "check_name",
    "read_formation",
    "read_optional_whole",
    "read_position",
    "read_whole",
    "read_workloads",
]

_LARGEST = 2**63 - 1
_MOST_REPLICAS = 4096  # a formation that is stored is one that was chosen by "auto", or was given


# Any, here and below: JSON.
def read_whole(name: str, value: Any, least: int = 0, most: int = _LARGEST) -> int:
    """Read a whole number; True is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"`{name}` is {value!r:.80}, no whole number from {least} to {most}")
    return value


def read_optional_whole(name: str, value: Any, least: int = 0) -> int | None:
    """Read a whole number, or None."""
    return None if value is None else read_whole(name, value, least)


def check_name(name: str, value: Any) -> None:
    """Check that it is the name of a class, or None."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`{name}` is {value!r:.80}, no text")


def read_position(values: Any) -> Position:
    """Read where the run stands."""
    position = Position(**_mapping("position", values))
    for name in ("steps", "epochs", "batch", "samples"):
        read_whole(name, getattr(position, name))
    for name in ("weight", "weighted_loss"):
        _finite(name, getattr(position, name))
    if position.weight < 0 or (position.batch > 0) != (position.weight > 0):
        raise ValueError(f"`weight` is {position.weight!r} after {position.batch} batches")
    return position


def read_formation(values: Any) -> tuple[int, int] | None:
    """Read the number of replicas, and of threads inside each."""
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != 2:
        raise ValueError(f"`formation` is {values!r:.80}, no list of two numbers")
    replicas, intra_op = (read_whole("formation", each, 1, _MOST_REPLICAS) for each in values)
    return replicas, intra_op


def read_workloads(values: Any) -> tuple[float, ...] | None:
    """Read the shares that balancing had come to."""
    if values is None:
        return None
    if not isinstance(values, list):
        raise ValueError(f"`workloads` is {values!r:.80}, no list")
    for each in values:
        _finite("workloads", each)
        if each <= 0:
            raise ValueError(f"`workloads` holds {each!r}, which is not above 0")
    return tuple(map(float, values))


def _mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` is {value!r:.80}, no mapping")
    return value


def _finite(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (isinstance(value, int) and abs(value) > _LARGEST) or not math.isfinite(value):
        raise ValueError(f"`{name}` is {value!r:.80}, no finite number")

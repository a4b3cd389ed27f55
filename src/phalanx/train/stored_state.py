"""Check what a checkpoint says before any of it is put into place.

A digest shows that a file is as somebody wrote it, not that it was `save()`. So types, shapes and
ranges are looked at here; nothing is written, and what cannot be taken over is a ValueError with
the name of the value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.execution import ELEMENTWISE, MOMENTS, STEP
from phalanx.train.position import Position

__all__ = [
    "check_groups",
    "check_name",
    "check_optimizer_entries",
    "check_scheduler_state",
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


def check_groups(groups: Any, optimizer: Optimizer) -> None:
    """Check an optimizer's unpacked groups against those that there are."""
    ours = optimizer.state_dict()["param_groups"]
    for place, (group, like) in enumerate(zip(groups, ours, strict=True)):
        name = f"groups[{place}]"
        if _mapping(name, group)["params"] != like["params"]:
            raise ValueError(f"`{name}` lists other parameters")
        lacking = [
            key
            for key, default in optimizer.defaults.items()
            if key not in group and default is not None and default is not False
        ]
        if lacking:
            raise ValueError(f"`{name}` lacks {lacking}")
        for key in group.keys() & like.keys() - {"params"}:
            _check_like(f"{name}.{key}", group[key], like[key])


def check_optimizer_entries(entries: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Check whose the entries of an optimizer's state are, and of an elementwise one their kind.

    Entries beside torch's own are the user's, of any kind. Shapes are compared elsewhere, with a
    sentence of their own.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys_by_index: dict[int, set[str]] = {}
    dtype_by_index: dict[int, torch.dtype] = {}
    for name, value in entries.items():
        text, dot, key = name.partition(".")
        if not (dot and key and text.isascii() and text.isdecimal() and text == str(int(text))):
            raise ValueError(f"{name!r} is no entry of an optimizer's state")
        if int(text) >= len(parameters):
            raise ValueError(f"{name!r} is of none of {len(parameters)} parameters")
        if type(optimizer) in ELEMENTWISE and (key == STEP or key in MOMENTS):
            keys_by_index.setdefault(int(text), set()).add(key)
            _check_entry(name, key, value, parameters[int(text)])
            is_moment = isinstance(value, Tensor) and key != STEP
            if is_moment and dtype_by_index.setdefault(int(text), value.dtype) != value.dtype:
                raise ValueError(f"{name!r} is {value.dtype}, unlike what stands beside it")
    if type(optimizer) in ELEMENTWISE:
        _check_complete(keys_by_index, optimizer)


def _check_entry(name: str, key: str, value: Any, parameter: Tensor) -> None:
    if not isinstance(value, Tensor):
        if value is not None and key != STEP:
            raise ValueError(f"{name!r} is no tensor")
        if value is not None:
            _count(name, value)
    elif key == STEP:
        if value.numel() != 1 or value.dim() > 0 or not value.is_floating_point():
            raise ValueError(f"{name!r} is no single number of a floating dtype")
        _count(name, value.item())
    elif not _can_be_moment(value, parameter):
        raise ValueError(f"{name!r} is {value.dtype} of a parameter that is {parameter.dtype}")


def _can_be_moment(value: Tensor, parameter: Tensor) -> bool:
    """Tell whether ``value`` may be of ``parameter``, whose dtype may have changed since."""
    if parameter.is_complex():
        return value.is_complex()
    return value.is_floating_point() and value.itemsize > 1


def _check_complete(keys_by_index: Mapping[int, set[str]], optimizer: Optimizer) -> None:
    """Refuse parameters of one group of which one has an entry that the other lacks."""
    start = 0
    for group in optimizer.param_groups:
        stop = start + len(group["params"])
        found = [keys for index, keys in keys_by_index.items() if start <= index < stop]
        if any(keys != found[0] for keys in found):
            raise ValueError("an optimizer's parameters of one group have different entries")
        start = stop


def check_scheduler_state(values: Any, scheduler: LRScheduler) -> None:
    """Check a scheduler's unpacked state against what it holds now."""
    like = scheduler.state_dict()
    values = _mapping("scheduler", values)
    lacking = [key for key in like if key not in values and not key.startswith("_")]
    if lacking:  # those with an underscore come and go with torch's versions
        raise ValueError(f"`scheduler` lacks {lacking}")
    is_torchs = type(scheduler).__module__ == LRScheduler.__module__  # their lists do not grow
    for key, value in values.items():
        if not isinstance(key, str) or (key not in like and hasattr(scheduler, key)):
            raise ValueError(f"`scheduler` holds {key!r}, which is no part of its state")
        if key in like:
            _check_like(f"scheduler.{key}", value, like[key])
        if is_torchs and isinstance(like.get(key), list) and len(value or ()) != len(like[key]):
            raise ValueError(f"`scheduler.{key}` has not {len(like[key])} members")
    # Of a scheduler that is made of others; the name is also that of its state's entry.
    inner = getattr(scheduler, "_schedulers", ())
    for each, own in zip(values.get("_schedulers", ()), inner, strict=True):
        check_scheduler_state(each, own)


def _check_like(name: str, value: Any, like: Any) -> None:
    """Check that ``value`` is of the kind of ``like``, which has its place now.

    What is None now may become anything, as what some optimizers and schedulers have not yet
    counted is; a choice that is made now may have been left open.
    """
    if value is None and (like is None or isinstance(like, (bool, list))):
        return
    if isinstance(like, Mapping):
        _check_mapping_like(name, _mapping(name, value), like)
    elif isinstance(like, tuple) and isinstance(value, (list, tuple)):
        if len(value) != len(like):
            raise ValueError(f"`{name}` has {len(value)} members and not {len(like)}")
        for place, pair in enumerate(zip(value, like, strict=True)):
            _check_like(f"{name}[{place}]", *pair)
    elif isinstance(like, list) and isinstance(value, (list, tuple)):
        for place, each in enumerate(value if like else ()):
            _check_like(f"{name}[{place}]", each, like[min(place, len(like) - 1)])
    else:
        _check_plain_like(name, value, like)


def _check_mapping_like(name: str, value: Mapping[Any, Any], like: Mapping[Any, Any]) -> None:
    if isinstance(like, Counter):
        for key, count in value.items():
            read_whole(name, key)
            read_whole(name, count)
        return
    for key in value.keys() & like.keys():
        _check_like(f"{name}.{key}", value[key], like[key])


def _check_plain_like(name: str, value: Any, like: Any) -> None:
    if like is None:
        return
    if isinstance(like, Tensor):  # a learning rate, say; a number has been one before
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = fits or (isinstance(value, Tensor) and value.shape == like.shape)
    elif isinstance(like, bool):
        fits = isinstance(value, bool)  # torch refuses numbers in some of its steps
    elif isinstance(like, (int, float)):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = fits and (isinstance(value, float) or abs(value) <= _LARGEST)
    elif isinstance(like, str):
        fits = isinstance(value, str)
    else:
        fits = not isinstance(like, (list, tuple))
    if not fits:
        raise ValueError(f"`{name}` is {value!r:.80}, where there is {like!r:.80} now")


def _mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` is {value!r:.80}, no mapping")
    return value


def _finite(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (isinstance(value, int) and abs(value) > _LARGEST) or not math.isfinite(value):
        raise ValueError(f"`{name}` is {value!r:.80}, no finite number")


def _count(name: str, value: Any) -> None:
    _finite(name, value)
    if value < 0:
        raise ValueError(f"`{name}` is {value!r}, below 0")

"""What a worker asks of the server of another host, and how tensors become bytes and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.tables.spec import TableSpec
from phalanx.tables.updaters import state_dtype

__all__ = [
    "UNKNOWN",
    "Operation",
    "as_memory",
    "from_memory",
    "read_all",
]

UNKNOWN = -1
"""Sent with a barrier in place of how many were finished before: the request is a new one."""


class Operation(IntEnum):
    """A request. What each has in its head's numbers, its text and its payload:

    text is the table's name; K is a number of rows, -1 for all; answers in brackets.
    """

    ENTER = 1  # -1 or the worker's number, client, number expected  [number, incarnation, barriers]
    LEAVE = 2
    TICK = 3  # the clock
    BARRIER = 4  # barriers finished before, text: name [round, barriers finished]
    OPEN = 5  # whether `init` is there, its form  text: spec  payload: init  [done, clock]
    GET = 6  # K  payload: rows  [payload: their values]
    ADD = 7  # K, round or 0, whether it assigns  number: its own  payload: rows, deltas
    ARRIVE = 8  # round
    FINISH = 9  # round
    COPY_ALL = 10  # [payload: each part; of a keys table the keys first, number of them]
    REPLACE_ALL = 11  # number of keys, number of parts  payload: parts
    COUNTS = 12  # [adds undone, keys]
    KEYS = 13  # [payload: keys]


def as_memory(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's bytes, where they lie."""
    if not tensor.numel():
        return memoryview(b"")
    known = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # to numpy
    return memoryview(known.numpy().data).cast("B")


def from_memory(
    payload: memoryview, offset: int, dtype: torch.dtype, shape: Sequence[int]
) -> tuple[Tensor, int]:
    """Return a tensor over bytes of ``payload``, and where the next one begins.

    Raises:
        ConfigError: The payload is too short.
    """
    count = math.prod(shape)
    if min(shape, default=0) < 0 or offset + count * dtype.itemsize > len(payload):
        raise ConfigError(
            f"The payload must hold {tuple(shape)} numbers of {dtype} from byte {offset} on, but "
            f"has {len(payload)} bytes."
        )
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu"), offset
    tensor = torch.frombuffer(payload, dtype=dtype, count=count, offset=offset)
    if len(shape) != 1:
        tensor = tensor.view(tuple(shape))
    return tensor, offset + count * dtype.itemsize


def read_all(
    payload: memoryview, spec: TableSpec, num_rows: int, num_parts: int | None = None
) -> list[Tensor]:
    """Return the keys of a keys table, then the values, then the states.

    Args:
        payload: The bytes of all of them.
        spec: The table.
        num_rows: The number of rows that each of them has.
        num_parts: How many tensors to read, keys apart; None for the values and all states.
    """
    widths = [spec.cols if kind == "element" else 1 for kind in spec.updater.states]
    kinds = [(spec.dtype, spec.cols), *((state_dtype(spec.dtype), width) for width in widths)]
    offset, parts = 0, []
    if spec.has_keys:
        keys, offset = from_memory(payload, 0, torch.int64, (num_rows,))
        parts.append(keys)
    for dtype, cols in kinds[:num_parts]:
        part, offset = from_memory(payload, offset, dtype, (num_rows, cols))
        parts.append(part)
    return parts

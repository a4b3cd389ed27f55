"""What a worker asks of the server of another host, and how tensors travel."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor

from phalanx.cluster import Array


class Operation(IntEnum):
    """A request. What each has in its message's numbers, its text and its arrays:

    text is the table's name; no rows are all rows; answers in brackets.
    """

    ENTER = 1  # -1 or the worker's number, client, number expected  [number, incarnation, barriers]
    LEAVE = 2
    TICK = 3  # the clock
    BARRIER = 4  # the last one passed  [its number]
    OPEN = 5  # text: spec  arrays: first values, or a rule's bounds and seed  [done, clock]
    GET = 6  # arrays: rows  [their values]
    ADD = 7  # round or 0  number: its own  arrays: rows, delta
    ARRIVE = 8  # round
    FINISH = 9  # round
    COPY_ALL = 10  # [arrays: of a keys table the keys; values, states]
    REPLACE_ALL = 11  # arrays: as of COPY_ALL
    COUNT = 12  # [keys]
    KEYS = 13  # [array: keys]


def as_array(tensor: Tensor) -> Array:
    """Return a tensor as it travels: the same memory where it is contiguous, bfloat16 as int16."""
    known = tensor.contiguous()
    return (known.view(torch.int16) if known.dtype == torch.bfloat16 else known).numpy()


def as_arrays(tensors: Iterable[Tensor | None]) -> list[Array]:
    """Return those of the tensors that there are, as they travel."""
    return [as_array(tensor) for tensor in tensors if tensor is not None]


def as_tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """Return what :func:`as_array` was given, over the same memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor

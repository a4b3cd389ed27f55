"""Messages between an executor and its worker processes, in memory that both see.

A message is a pickle, followed by the memory of its tensors and arrays. A worker reads a batch
where it lies, because tasks copy their rows; the executor copies the results that it reads.

This is the pickle of `multiprocessing`, between a process and its own forks; it crosses no host and
reads no file (docs/security.md). Torch's own sharing would move the tensors' storage.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import OutOfSpace
from phalanx.ipc import aligned
from phalanx.memory import SharedMemoryPool

_ROOM_BYTES = 1 << 32  # of addresses
_FIRST_BYTES = 1 << 16
_WORD_BYTES = 8

_adopted: list[object] = []  # in a worker, by the number that stands for it in messages


def adopt(shared: Iterable[object]) -> None:
    """Let these objects of a worker stand for those that the program passes to :func:`pickled`."""
    _adopted[:] = shared


def _adopted_at(number: int) -> object:
    return _adopted[number]


class _Packer(pickle.Pickler):
    """Pickle numbers instead of shared objects, and keep the memory of tensors apart."""

    numbers: dict[int, int]  # by id

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            return NotImplemented
        if id(obj) in self.numbers:
            return _adopted_at, (self.numbers[id(obj)],)
        return _reduce_tensor(obj) if isinstance(obj, Tensor) else NotImplemented


# Any: objects of the user's code.
def pickled(
    value: Any, shared: Sequence[object] = (), buffers: list[pickle.PickleBuffer] | None = None
) -> bytes:
    """Pickle ``value``.

    Args:
        shared: Objects that the reader has; see :func:`adopt`.
        buffers: Takes the memory of tensors and arrays. Default: it is in the pickle.
    """
    file = io.BytesIO()
    keep_apart = None if buffers is None else buffers.append
    packer = _Packer(file, protocol=5, buffer_callback=keep_apart)
    packer.numbers = {id(each): number for number, each in enumerate(shared)}
    packer.dump(value)
    return file.getvalue()


class Mailbox:
    """Room for one message at a time, which one process writes and the other reads.

    The writer waits for the reader's answer before it writes the next message, so it overwrites
    nothing that is still to be read.

        number of parts | their sizes | the pickle | memory of a tensor | …
    """

    def __init__(self, pool: SharedMemoryPool) -> None:
        self._pool = pool
        self._start = pool.take_addresses(_ROOM_BYTES)
        self._view = pool.view(self._start, _ROOM_BYTES)
        self._reserved_bytes = 0
        self._reserve(_FIRST_BYTES)

    # Any, here and below: what the user's code gives and takes.
    def write(self, value: Any) -> None:
        """Write a message.

        Raises:
            OutOfSpace: There is not enough memory.
            Exception: What objects raise when they are pickled.
        """
        buffers: list[pickle.PickleBuffer] = []
        parts = [memoryview(pickled(value, buffers=buffers)), *[each.raw() for each in buffers]]
        head = array("q", [len(parts), *[part.nbytes for part in parts]])
        starts = _starts_of(head)
        self._reserve(starts[-1])
        self._view[: _WORD_BYTES * len(head)] = memoryview(head).cast("B")
        for part, start in zip(parts, starts, strict=False):
            self._view[start : start + part.nbytes] = part

    def read(self, *, copies: bool) -> Any:
        """Return the message.

        Args:
            copies: Copy its tensors; else they are valid until the next message is written.
        """
        words = self._view.cast("q")
        head = words[: 1 + words[0]]
        starts = _starts_of(head)
        self._reserved_bytes = max(self._reserved_bytes, starts[-1])
        parts = [
            self._view[start : start + size] for start, size in zip(starts, head[1:], strict=False)
        ]
        buffers = map(_copy_of, parts[1:]) if copies else parts[1:]
        return pickle.loads(parts[0], buffers=buffers)

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._reserved_bytes:
            return
        if nbytes > _ROOM_BYTES:
            raise OutOfSpace(
                f"A message to or from a worker process must have at most {_ROOM_BYTES} bytes, but "
                f"has {nbytes}. Give smaller batches, or use executor='threads'."
            )
        wanted = min(max(nbytes, 2 * self._reserved_bytes), _ROOM_BYTES)
        self._pool.reserve(self._start + self._reserved_bytes, wanted - self._reserved_bytes)
        self._reserved_bytes = wanted


def _starts_of(head: Sequence[int]) -> list[int]:
    """Return where the parts of a message begin, and where it ends."""
    first = aligned(_WORD_BYTES * len(head))
    return list(accumulate(map(aligned, head[1:]), initial=first))


def _copy_of(memory: memoryview) -> memoryview:
    """Return a copy, aligned as torch's own tensors are."""
    copy = torch.empty(memory.nbytes, dtype=torch.uint8).numpy().data
    copy[:] = memory
    return copy


def _reduce_tensor(tensor: Tensor) -> Any:
    """Return how a dense tensor on the CPU is pickled: by the memory that it spans, and how."""
    is_plain = (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
    if not is_plain:
        return NotImplemented
    shape, strides = tuple(tensor.shape), tensor.stride()
    last = sum([(n - 1) * s for n, s in zip(shape, strides, strict=True)])
    count = last + 1 if tensor.numel() else 0
    content = tensor.detach().as_strided((count,), (1,)).view(torch.uint8)
    return _tensor_over, (pickle.PickleBuffer(content.numpy().data), tensor.dtype, shape, strides)


def _tensor_over(
    memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    return flat.as_strided(shape, strides)

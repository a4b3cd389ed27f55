"""Regions that an executor and its worker processes see at the same time, and what lies in them."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from phalanx.ipc import Region, aligned
from phalanx.memory.blocks import dense_strides

__all__ = ["SharedMemoryPool", "TensorHandle", "forget_memory", "is_shared", "return_freed_memory"]

_pools: weakref.WeakSet[SharedMemoryPool] = weakref.WeakSet()


@dataclass(frozen=True)
class TensorHandle:
    """Where a tensor lies: in which region, from which byte on, and how."""

    region: int
    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class SharedMemoryPool:
    """Regions by number; the same numbers in the executor's process and in its workers.

    Regions are anonymous: the kernel frees them with the last process that holds them, however it
    ends, so nothing can be left behind.
    """

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._whole: list[Tensor] = []  # each region as bytes
        self._typed: dict[tuple[int, torch.dtype], Tensor] = {}  # as numbers, by region and dtype
        self._lock = threading.Lock()  # every worker's thread may need memory
        _pools.add(self)

    def __len__(self) -> int:
        return len(self._regions)

    def allocate(self, nbytes: int) -> TensorHandle:
        """Return where there are zeros, as bytes, in a new region."""
        return TensorHandle(self._add(Region.create(nbytes)), 0, torch.uint8, (nbytes,), (1,))

    def allocate_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return memory in one new region for tensors like these, in the order of theirs."""
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += aligned(tensor.numel() * tensor.itemsize)
        if total == 0:
            return [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        region = Region.create(total)
        self._add(region)
        with torch.inference_mode(False):  # as in `at`
            return [
                # A storage for each: whoever saves or copies a tensor does so with all of it.
                region.tensor(torch.uint8, tensor.numel() * tensor.itemsize, start)
                .view(tensor.dtype)
                .as_strided(tensor.shape, dense_strides(tensor))
                for tensor, start in zip(tensors, offsets, strict=True)
            ]

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` lies in one of the regions."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
            return False
        address = tensor.data_ptr()
        return any(0 <= address - whole.data_ptr() < len(whole) for whole in self._whole)

    def at(self, place: TensorHandle) -> Tensor:
        """Return the tensor at ``place``, which begins at a whole number of elements."""
        key = place.region, place.dtype
        if key not in self._typed:
            whole, size = self._whole[place.region], place.dtype.itemsize
            with torch.inference_mode(False):  # else nobody could write to it outside of that mode
                self._typed[key] = whole[: len(whole) // size * size].view(place.dtype)
        start = place.offset_bytes // place.dtype.itemsize
        return self._typed[key].as_strided(place.shape, place.strides, start)

    def send(self, connection: Connection, numbers: range) -> None:
        """Let the other side of ``connection`` see the regions of these numbers."""
        for number in numbers:
            self._regions[number].send(connection)

    def receive(self, connection: Connection, count: int) -> None:
        """Take over the next ``count`` regions that the other side sends."""
        for _ in range(count):
            self._add(Region.receive(connection))

    def _add(self, region: Region) -> int:
        with self._lock:
            self._regions.append(region)
            self._whole.append(region.tensor(torch.uint8, region.nbytes))
            return len(self._whole) - 1

    def close(self) -> None:
        """Forget all regions; tensors that still lie in them stay valid."""
        for region in self._regions:
            region.close()
        self._regions, self._whole, self._typed = [], [], {}


def is_shared(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` lies in a region of any pool of this process."""
    return any(pool.holds(tensor) for pool in _pools)


def forget_memory(tensor: Tensor) -> None:
    """Give back the pages of a dense ``tensor`` whose numbers nobody in this process will read.

    In a fork they are the parent's still, which may write to them without a copy.
    """
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def return_freed_memory() -> None:
    """Give what was freed back to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

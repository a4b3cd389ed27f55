"""Memory that an executor and its worker processes see at the same time."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.ipc import Region, aligned
from phalanx.memory.blocks import dense_strides

_ADDRESSES_BYTES = 1 << 42  # of the 47 bits that a process has; memory comes as it is needed

_pools: weakref.WeakSet[SharedMemoryPool] = weakref.WeakSet()


class SharedMemoryPool:
    """One region of addresses, in which memory is reserved piece by piece.

    A fork has all addresses, so nothing is sent to it when memory comes later. The kernel frees the
    memory with the last process that holds the region, however it ends: nothing is left behind.
    """

    def __init__(self) -> None:
        self._region = Region.create(_ADDRESSES_BYTES, label="worker processes", reserved=0)
        self._first_address = self._region.tensor(torch.uint8, 1).data_ptr()
        self._used_bytes = 0
        self._lock = threading.Lock()  # every worker's thread may need memory
        _pools.add(self)

    def take_addresses(self, nbytes: int) -> int:
        """Return the offset of ``nbytes`` of addresses; :meth:`reserve` gives them memory."""
        with self._lock:
            start = self._used_bytes
            self._used_bytes += aligned(nbytes)
            return start

    def reserve(self, start: int, nbytes: int) -> None:
        """Give addresses memory of zeros, where they have none yet.

        Raises:
            OutOfSpace: There is not so much.
        """
        self._region.reserve_part(start, nbytes)

    def allocate(self, nbytes: int) -> int:
        """Return the offset of ``nbytes`` zeros."""
        start = self.take_addresses(nbytes)
        self.reserve(start, nbytes)
        return start

    def allocate_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return memory for tensors like these, in the order of theirs."""
        start = self.allocate(sum([aligned(tensor.nbytes) for tensor in tensors]))
        found = []
        for tensor in tensors:
            flat = self.tensor(tensor.dtype, tensor.numel(), start)
            found.append(flat.as_strided(tensor.shape, dense_strides(tensor)))
            start += aligned(tensor.nbytes)
        return found

    def tensor(self, dtype: torch.dtype, num_elements: int, start: int) -> Tensor:
        """Return a 1-D tensor over memory that was reserved.

        It has a separate storage, because a tensor is saved and copied with all of its storage.
        """
        flat = self._region.tensor(torch.uint8, num_elements * dtype.itemsize, start)
        with torch.inference_mode(False):  # else nobody could write to it outside of that mode
            return flat.view(dtype)

    def view(self, start: int, nbytes: int) -> memoryview:
        """Return the bytes from ``start`` on."""
        return self._region.buffer[start : start + nbytes]

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` lies in the pool."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
            return False
        return 0 <= tensor.data_ptr() - self._first_address < _ADDRESSES_BYTES


def is_shared(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` lies in any pool of this process."""
    return any(pool.holds(tensor) for pool in _pools)


def forget_memory(tensor: Tensor) -> None:
    """Give back the pages of a dense ``tensor`` whose numbers this process will not read.

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

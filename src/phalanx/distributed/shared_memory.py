"""Collectives of ranks on one host: the memory that they share, and the calls of C that use it.

    region │ page of each rank │ rank 0: slot a, slot b │ rank 1: slot a, slot b │ ...

native/collectives.c has the protocol. A call of it ends when the operation has ended or other ranks
are late; then Python looks for deaths, deadlines and signals, and calls again.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.distributed.fingerprint import Fingerprint, desync, misfit
from phalanx.distributed.status_pages import StatusPages
from phalanx.distributed.tensors import NOTHING
from phalanx.distributed.work import Steps
from phalanx.errors import PeerError
from phalanx.ipc import Region, fail_point, fail_points
from phalanx.native import DTYPES, FUNCTIONS

__all__ = ["POINTS", "SUMMED_DTYPES", "SharedMemory"]

POINTS = (
    "operation begun",
    "piece written",
    "piece published",
    "result given",
    "piece ended",
)
"""Fail points of an operation, and of each piece by the phase that comes next."""

SUMMED_DTYPES = tuple(DTYPES)
"""The dtypes of numbers that compiled code adds up, each at its number in collectives.c."""

# As in collectives.c, where all_gather is "share" and all_to_all "swap".
_SHORT_ALL_REDUCE, _ALL_REDUCE, _REDUCE_SCATTER, _SHARE, _SWAP = range(5)
_ENDED, _WAITS, _STOPS, _DIFFERS, _MISFITS = range(5)
_NUM_WORDS = 29
_OF_OPERATION = struct.Struct("20q")  # the words from _STOPS_AT on
_STOPS_AT, _PIECE, _PHASE, _WANTED, _MISFIT = 9, 23, 25, 26, 28

_NUM_SLOTS = 2
_LINE = 64
_SMALLEST_SLOT_BYTES, _LARGEST_SLOT_BYTES = 64 << 10, 1 << 20
_ALL_SLOTS_BYTES = 8 << 20
_SHORT_BYTES = 16 << 10
_PIECE_BYTES = 256 << 10  # pieces that stay in the caches of the cores
_SPIN_S = 150e-6  # some times as long as a rank takes for a piece


def slot_bytes(size: int) -> int:
    """Return how many bytes a slot has in a group of ``size`` ranks, a power of two."""
    share = _ALL_SLOTS_BYTES // (size * _NUM_SLOTS)
    return max(_SMALLEST_SLOT_BYTES, min(_LARGEST_SLOT_BYTES, 1 << (share.bit_length() - 1)))


class SharedMemory:
    """The memory of a group's ranks on this host, as one of them sees it.

    It is the :class:`~phalanx.distributed.work.Wait` of the operation that was begun last. Tensors
    are flat and contiguous, and the caller keeps them until its operation has ended. Data that
    only moves is given as bytes. ``code`` and ``count`` of an operation are equal on all ranks: see
    `fingerprint.pack`.
    """

    num_hosts = 1
    grace_s = 0.0

    def __init__(self, region: Region, pages: StatusPages) -> None:
        self.rank, self.size, self.pages = pages.rank, pages.size, pages
        self.cores_per_rank = len(os.sched_getaffinity(0)) / pages.size
        self._region: Region | None = region  # which the others of this host map
        self._slot_bytes = slot_bytes(pages.size)
        self._number = 0
        # By rank: addresses of what it is given and gives, and the bytes of both.
        self._parts = [array("q", [0] * self.size) for _ in range(4)]
        self._part_addresses = [part.buffer_info()[0] for part in self._parts]
        whole = region.tensor(torch.uint8, self.needed_bytes(self.size))
        self._whole: Tensor | None = whole  # keeps it mapped
        slots = whole.data_ptr() + StatusPages.needed_bytes(self.size)
        of_group = [whole.data_ptr(), slots, self.rank, self.size, self._slot_bytes]
        of_group += [round(_SPIN_S * 1e9), self.cores_per_rank < 1]
        self._words = array("q", of_group + [0] * (_NUM_WORDS - len(of_group)))
        self._address = self._words.buffer_info()[0]
        self._run = FUNCTIONS["collective"]

    @staticmethod
    def needed_bytes(size: int) -> int:
        """Return how large the region of ``size`` ranks is, pages included."""
        return StatusPages.needed_bytes(size) + size * _NUM_SLOTS * slot_bytes(size)

    # --- operations, which all ranks begin in one order -------------------------------------------

    def all_reduce(self, flat: Tensor, code: int, count: int) -> Steps:
        """Add up ``flat`` over the ranks, in their order, in place."""
        num_bytes = flat.numel() * flat.itemsize
        of_tensor = (SUMMED_DTYPES.index(flat.dtype), flat.itemsize, num_bytes)
        if num_bytes <= _SHORT_BYTES:
            self._begin(_SHORT_ALL_REDUCE, code, count, *of_tensor, num_bytes, flat.data_ptr())
        else:
            piece_bytes = min(_PIECE_BYTES, self._slot_bytes)
            self._begin(_ALL_REDUCE, code, count, *of_tensor, piece_bytes, flat.data_ptr())
        yield self

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], code: int, count: int
    ) -> Steps:
        """Add up what the ranks hold for this one, in their order, into ``output``."""
        outputs = [NOTHING] * self.size
        outputs[self.rank] = output
        longest = self._set_parts(inputs, outputs)
        of_tensors = (SUMMED_DTYPES.index(output.dtype), output.itemsize, longest)
        self._begin(_REDUCE_SCATTER, code, count, *of_tensors, self._part_bytes)
        yield self

    def all_gather(self, outputs: Sequence[Tensor], given: Tensor, code: int, count: int) -> Steps:
        """Give every rank the bytes of all, which may differ in length."""
        longest = self._set_parts([given], outputs)
        self._begin(_SHARE, code, count, 0, 1, longest, self._slot_bytes)
        yield self

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], code: int, count: int
    ) -> Steps:
        """Give each rank other bytes; no rank knows more lengths than its own."""
        longest = self._set_parts(inputs, outputs)
        self._begin(_SWAP, code, count, 0, 1, longest, self._part_bytes)
        yield self

    @property
    def _part_bytes(self) -> int:
        """The bytes that a slot takes for each rank, where that is another part for each."""
        head = -(-(self.size + 1) * 8 // _LINE) * _LINE
        return (self._slot_bytes - head) // self.size // _LINE * _LINE

    def _set_parts(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> int:
        """Tell C where the parts are; return the bytes of the longest."""
        give, take, give_bytes, take_bytes = self._parts
        for rank, part in enumerate(given):
            give[rank], give_bytes[rank] = part.data_ptr(), part.numel() * part.itemsize
        for rank, part in enumerate(taken):
            take[rank], take_bytes[rank] = part.data_ptr(), part.numel() * part.itemsize
        return max(*give_bytes[: len(given)], *take_bytes)

    def _begin(
        self,
        kind: int,
        code: int,
        count: int,
        dtype: int,
        item: int,
        longest: int,
        piece_bytes: int,
        tensor: int = 0,
    ) -> None:
        self._number += 1
        self.pages.publish(Fingerprint(self._number, code, count))
        fail_point(POINTS[0])
        of_group = _STOPS_AT * self._words.itemsize
        stops, piece = fail_points.fault is not None, self._words[_PIECE]
        operation = (stops, kind, dtype, item, self._number, code, count, longest, piece_bytes)
        state = (piece, 0, 0, 0, 0, 0)
        _OF_OPERATION.pack_into(
            self._words, of_group, *operation, tensor, *self._part_addresses, *state
        )

    # --- the operation that was begun last --------------------------------------------------------

    def advance(self, patience_s: float) -> bool:
        """Run it until it ends, or others are late for so long; tell whether it has ended."""
        whole = self._whole  # keeps it mapped where a signal's handler destroys the group
        patience_ns = round(patience_s * 1e9)
        while whole is not None and (status := self._run(self._address, patience_ns)) != _ENDED:
            if status == _WAITS:
                return False
            if status == _STOPS:
                fail_point(POINTS[self._words[_PHASE]])
            elif status == _DIFFERS:
                self._raise_desync()
            else:
                ranks, other = self.pages.group_ranks, self._words[_MISFIT]
                raise misfit(ranks[self.rank], ranks[other], self._parts[3][other])
        return True

    def find_error(self, title: str) -> PeerError | None:
        """Return why it cannot end well, if a rank that it waits for is gone."""
        return self.pages.find_error(self.pages.others, self._words[_WANTED], title)

    def timeout_error(self, title: str, timeout_s: float) -> PeerError | None:
        """Return the error that names the ranks that it waits for, if there are any."""
        wanted = self._words[_WANTED]
        return self.pages.timeout_error(self.pages.others, wanted, title, timeout_s)

    def _raise_desync(self) -> None:
        ranks = self.pages.group_ranks
        ours = self.pages.fingerprint_of(self.rank, self._number)
        for rank in self.pages.others:
            theirs = self.pages.fingerprint_of(rank, self._number)
            if theirs != ours:
                raise desync(ranks[self.rank], ours, ranks[rank], theirs)

    def close(self) -> None:
        """Let go of the memory."""
        self._whole = None
        self.pages.close()
        self._region = None

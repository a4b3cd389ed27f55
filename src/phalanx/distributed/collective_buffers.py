"""The memory through which the ranks of a group pass their tensors, piece by piece.

    region │ pages │ rank 0: slot a, slot b │ rank 1: slot a, slot b │ ...

A tensor of any size goes through slots of fixed size. Even pieces use slots a and odd ones slots b,
so slower ranks may still read the piece before; a rank begins piece p when all are done with piece
p − 2. Per piece a rank's progress passes three numbers:

    3p + 1   my slot holds the data that others need
    3p + 2   the slots of all hold the part that I have reduced
    3p + 3   I have read all slots

Pieces are numbered through the life of the group, so that progress only grows; ranks agree on the
numbers because they agree on the operations, which the fingerprints check.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from phalanx.distributed.contention import Contention
from phalanx.distributed.fingerprint import Desync
from phalanx.distributed.native_all_reduce import PIECE_POINTS, NativeState, PieceSizes, Status
from phalanx.distributed.status_pages import Fingerprint, StatusPages
from phalanx.distributed.wake_up_pipes import WakeUpPipes
from phalanx.ipc import Region, fail_point, fence
from phalanx.native import Function

__all__ = ["NOBODY", "POINTS", "CollectiveBuffers", "Need", "RemoteNeed", "Steps"]

POINTS = ("operation begun", *PIECE_POINTS)
"""Fail points of a collective; the last but one is passed by `all_reduce` alone."""

Need = tuple[Sequence[int], int]
"""Ranks of this host that are awaited, and the progress that they must reach.

A wait for a message asks for no progress, only that the ranks be there. It gives minus the bytes
moved so far, so that it is another after each move; 0 where none is under way.
"""

NOBODY: Need = ((), 0)


class RemoteNeed:
    """A wait for another host.

    Attributes:
        rank: The one that is awaited now, as in the group; None for any.
    """

    rank: int | None = None


Steps = Generator[Need | RemoteNeed, None, None]
"""An operation under way. It stops wherever it would wait, and is resumed to look again."""

_NUM_SLOTS = 2
_LARGEST_SLOT_BYTES = 1 << 20
_ALL_SLOTS_BYTES = 8 << 20
_MOST_CUTS = 16  # a cut of n ranks holds n² views
_SMALLEST_SLOT_BYTES = 64 << 10
_WHOLE_BYTES = 16 << 10
_PIECE_BYTES = 256 << 10  # pieces that stay in the caches of the cores
_PUBLISHED, _REDUCED, _DONE, _PER_PIECE = 1, 2, 3, 3


def slot_bytes(size: int) -> int:
    """Return how many bytes one slot of a group of ``size`` ranks has."""
    share = _ALL_SLOTS_BYTES // (size * _NUM_SLOTS)
    return max(_SMALLEST_SLOT_BYTES, min(_LARGEST_SLOT_BYTES, 1 << (share.bit_length() - 1)))


class CollectiveBuffers:
    """The slots of a group's ranks on this host, as one of them sees them.

    Attributes:
        rank: This one, counted among those of this host, as in `StatusPages`; so is ``size``.
    """

    def __init__(self, region: Region, pages: StatusPages, pipes: WakeUpPipes) -> None:
        self.pipes = pipes
        self.rank = pages.rank
        self.size = pages.size
        self.pages = pages
        self.slot_bytes = slot_bytes(pages.size)
        self._usual_sizes = PieceSizes(_WHOLE_BYTES, min(_PIECE_BYTES, self.slot_bytes))
        self._contended_sizes = PieceSizes(self.slot_bytes // 2, self.slot_bytes)
        self._region = region
        self._slots_by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
        self._cuts: dict[tuple[torch.dtype, tuple[int, ...], int], list[Sequence[Tensor]]] = {}
        self._piece = -1
        self._operation = Fingerprint(0, 0, 0)
        self._unchecked: set[int] = set()
        whole = region.tensor(torch.uint8, self.needed_bytes(pages.size))
        slots = whole[StatusPages.needed_bytes(pages.size) :]
        self.contention = Contention(pages.size)
        self._native = NativeState(pages, whole, slots, self.slot_bytes, self.contention)

    @staticmethod
    def needed_bytes(size: int) -> int:
        """Return how large the region of a group of ``size`` ranks is, pages included."""
        return StatusPages.needed_bytes(size) + size * _NUM_SLOTS * slot_bytes(size)

    def begin(self, what: int, num_elements: int) -> None:
        """Begin the next operation, and say which it is."""
        self._operation = Fingerprint(self._operation.number + 1, what, num_elements)
        self._unchecked = set(self.pages.others)
        self.pages.publish(self._operation, contended=self.contention.begin())
        fail_point("operation begun")

    def slots(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the slots of this piece, by rank, as tensors of ``dtype``."""
        if dtype not in self._slots_by_dtype:
            self._slots_by_dtype[dtype] = self._view(dtype)
        return self._slots_by_dtype[dtype][self._piece % _NUM_SLOTS]

    def cut(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> list[Sequence[Tensor]]:
        """Return the slots of this piece, by rank, each cut in parts of ``sizes`` elements."""
        key = (dtype, sizes, self._piece % _NUM_SLOTS)
        found = self._cuts.get(key)
        if found is None:
            if len(self._cuts) >= _MOST_CUTS:
                self._cuts.clear()
            used = sum(sizes)
            found = [slot[:used].split(sizes) for slot in self.slots(dtype)]
            self._cuts[key] = found
        return found

    def _view(self, dtype: torch.dtype) -> list[list[Tensor]]:
        start = StatusPages.needed_bytes(self.size)
        count = self.slot_bytes // dtype.itemsize
        return [
            [
                self._region.tensor(
                    dtype, count, start + (rank * _NUM_SLOTS + parity) * self.slot_bytes
                )
                for rank in range(self.size)
            ]
            for parity in range(_NUM_SLOTS)
        ]

    @property
    def piece_sizes(self) -> PieceSizes:
        """How to cut the all-reduce that was begun; where cores are contended, in few pieces."""
        return self._contended_sizes if self.contention.agreed else self._usual_sizes

    def agree_on_contention(self) -> None:
        """Note whether any rank was contended in this all-reduce: the next one goes by that."""
        self.contention.agreed = self.pages.any_contended(self._operation.number)
        self.contention.look()

    def run_native(self, function: Function, flat: Tensor, sizes: PieceSizes) -> Steps:
        """Let compiled code run the operation that was begun, with all pieces of ``flat``."""
        native = self._native
        native.begin(self._operation, self._piece + 1, flat, sizes)
        while (status := native.run(function)) != Status.ENDED:
            if status == Status.WAITS:
                yield self.pages.others, native.wanted
                native.choose_spin()
            elif status == Status.DIFFERS:
                self._check(self.pages.others)  # it raises, unless a test has it pass
                native.agree()
            else:
                self.pages.wake_sleepers(native.wanted)
                native.fail_point()
        self._piece = native.piece - 1

    # --- the life of a piece ----------------------------------------------------------------------

    def begin_piece(self) -> Steps:
        """Take the next piece; afterwards this rank may write to its slot."""
        self._piece += 1
        done_before = _PER_PIECE * (self._piece - _NUM_SLOTS) + _DONE
        if done_before > 0:
            yield from self._reach(self.pages.others, done_before)

    def publish(self) -> None:
        """Say that this rank's slot holds the data that others need."""
        fail_point("piece written")
        self.pages.post(_PER_PIECE * self._piece + _PUBLISHED)
        fail_point("piece published")

    def published(self, ranks: Sequence[int] | None = None) -> Steps:
        """Wait until ``ranks``, or all, have published; see that they are in this operation."""
        waited = self.pages.others if ranks is None else ranks
        yield from self._reach(waited, _PER_PIECE * self._piece + _PUBLISHED)
        if self._unchecked:
            self._check(waited)
        fence()

    def give_result(self) -> None:
        """Say that the slots of all others hold the part that this rank has reduced."""
        self.pages.post(_PER_PIECE * self._piece + _REDUCED)
        fail_point("result given")

    def results_given(self) -> Steps:
        """Wait until all have reduced."""
        yield from self._reach(self.pages.others, _PER_PIECE * self._piece + _REDUCED)
        fence()

    def end_piece(self) -> None:
        """Say that this rank has read all slots."""
        self.pages.post(_PER_PIECE * self._piece + _DONE)
        fail_point("piece ended")

    def _reach(self, ranks: Sequence[int], progress: int) -> Steps:
        while not self.pages.reached(ranks, progress):
            yield ranks, progress

    def _check(self, ranks: Sequence[int]) -> None:
        ours = self._operation
        for rank in ranks:
            if rank in self._unchecked:
                self._unchecked.discard(rank)
                theirs = self.pages.fingerprint_of(rank, ours.number)
                if theirs != ours:
                    names = self.pages.names
                    raise Desync(names[self.rank], ours, names[rank], theirs)

    def close(self) -> None:
        """Let go of the memory; tensors over it keep it until they go."""
        self._slots_by_dtype.clear()
        self._cuts.clear()
        self._native.close()
        self.pipes.close()
        self.pages.close()
        self._region.close()

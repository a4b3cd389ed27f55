"""The state of an all-reduce that compiled code runs: an array of words shared with it.

    python    says where everything lies          wakes sleepers            waits; finds the dead
              │                                   ▲         │               ▲          │
    C         └─ write, publish, reduce, take ────┴─────────┴─ ... ─────────┴──────────┴─ ... ─ end

Compiled code (native_all_reduce.c) takes piece after piece without the interpreter. It spins only
briefly; longer waits are those of all operations (engine.py).
"""

from __future__ import annotations

import struct
from array import array
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from phalanx.distributed.contention import Contention
from phalanx.distributed.status_pages import WORDS_PER_PAGE, Fingerprint, StatusPages
from phalanx.ipc import fail_point, fail_points
from phalanx.native import Function

__all__ = ["PIECE_POINTS", "NativeState", "PieceSizes", "Status"]

PIECE_POINTS = ("piece written", "piece published", "result given", "piece ended")
"""Fail points of a piece, by the phase that comes next."""

# As in native_all_reduce.c.
_NUM_WORDS = 20
_OF_OPERATION = struct.Struct("12q")  # those from _FAIL_POINTS on
_SPIN_NS, _FAIL_POINTS, _PIECE, _PHASE, _WANTED, _AGREED = 6, 8, 13, 15, 16, 17
_SPIN_S, _CROWDED_SPIN_S = 150e-6, 50e-6  # some times what another takes for its part of a piece


class Status(IntEnum):
    """Why compiled code has returned."""

    ENDED = 0
    WAITS = 1
    """Others have not come as far as :attr:`NativeState.wanted`."""
    POSTED = 2
    """This rank has; somebody may sleep until then."""
    DIFFERS = 3
    """Some rank is in another operation."""


class PieceSizes(NamedTuple):
    """How an all-reduce is cut, the same on all ranks.

    Attributes:
        whole_bytes: Tensors of up to so many bytes go whole: all ranks publish and reduce all.
        piece_bytes: Longer ones go in pieces of so many bytes.
    """

    whole_bytes: int
    piece_bytes: int


class NativeState:
    """The state of one rank's all-reduces.

    Args:
        pages: Of the ranks.
        whole: The region's memory, with the pages at its begin.
        slots: That of the slots.
        slot_bytes: How long a slot is.
        contention: The group's.
    """

    def __init__(
        self,
        pages: StatusPages,
        whole: Tensor,
        slots: Tensor,
        slot_bytes: int,
        contention: Contention,
    ) -> None:
        self._contention = contention
        self._memory: Tensor | None = whole  # keeps it mapped
        self._words = array("q", [0] * _NUM_WORDS)
        self._address, _ = self._words.buffer_info()
        crowded = contention.cores_per_rank < 1
        own = [pages.rank, pages.size, slots.data_ptr(), slot_bytes, 0, crowded]
        self._words[:_FAIL_POINTS] = array("q", [whole.data_ptr(), WORDS_PER_PAGE, *own])

    def begin(self, operation: Fingerprint, piece: int, flat: Tensor, sizes: PieceSizes) -> None:
        """Begin an operation over ``flat``, whose first piece has that number."""
        stops, tensor = fail_points.fault is not None, flat.data_ptr()
        number, what, num_elements = operation
        _OF_OPERATION.pack_into(
            *(self._words, _FAIL_POINTS * self._words.itemsize),
            *(stops, number, what, tensor, num_elements, piece, 0, 0, 0, 0, *sizes),
        )
        self.choose_spin()

    def choose_spin(self) -> None:
        """Have compiled code spin as long as this rank shall now; at the begin, and after waits."""
        spin_s = self._contention.spin_s(_SPIN_S, _CROWDED_SPIN_S)
        self._words[_SPIN_NS] = round(spin_s * 1e9)

    def run(self, function: Function) -> int:
        """Let compiled code go on until it would wait; return a `Status`."""
        return int(function(self._address))

    def fail_point(self) -> None:
        """Pass the fail point before the next phase, where a fault is injected."""
        if self._words[_FAIL_POINTS]:
            fail_point(PIECE_POINTS[self._words[_PHASE] - 1])

    def agree(self) -> None:
        """Take the others to be in the same operation."""
        self._words[_AGREED] = 1

    @property
    def wanted(self) -> int:
        """The progress that others must reach, or that was posted last."""
        return self._words[_WANTED]

    @property
    def piece(self) -> int:
        """The number of the piece that comes next."""
        return self._words[_PIECE]

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = None

"""How far an all-reduce has come that compiled code carries: a row of numbers shared with it.

    python    says where everything lies          wakes who sleeps          waits, and finds out who
              │                                   ▲         │               ▲ is gone  │
    C         └─ write, publish, reduce, take ────┴─────────┴─ ... ─────────┴──────────┴─ ... ─ end

Compiled code (course.c) takes piece after piece without the interpreter. It looks for others for a
moment only; what may take longer is done where it is done for all operations (see engine.py).
"""

from __future__ import annotations

import os
from array import array
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from phalanx.distributed.contention import Contention
from phalanx.distributed.status_pages import Fingerprint, StatusPages
from phalanx.ipc import fail_point, injected
from phalanx.memory import Function

__all__ = ["PIECE_POINTS", "Course", "PieceSizes", "State"]

PIECE_POINTS = ("piece written", "piece published", "result given", "piece ended")
"""Where the tests stop a rank, by what is to be done next."""

# As in course.c.
_NUM_WORDS = 20
_SPIN, _STOPS, _NUMBER, _PIECE, _PHASE, _WANTED, _AGREED = 6, 8, 9, 13, 15, 16, 17
_SPIN_NS = 150_000  # some times what the other takes for its part of a piece
_CROWDED_SPIN_NS = 50_000


class State(IntEnum):
    """What stands in the way."""

    ENDED = 0
    WAITS = 1
    """Others have not reached the mark that is wanted."""
    MOVES = 2
    """Nothing; somebody may sleep until the mark that was posted."""
    DIFFERS = 3
    """Somebody is in another operation."""


class PieceSizes(NamedTuple):
    """How an all-reduce is cut, the same on all ranks.

    Attributes:
        whole_bytes: Tensors of up to so many bytes go whole: all ranks publish and reduce all.
        piece_bytes: Longer ones go in pieces of so many bytes.
    """

    whole_bytes: int
    piece_bytes: int


class Course:
    """The row of numbers of one buffers.

    Args:
        pages: Whose marks count.
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
        crowded = pages.size > len(os.sched_getaffinity(0))
        self._contention = contention
        self._spin_ns = _CROWDED_SPIN_NS if crowded else _SPIN_NS
        self._memory: Tensor | None = whole
        self._words = array("q", [0] * _NUM_WORDS)
        self._at, _ = self._words.buffer_info()
        own = [
            pages.rank,
            pages.size,
            slots.data_ptr(),
            slot_bytes,
            self._spin_ns,
            crowded,
        ]
        self._words[:_STOPS] = array("q", [whole.data_ptr(), pages.words_per_page, *own])

    def begin(self, operation: Fingerprint, piece: int, flat: Tensor, sizes: PieceSizes) -> None:
        """Begin with an operation, over ``flat``, whose first piece has that number."""
        stops = injected() is not None
        number, what, num_elements = operation
        self._words[_STOPS:] = array(
            "q", [stops, number, what, flat.data_ptr(), num_elements, piece, 0, 0, 0, 0, *sizes]
        )

    def go(self, function: Function) -> int:
        """Go on as far as it goes; return a `State`."""
        self._words[_SPIN] = self._spin_ns if self._contention.spins else 0
        return int(function(self._at))

    def fail_point(self) -> None:
        """Pass the point that it has come to, where tests have planted a fault."""
        if self._words[_STOPS]:
            fail_point(PIECE_POINTS[self._words[_PHASE] - 1])

    def agree(self) -> None:
        """Take the others to be in the same operation."""
        self._words[_AGREED] = 1

    @property
    def wanted(self) -> int:
        """The mark that others must reach; or the one that was posted last."""
        return self._words[_WANTED]

    @property
    def piece(self) -> int:
        """The number of the piece that comes next."""
        return self._words[_PIECE]

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = None

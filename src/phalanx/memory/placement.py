"""Let torch make tensors where they are wanted, in memory that several processes share.

    backward:  request 0   1   2   3   4        of memory, by whatever torch runs
               order   –   1   –   –   0        what was learnt from the backward pass before
                           │           │
    field      [ place 0 ◄─┼───────────┘ ][ place 1 ◄ ]

Which memory a tensor gets is torch's to decide, and it has no way to be told. But all of it comes
from two calls in torch's lowest library, which are replaced there (placement.c). A model that runs
forward and backward asks for the same sizes in the same order as the time before; so whoever knows
in which turn a gradient got its memory, can have the next one lie where it is wanted, and need not
copy it. It is a guess: who uses it looks afterwards where the tensor lies.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from phalanx.memory.compiled import FUNCTIONS

__all__ = ["Field", "Placement"]

_MOST_REQUESTS = 4096  # later ones are not placed
_NOTHING = array("i", [-1])


class Field:
    """One file with places, mapped a second time: nothing is written here but by torch.

    Attributes:
        addresses: Of the places.
    """

    def __init__(self, handle: int, offsets: Sequence[int]) -> None:
        base = FUNCTIONS["place_base"](handle)
        self.handle = handle
        self.addresses = [base + offset for offset in offsets]

    def taken(self) -> int:
        """Return how many places hold a tensor now."""
        return int(FUNCTIONS["place_taken"](self.handle))

    def part(self) -> None:
        """Let tensors that lie here keep their numbers, whatever is written to the file.

        Raises:
            MemoryError: There is no memory for a copy.
        """
        if not FUNCTIONS["place_part"](self.handle):
            raise MemoryError("There is no memory for tensors that were kept after a microbatch.")


class Placement:
    """Places for tensors of given sizes, alike in all fields.

    Args:
        offsets: Where they begin, in bytes, each a multiple of 64.
        sizes: Their bytes.
    """

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self._offsets, self._sizes = array("q", offsets), array("q", sizes)
        self._orders: dict[str, array[int]] = {}
        self._log = array("q", bytes(8 * _MOST_REQUESTS))
        self._logged = 0

    @staticmethod
    def hook() -> bool:
        """Replace torch's calls in this process; tell whether that could be."""
        torch.empty(1)  # only what was called once can be replaced
        return bool(FUNCTIONS and FUNCTIONS["place_hook"]())

    def field(self, file: int, nbytes: int) -> Field | None:
        """Map a file, whose descriptor may be closed after; None where there is no room for it."""
        offsets, sizes = _pointer(self._offsets), _pointer(self._sizes)
        handle = FUNCTIONS["place_field"](file, nbytes, offsets, sizes, len(self._offsets))
        return Field(handle, self._offsets) if handle else None

    @contextmanager
    def within(self, field: Field, kind: str) -> Iterator[None]:
        """Give what the body asks for in this thread memory in ``field``, as was learnt."""
        order, log = self._orders.get(kind, _NOTHING), _pointer(self._log)
        FUNCTIONS["place_begin"](field.handle, _pointer(order), len(order), log, _MOST_REQUESTS)
        try:
            yield
        finally:
            self._logged = min(FUNCTIONS["place_end"](), _MOST_REQUESTS)

    def learn(self, kind: str, addresses: Sequence[int]) -> None:
        """Note in which turns of the last body memory at these addresses was given, by place.

        Args:
            kind: Of bodies that ask for memory in the same turns.
            addresses: By place; 0 for none.
        """
        last = {address: turn for turn, address in enumerate(self._log[: self._logged])}
        order = array("i", [-1]) * self._logged
        for place, address in enumerate(addresses):
            turn = last.get(address)
            if turn is not None:
                order[turn] = place
        self._orders[kind] = order


def _pointer(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]

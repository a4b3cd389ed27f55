"""Tensors of a module, laid end to end, and the table through which workers exchange them.

    tensors   | w1 | b1 | w2 |  of any shape, device and float dtype
    flat      | w1 · b1 · w2 |  float32, or float64 where any tensor is of that

One exchange: note the module's values, give the table their change since the last exchange, and put
the merged values into the module.

Shapes:
    P: elements of the module that lie in the table.
    Deltas of parameters are (P, 1); of statistics (P, 2): a worker's value, and how much it counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.tables.part import Entry
from phalanx.tables.table import Table

Tensors = dict[str, Tensor]


def gather(tensors: Tensors, flat: Tensor) -> Tensor:
    """Copy tensors into ``flat``, and return it."""
    for part, tensor in _pairs(tensors, flat):
        part.copy_(tensor)
    return flat


def scatter(flat: Tensor, tensors: Tensors) -> None:
    """Copy ``flat`` into the tensors, and round it to what they can hold."""
    for part, tensor in _pairs(tensors, flat):
        tensor.copy_(part)
        if tensor.dtype != part.dtype:
            part.copy_(tensor)


def _pairs(tensors: Tensors, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor beside its part of ``flat``, in the same shape."""
    owns = [tensor.detach() for tensor in tensors.values()]
    pieces = flat.split([own.numel() for own in owns])
    return [(piece.view(own.shape), own) for piece, own in zip(pieces, owns, strict=True)]


class ParameterExchange:
    """Parameters, of which a table takes the differences.

    ``note``, ``give``, ``ask`` and ``receive``, in this order, make one exchange.

    Args:
        tensors: By name; read and changed in place.
        table: An array of as many elements.

    ``_base`` is what the last exchange put into the module, ``_held`` what the module held when it
    was noted, ``_spare`` the difference, then the answer.
    """

    def __init__(self, tensors: Tensors, table: Table) -> None:
        self.tensors = tensors
        self.table = table
        with torch.inference_mode(False):  # else they could not be written to outside of it
            self._base = torch.zeros(table.shape, dtype=table.dtype, device="cpu")
            self._held = torch.empty_like(self._base)
            self._spare = torch.empty_like(self._base)

    def note(self) -> None:
        """Look at what the tensors hold.

        Raises:
            ConfigError: A tensor has become NaN or infinite. Nothing is changed.
        """
        held, base = gather(self.tensors, self._held), self._base
        difference = torch.sub(held, base, out=self._spare)
        if bool(difference.sum().isfinite()):
            return
        difference[(held == base) | (held.isnan() & base.isnan())] = 0  # a mask of infinities, say
        for (part, _), name in zip(_pairs(self.tensors, difference), self.tensors, strict=True):
            if not bool(part.isfinite().all()):
                raise ConfigError(
                    f"`{name}` must be finite to be shared, but holds NaN or infinity."
                )

    def give(self, factor: float) -> None:
        """Give the table what was noted, times ``factor``."""
        self.table.add(self._spare if factor == 1 else self._spare * factor)
        self._base.add_(self._spare)  # what the table holds now, if nobody else adds

    def ask(self) -> None:
        """Begin to get the answer."""
        self._pending = self.table._begin_get(None, self._spare)

    def receive(self, *, alone: bool) -> None:
        """Wait for the answer, and put it into the tensors.

        Args:
            alone: Whether no other worker is there. Then the tensors stay as they are if the table
                holds what was given; put back, they might differ from it in the last bit.

        Raises:
            PeerTimeout: As a table's ``get``.
        """
        got = self._pending.wait()
        if not (alone and torch.equal(got, self._base)):
            scatter(got, self.tensors)
        self._base, self._spare = got, self._base


class StatisticsExchange(ParameterExchange):
    """Running statistics: the table takes the values, and a weight for each (see ``Blend``)."""

    def give(self, factor: float) -> None:
        """Give the table what was noted, with the weight ``factor``."""
        wide = torch.stack((self._held, torch.full_like(self._held, factor)), 1)
        self.table._take(Entry(None, wide, self.table._group.worker_id))

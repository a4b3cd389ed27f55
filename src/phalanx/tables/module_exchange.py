"""Tensors of a module, laid end to end, and the table through which workers exchange them.

    tensors   | w1 | b1 | w2 |  of any shape, device and float dtype
    flat      | w1 · b1 · w2 |  float32, or float64 for tensors of that

One exchange: note the module's values, give the table their change since the last exchange, and put
the merged values into the module.

Shapes:
    P: elements of the module that lie in the table.
    Deltas of parameters are (P, 1); of statistics (P, 2): a worker's value, and how much it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan import check_argument
from phalanx.tables.part import Entry
from phalanx.tables.table import Table
from phalanx.tables.updaters import Nesterov

DILOCO_LR, DILOCO_MOMENTUM = 0.7, 0.9  # arXiv 2311.08105, table 5


class FlatTensors:
    """Tensors by name, and how they lie in one flat tensor.

    Args:
        tensors: By name, none of them twice; read and changed in place.
        dtype: Of the flat tensor.
    """

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._tensors = tensors
        self.size = sum(tensor.numel() for tensor in tensors.values())

    @property
    def layout(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """What lies where: name, dtype of the flat tensor and shape of each tensor."""
        return [(name, self.dtype, tensor.shape) for name, tensor in self._tensors.items()]

    def gather(self, flat: Tensor | None = None) -> Tensor:
        """Copy the tensors into ``flat``, a new one if None."""
        flat = torch.empty(self.size, dtype=self.dtype, device="cpu") if flat is None else flat
        for part, tensor in self._pairs(flat):
            part.copy_(tensor)
        return flat

    def scatter(self, flat: Tensor) -> None:
        """Copy ``flat`` into the tensors, and round it to what they can hold."""
        for part, tensor in self._pairs(flat):
            tensor.copy_(part)
            if tensor.dtype != self.dtype:
                part.copy_(tensor)

    def name_nonfinite(self, flat: Tensor) -> str:
        """Return the name of the first tensor whose part is not finite."""
        parts = zip(self._pairs(flat), self._tensors, strict=True)
        return next(name for (part, _), name in parts if not bool(part.isfinite().all()))

    def _pairs(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor beside its part of ``flat``, in the same shape."""
        tensors = [tensor.detach() for tensor in self._tensors.values()]
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [(piece.view(t.shape), t) for piece, t in zip(pieces, tensors, strict=True)]


class ParameterExchange:
    """Parameters, of which a table takes the differences.

    ``note``, ``give``, ``ask`` and ``receive``, in this order, make one exchange.

    Args:
        flat: The tensors.
        table: An array of ``flat.size``.
        downhill: Whether the updater subtracts what it is given.
        averages: Whether what is given is divided by the number of workers.

    ``_base`` is what the last exchange put into the module, ``_held`` what the module held when it
    was noted.
    """

    def __init__(self, flat: FlatTensors, table: Table, *, downhill: bool, averages: bool) -> None:
        self.flat = flat
        self.table = table
        self._sign = -1.0 if downhill else 1.0
        self._averages = averages
        with torch.inference_mode(False):  # else they could not be written to outside of it
            self._base = torch.zeros(flat.size, dtype=flat.dtype, device="cpu")
            self._held = torch.empty_like(self._base)
            self._spare = torch.empty_like(self._base)  # the difference, then the answer

    def note(self) -> None:
        """Look at what the tensors hold.

        Raises:
            ConfigError: A tensor has become NaN or infinite. Nothing is changed.
        """
        difference = torch.sub(self.flat.gather(self._held), self._base, out=self._spare)
        if bool(difference.sum().isfinite()):
            return
        unmoved = (self._held == self._base) | (self._held.isnan() & self._base.isnan())
        difference[unmoved] = 0  # a mask of infinities, say
        if not bool(difference.isfinite().all()):
            raise ConfigError(
                f"`{self.flat.name_nonfinite(difference)}` must be finite to be shared, but holds "
                "NaN or infinity."
            )

    def give(self, num_workers: int) -> None:
        """Give the table what was noted."""
        factor = self._sign / (num_workers if self._averages else 1)
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
            self.flat.scatter(got)
        self._base, self._spare = got, self._base


class StatisticsExchange(ParameterExchange):
    """Running statistics: the table takes the values, and a weight for each (see ``Blend``)."""

    def give(self, num_workers: int) -> None:
        """Give the table what was noted."""
        weight = 1.0 / num_workers if self._averages else 1.0
        wide = torch.stack((self._held, torch.full_like(self._held, weight)), 1)
        self.table._take(Entry(None, wide, self.table._group.worker_id))


def split_by_dtype(tensors: Sequence[tuple[str, Tensor]]) -> list[FlatTensors]:
    """Group tensors by the dtype of the table that serves them: float64, or float32 for the rest.

    Narrower floats are kept in float32, so that small changes add up before they are rounded.
    """
    groups: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        groups.setdefault(wide, {})[name] = tensor
    return [FlatTensors(group, dtype) for dtype, group in groups.items()]


def read_outer(outer: object) -> Nesterov | None:
    """Return the outer step that was meant: none, DiLoCo's by its name, or itself."""
    if outer == "nesterov":
        return Nesterov(lr=DILOCO_LR, momentum=DILOCO_MOMENTUM)
    fits = outer is None or type(outer) is Nesterov
    check_argument(fits, "outer", "be None, 'nesterov' or `tables.Nesterov(…)`", outer)
    return cast("Nesterov | None", outer)

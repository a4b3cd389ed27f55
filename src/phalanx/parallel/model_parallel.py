"""Model parallelism: every column is a different part of a layer, and gets the whole input."""

from __future__ import annotations

from phalanx.parallel.abstract_parallel import AbstractParallel
from phalanx.types import Nested

__all__ = ["ModelParallel"]


class ModelParallel(AbstractParallel):
    """Give the whole input to every column, and concatenate their outputs along ``dim``.

                     ┌─ column 0 ─ output ─┐
        input ───────┼─ column 1 ─ output ─┼─ cat(dim) ─ output
                     └─ column 2 ─ output ─┘

    The gradient of the input is the sum of the columns'. Columns run at the same time, each on its
    device, and are trained in place. They may return nested outputs, of the same structure: leaf by
    leaf, tensors are concatenated; of other values the first column's is taken.

    Columns must not change their input in place: on one device it is the same memory for all.

    Args:
        dim: Along which outputs are concatenated; negative ones count from the end.
        intra_op: Threads inside operators per column; default: cores divided by columns.

    Shapes:
        Outputs may differ along ``dim`` only; the result has the sum of their sizes there.

    Raises:
        ConfigError: Outputs cannot be concatenated along ``dim``.
        StateError: It is called without columns.
        UnsupportedError: In a second derivative (``create_graph=True``).

    Determinism: bitwise equal from run to run. Equal to the uncut layer within float rounding:
    the input's gradient is summed over outputs in another order, and matrix products of another
    size may be computed in another order.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = ModelParallel(dim=-1).add(nn.Linear(4, 3)).add(nn.Linear(4, 2))
        >>> with model:
        ...     model(torch.ones(2, 4)).shape
        torch.Size([2, 5])

    Source: fbcunn's ModelParallel; unlike it, columns may lie on any devices, and summing the
    input's gradients does not change the columns' own.
    """

    def __init__(self, dim: int, *, intra_op: int | None = None) -> None:
        super().__init__(dim, intra_op=intra_op)

    def distribute(self, inputs: Nested) -> list[Nested]:
        """Return the whole input for every column."""
        return [inputs] * len(self)

"""From the partial sums of a run to the gradient in the flat buffers."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.execution.contract import GradientSums, RunResult
from phalanx.memory import FlatParameters

__all__ = ["LocalSums"]


class LocalSums(GradientSums):
    """All sums lie in this process; every replica's thread adds its part of the last two.

    Args:
        flat: Parameters and gradients.
        num_parts: Number of threads.
        places: Where each of the flat parameters stands among the executor's, or -1.
        alike: Whether what is to be summed may lie as the buffers do.
    """

    def __init__(
        self, flat: FlatParameters, num_parts: int, places: Sequence[int], *, alike: bool
    ) -> None:
        self._alike = alike
        self._parts = flat.parts(num_parts)
        self._places = places

    def take(self, report: RunResult) -> list[int]:
        self.operands = [
            [None if place < 0 else operand.gradients[place] for place in self._places]
            for operand in report.operands
        ]
        return [
            index
            for index in range(len(self._places))
            if all(operand[index] is None for operand in self.operands)
        ]

    def sum_part(self, part: int) -> None:
        self._parts[part].sum_gradients(self.operands, alike=self._alike)

    def share(self) -> None:
        """They are."""

    def forget(self) -> None:
        self.operands = []

"""From the partial sums of a run to the gradient in the flat buffers."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.execution.contract import Reduction, RunResult
from phalanx.memory import FlatParameters

__all__ = ["LocalReduction"]


class LocalReduction(Reduction):
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

    def take(self, result: RunResult) -> list[int]:
        self.operands = [
            [None if place < 0 else operand.gradients[place] for place in self._places]
            for operand in result.operands
        ]
        missing = list(range(len(self._places)))
        for operand in self.operands:
            missing = [index for index in missing if operand[index] is None]
        return missing

    def sum_part(self, part: int) -> None:
        self._parts[part].sum_gradients(self.operands, alike=self._alike)

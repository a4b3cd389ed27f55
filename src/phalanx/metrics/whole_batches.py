"""Outputs and targets of a whole batch, joined from its microbatches.

tensors, arrays      concatenated along the layout's dim
lists of rows        one behind the other
numbers              floats: their mean, weighted as the loss is; others: a vector of the pieces
anything else        the first piece's
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.plan import Layout, merge_leaves
from phalanx.types import Nested


@dataclass(frozen=True)
class Joining:
    """A rule that joins pieces of a batch, or batches, to one; ``layout`` has split them."""

    layout: Layout

    def join(
        self,
        parts: Sequence[Nested],
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        are_targets: bool = False,
    ) -> Nested:
        """Join outputs of ``sizes`` rows each along the layout's dim.

        Args:
            are_targets: They are the second of each batch's pair, and joined as that was split.

        Raises:
            ConfigError: They differ in their structure.
        """
        layout = self.layout if are_targets else Layout(self.layout.dim)
        if len(parts) == 1:
            return parts[0]

        def joined(path: str, leaves: Sequence[Any]) -> Any:
            return _joined(leaves, layout.dim_of(f"1.{path}" if path else "1", layout.dim), weights)

        tests = [_test_of_rows(size, collated=self.layout.split is not None) for size in sizes]
        return merge_leaves(parts, joined, "microbatch", tests)


# Any, here and below: leaves and nodes of the user's own outputs.
def _test_of_rows(size: int, *, collated: bool) -> Callable[[Any], bool]:
    """Return a test of a node: whether it is a list with an item for each of ``size`` rows.

    A list of tensors is a list of columns, unless the user's own function collates it; a tuple has
    rows if they are texts, as `default_collate` makes it.
    """

    def is_rows(node: Any) -> bool:
        if type(node) not in (list, tuple) or len(node) != size or not size:
            return False
        if type(node) is tuple:
            return all(isinstance(each, str) for each in node)
        return collated or not any(isinstance(each, (Tensor, np.ndarray)) for each in node)

    return is_rows


def _joined(leaves: Sequence[Any], dim: int | None, weights: Sequence[float]) -> Any:
    first = leaves[0]
    if dim is None:
        return first
    if isinstance(first, Tensor):
        here = [leaf.to(first.device) for leaf in leaves]
        return torch.cat(here, dim) if first.dim() else _mean(torch.stack(here), weights)
    if isinstance(first, np.ndarray):
        return np.concatenate(leaves, dim) if first.ndim else np.stack(leaves)
    if type(first) in (list, tuple):
        return type(first)(chain.from_iterable(leaves))
    return first


def _mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of floating-point numbers; counts and the like stay apart."""
    if not (values.is_floating_point() or values.is_complex()):
        return values
    return (values * values.new_tensor(weights)).sum() / sum(weights)

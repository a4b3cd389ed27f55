"""A batch in microbatches: how many, how large, and what each stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigError
from phalanx.metrics import Joining
from phalanx.plan import Layout, equal_sizes, open_rows, read_weights, workload_sizes
from phalanx.types import Nested, WeightFn

__all__ = ["Microbatches", "Splitter"]


@dataclass
class Microbatches:
    """A batch in pieces, whose gradients are summed.

    Attributes:
        pieces: In order; some may be without rows.
        sizes: Rows of each.
        weights: What each stands for.
        scales: Each one's share in the loss of the whole batch.
        weight: What the whole batch stands for.
        owners: The replica of each, where every replica has one slice; None: whoever is free.
    """

    pieces: list[Nested]
    sizes: list[int]
    weights: list[float]
    scales: tuple[float, ...]
    weight: float
    owners: range | None

    # Any, here and below: a `MicrobatchResult`; None for a microbatch that weighs nothing.
    def loss_of(self, results: Sequence[Any]) -> float:
        """Return the loss of the whole batch: the mean losses, weighted, in order."""
        pairs = zip(self.scales, results, strict=True)
        return math.fsum([scale * each.loss for scale, each in pairs if each is not None])

    def outputs_of(self, results: Sequence[Any], joining: Joining) -> tuple[Nested, Nested, int]:
        """Return the outputs and targets of the whole batch, and its rows.

        Microbatches that were left out, because they weigh nothing, are in none of them.
        """
        columns = zip(results, self.sizes, self.weights, strict=True)
        found, sizes, weights = zip(*[each for each in columns if each[0] is not None], strict=True)
        outputs = joining.join([each.outputs for each in found], sizes, weights)
        targets = [each.targets for each in found]
        joined = joining.join(targets, sizes, weights, are_targets=True)
        return outputs, joined, sum(sizes)


@dataclass(frozen=True)
class Splitter:
    """Split batches into microbatches the way a trainer was told.

    Args:
        layout: Which dim of which leaf is split.
        microbatches: Their number, or None for one slice per replica.
        weight: What a microbatch stands for; None for its rows.
    """

    layout: Layout
    microbatches: int | None
    weight: WeightFn | None

    def split(
        self, batch: Nested, workloads: Sequence[float], *, weighs: bool = True
    ) -> Microbatches:
        """Split ``batch`` for replicas with ``workloads``.

        Args:
            weighs: Ask what each microbatch stands for; else it stands for its rows.

        Raises:
            ConfigError: Leaves differ in their rows, there are none, or weights are wrong.
        """
        rows = open_rows(batch, self.layout)
        count = rows.count()
        if count == 0:
            raise ConfigError(
                "`batch` must hold at least 1 row, but is empty. Leave empty batches out."
            )
        if self.microbatches is None:
            sizes = workload_sizes(count, workloads)
        else:
            sizes = equal_sizes(count, self.microbatches)
        pieces = rows.cut(sizes)
        weights = list(map(float, sizes))
        if weighs and self.weight is not None:
            weights = self._weights(pieces, sizes)
        weight = math.fsum(weights)
        scales = tuple([each / weight for each in weights])
        owners = range(len(pieces)) if self.microbatches is None else None
        return Microbatches(pieces, sizes, weights, scales, weight, owners)

    def _weights(self, pieces: Sequence[Nested], sizes: Sequence[int]) -> list[float]:
        try:
            return read_weights("weight", self.weight, pieces, sizes)
        except (KeyError, AttributeError) as error:  # a batch without labels, most likely
            error.add_note("`weight` raised it. `predict()` asks for no weights.")
            raise

"""How the table of a module takes what its workers found; see shared_module.py.

Shapes:
    P: elements of the module that lie in the table.
    Deltas of parameters are (P, 1); of statistics (P, 2): a worker's value, and how much it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from phalanx.errors import ConfigError
from phalanx.tables.updaters import Change, Nesterov, Sum, Updater, parse_updater

__all__ = ["Blend", "choose_updater", "read_outer"]

DILOCO_LR, DILOCO_MOMENTUM = 0.7, 0.9  # arXiv 2311.08105, table 5


@dataclass(frozen=True, kw_only=True)
class _SumOfMean(Sum):
    """w += the mean of a round's deltas."""

    name: ClassVar[str] = "sum_of_mean"
    merges_rounds: ClassVar[str | None] = "mean"


@dataclass(frozen=True, kw_only=True)
class _NesterovOfMean(Nesterov):
    """One outer step with the mean of a round's pseudo-gradients."""

    name: ClassVar[str] = "nesterov_of_mean"
    merges_rounds: ClassVar[str | None] = "mean"


@dataclass(frozen=True, kw_only=True)
class _NesterovOfSum(Nesterov):
    """One outer step with the sum of a round's pseudo-gradients."""

    name: ClassVar[str] = "nesterov_of_sum"
    merges_rounds: ClassVar[str | None] = "sum"


@dataclass(frozen=True, kw_only=True)
class Blend(Updater):
    """w += weight · (v − w): moves the shared value towards a worker's, never beyond it.

    Unlike a sum of differences it stays between the workers' values however late one is, so that a
    variance is never negative. Rows are (w, unused), deltas (v, weight).
    """

    name: ClassVar[str] = "blend"
    merges_rounds: ClassVar[str | None] = "mean"

    def apply(self, change: Change) -> None:
        """Move; where both are equal, infinity among them, nothing changes."""
        shared, (value, weight) = change.rows_KD[:, 0], change.delta_KD.unbind(1)
        moved = torch.where(value == shared, shared, torch.lerp(shared, value, weight))
        shared.copy_(moved)


def read_outer(outer: object) -> Nesterov | None:
    """Return the outer step that was meant: by name, by name and options, or itself.

    Raises:
        ConfigError: It is another, or an option cannot be.

    Example:
        >>> read_outer("nesterov"), read_outer({"name": "nesterov", "lr": 1.0})
        (Nesterov(lr=0.7, momentum=0.9), Nesterov(lr=1.0, momentum=0.9))
    """
    if outer is None or type(outer) is Nesterov:
        return outer
    options = {"name": outer} if isinstance(outer, str) else outer
    if not isinstance(options, Mapping) or options.get("name") != Nesterov.name:
        raise ConfigError(
            "`outer` must be None, 'nesterov', a mapping with that name and its options, or "
            f"`tables.Nesterov(…)`, but is {outer!r}."
        )
    made = parse_updater({"lr": DILOCO_LR, "momentum": DILOCO_MOMENTUM, **options})
    assert isinstance(made, Nesterov)
    return made


def choose_updater(merge: str, outer: Nesterov | None, *, in_rounds: bool) -> Updater:
    """Return how the table takes deltas: a round's merged, or one by one as they come."""
    if outer is None:
        return _SumOfMean() if in_rounds and merge == "mean" else Sum()
    if not in_rounds:
        return outer
    kind = _NesterovOfMean if merge == "mean" else _NesterovOfSum
    return kind(lr=outer.lr, momentum=outer.momentum)

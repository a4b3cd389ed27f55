"""The criterion inside the replicas: each slice's mean loss, and the whole batch's from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.plan import Layout, Rows, check_function, check_mean_loss, flatten
from phalanx.replicas import FrozenCopies
from phalanx.types import LossFn, Nested, WeightFn

__all__ = ["ReplicaLosses", "loss_of_nothing"]


class ReplicaLosses:
    """One criterion over slices of a batch.

    Args:
        loss_fn: A mean over what it counts.

    Raises:
        ConfigError: ``loss_fn`` has parameters, which replicas would have to share; or it says that
            it is no mean.
    """

    def __init__(self, loss_fn: LossFn) -> None:
        if not callable(loss_fn):
            raise ConfigError(
                "`loss_fn` must be callable as loss_fn(outputs, targets), but is "
                f"{type(loss_fn).__name__!r}. It comes first: forward_loss(loss_fn, inputs, "
                "targets)."
            )
        if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
            raise ConfigError(
                "`loss_fn` must have no parameters of its own, but has. Make it part of the "
                "module, and let that return the loss."
            )
        check_mean_loss("loss_fn", loss_fn)
        self._loss_fn = loss_fn
        self._copies = FrozenCopies(loss_fn) if isinstance(loss_fn, nn.Module) else None

    def cut_targets(self, targets: Nested, sizes: Sequence[int], dim: int) -> list[Nested]:
        """Cut ``targets`` as the inputs are cut.

        Raises:
            ConfigError: They have other rows.
        """
        cutter = Rows(targets, Layout(dim))
        if cutter.first is None:
            raise ConfigError(
                "`targets` must hold at least one tensor that is split over replicas, but holds "
                "none. Give a tensor with a batch dim."
            )
        rows = cutter.count()
        if rows != sum(sizes):
            raise ConfigError(
                f"`targets` must have {sum(sizes)} rows along dim {dim} like `inputs`, but has "
                f"{rows}."
            )
        return cutter.cut(sizes)

    def weights(
        self, slices: Sequence[Nested | None], sizes: Sequence[int], weight_fn: WeightFn | None
    ) -> list[float]:
        """Return what each slice's mean loss stands for.

        Raises:
            ConfigError: A weight is no number, negative or not finite, or all are zero.
        """
        if weight_fn is None:
            return [float(size) for size in sizes] if any(sizes) else [1.0] * len(sizes)
        check_function("weight_fn", weight_fn)
        weights = [0.0 if own is None else _read_weight(weight_fn(own)) for own in slices]
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise ConfigError(
                "`weight_fn` must give finite weights of at least 0, not all 0, but gives "
                f"{weights!r} for the slices."
            )
        return weights

    def of(self, outputs: Nested, targets: Nested) -> Tensor:
        """Return one slice's loss.

        Raises:
            ConfigError: It is no scalar.
        """
        loss_fn = self._loss_fn
        if self._copies is not None:
            device = next((each.device for each in _tensors(outputs)), torch.device("cpu"))
            loss_fn = self._copies.on(device)
        loss: object = loss_fn(outputs, targets)
        if not isinstance(loss, Tensor) or loss.dim():
            told = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"`loss_fn` must return a scalar tensor, but returned {told!r}. Use "
                "reduction='mean'."
            )
        return loss

    def check_counted(self, losses: Sequence[Tensor]) -> None:
        """Refuse a loss that is nan for some slices only: these have no targets to be a mean over.

        Only on the CPU: to look at it would make the caller wait for an accelerator.
        """
        without = [each.device.type == "cpu" and bool(each.isnan()) for each in losses]
        if any(without) and not all(without):
            raise ConfigError(
                "`weight_fn` must be given where a slice may have no targets, but is None, and the "
                f"loss of slice {without.index(True)} of {len(losses)} alone is nan. Say what "
                "counts: weight_fn=lambda targets: (targets != -100).sum(), for example."
            )

    def mean(
        self, losses: Sequence[Tensor], weights: Sequence[float], home: torch.device
    ) -> Tensor:
        """Return the weighted mean, in order; a loss of weight 0 (which may be NaN) is left out."""
        whole = math.fsum(weights)
        terms = [
            loss.to(home) * (weight / whole)
            for loss, weight in zip(losses, weights, strict=True)
            if weight
        ]
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def loss_of_nothing(outputs: Nested) -> Tensor:
    """Return 0 as the loss of a slice that counts nothing, where its own mean would be NaN.

    It is connected to the outputs by gradients of exactly 0.
    """
    terms = [
        torch.where(torch.zeros_like(each, dtype=torch.bool), each, 0.0).sum()
        for each in _tensors(outputs)
        if each.is_floating_point()
    ]
    return torch.stack(terms).sum() if terms else torch.zeros(())


# Any: whatever the user's function returns.
def _read_weight(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            "`weight_fn` must return a finite number for the targets of a slice, but returned "
            f"{given!r:.80}. Take a sum: lambda targets: (targets >= 0).sum(), say."
        ) from error


def _tensors(outputs: Nested) -> list[Tensor]:
    leaves, _ = flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

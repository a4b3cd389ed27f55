"""The loss inside the replicas: the mean of each piece, and the whole batch's from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.plan import Layout, Rows, check_function, check_mean_loss, flatten
from phalanx.replicas import placed_on
from phalanx.types import LossFn, Nested

__all__ = ["check_criterion", "cut_targets", "loss_of_nothing", "loss_of_piece", "mean_loss"]


def check_criterion(loss_fn: LossFn) -> None:
    """Refuse a loss that replicas cannot compute for pieces of a batch.

    Raises:
        ConfigError: It has parameters, which replicas would have to share; or it says that it is no
            mean.
    """
    check_function("loss_fn", loss_fn, "be callable as loss_fn(outputs, targets), and come first")
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise ConfigError(
            "`loss_fn` must have no parameters of its own, but has. Make it part of the "
            "module, and let that return the loss."
        )
    check_mean_loss("loss_fn", loss_fn)


def loss_of_piece(loss_fn: LossFn, outputs: Nested, targets: Nested) -> Tensor:
    """Return the loss of one piece, on its device.

    Raises:
        ConfigError: It is no scalar.
    """
    if isinstance(loss_fn, nn.Module):
        device = next((each.device for each in _tensors(outputs)), torch.device("cpu"))
        loss_fn = placed_on(loss_fn, device)
    loss: object = loss_fn(outputs, targets)
    if not isinstance(loss, Tensor) or loss.dim():
        told = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"`loss_fn` must return a scalar tensor, but returned {told!r}. Use reduction='mean'."
        )
    return loss


def cut_targets(targets: Nested, sizes: Sequence[int], dim: int) -> list[Nested]:
    """Cut ``targets`` as the inputs are cut.

    Raises:
        ConfigError: They have other rows, or none that could be cut.
    """
    cutter = Rows(targets, Layout(dim))
    rows = None if cutter.first is None else cutter.count()
    if rows != sum(sizes):
        told = "no tensor that is split" if rows is None else rows
        raise ConfigError(
            f"`targets` must have {sum(sizes)} rows along dim {dim} like `inputs`, but has {told}."
        )
    return cutter.cut(sizes)


def mean_loss(
    losses: Sequence[Tensor], weights: Sequence[float], home: torch.device, *, by_rows: bool
) -> Tensor:
    """Return the weighted mean, in order; a loss of weight 0 (which may be NaN) is left out.

    Args:
        by_rows: The weights are rows. A loss that is nan for some pieces only is refused then:
            these have no targets to be a mean over. It is looked for on the CPU alone, as the
            caller would wait for an accelerator.
    """
    without = [each.device.type == "cpu" and bool(each.isnan()) for each in losses if by_rows]
    if any(without) and not all(without):
        raise ConfigError(
            "`weight_fn` must be given where a slice may have no targets, but is None, and the "
            f"loss of slice {without.index(True)} of {len(losses)} alone is nan. Say what "
            "counts: weight_fn=lambda targets: (targets != -100).sum(), for example."
        )
    whole = math.fsum(weights)
    pairs = zip(losses, weights, strict=True)
    terms = [loss.to(home) * (weight / whole) for loss, weight in pairs if weight]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def loss_of_nothing(outputs: Nested) -> Tensor:
    """Return 0 as the loss of a piece that counts nothing, where its own mean would be NaN.

    It is connected to the outputs by gradients of exactly 0.
    """
    floating = [each for each in _tensors(outputs) if each.is_floating_point()]
    terms = [torch.where(torch.zeros_like(x, dtype=torch.bool), x, 0.0).sum() for x in floating]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _tensors(outputs: Nested) -> list[Tensor]:
    return [leaf for leaf in flatten(outputs)[0] if isinstance(leaf, Tensor)]

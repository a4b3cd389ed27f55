"""The losses of ``phalanx train``, and the refusal of outputs and targets that cannot fit.

torch computes some pairs that no loss is meant for: the cross entropy of one column is 0 whatever
the model predicts; the mean squared error of [B] and [B, 1] is taken over B × B pairs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from phalanx.cli.imports import import_attribute
from phalanx.errors import ConfigError
from phalanx.types import LossFn

_LOSSES: dict[str, LossFn] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


def find_loss(spec: str, task: str) -> tuple[str, LossFn]:
    """Return a loss and its name; "auto" is cross entropy to classify, else mse.

    Raises:
        ConfigError: There is no such loss.
    """
    if spec == "auto":
        spec = "cross_entropy" if task == "classify" else "mse"
    if ":" in spec:
        function = import_attribute(spec)
        function = function() if isinstance(function, type) else function
        if callable(function):
            return spec, function
    if spec not in _LOSSES:
        raise ConfigError(
            f"`--loss` must be {', '.join(_LOSSES)} or module:attribute, but is {spec!r}."
        )
    return spec, _LOSSES[spec]


def check_loss(name: str, outputs: Tensor, targets: Tensor, num_classes: int) -> None:
    """Refuse outputs and targets that a loss of torch's would take for something else.

    Args:
        name: Of the loss.
        outputs: Of the model, for some rows.
        targets: Of these rows.
        num_classes: Classes of the data; 0 where they are not known.
    """
    if name == "cross_entropy" and (outputs.dim() < 2 or outputs.shape[1] < 2):
        raise ConfigError(
            "The model must have an output for each of 2 or more classes, but its outputs have "
            f"the shape {tuple(outputs.shape)}. Give --task regress, or another model."
        )
    if name == "cross_entropy" and outputs.shape[1] < num_classes:
        raise ConfigError(
            f"The model must have an output for each of {num_classes} classes, but has "
            f"{outputs.shape[1]}. Change the model."
        )
    if name in ("mse", "l1", "bce") and outputs.shape != targets.shape:
        raise ConfigError(
            f"Targets must have the shape {tuple(outputs.shape)} of the outputs for the loss "
            f"{name}, but have {tuple(targets.shape)}. Change the data or the model."
        )

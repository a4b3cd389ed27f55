"""From the text of ``--loss`` and ``--forward`` to functions, and the refusal of what cannot fit.

torch computes some pairs of outputs and targets that no loss is meant for: cross entropy of one
float column takes it for probabilities of one class and is 0 for whatever the model says; the mean
squared error of [B] and [B, 1] is taken over B x B pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.cli.data.attribute import call_without_arguments, import_attribute
from phalanx.cli.data.data import Data
from phalanx.errors import ConfigError
from phalanx.types import ForwardFn, LossFn

__all__ = ["LOSSES", "NamedLoss", "build_loss", "import_forward", "token_cross_entropy"]

_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}
LOSSES = tuple(_FUNCTIONS)


def build_loss(spec: str | None, data: Data) -> LossFn:
    """Make the loss that ``spec`` names; None for cross entropy, in nats.

    Raises:
        ConfigError: There is no such loss, or no function of that name.
    """
    if spec is not None and ":" in spec:
        return _own_function("--loss", spec, takes="outputs and targets")
    if spec is not None and spec not in LOSSES:
        raise ConfigError(
            f"`--loss` must be {', '.join(LOSSES)} or module:attribute, but is {spec!r}."
        )
    if data.kind == "tokens" and spec in (None, "cross_entropy"):
        return token_cross_entropy
    if data.kind == "images" and spec in (None, "cross_entropy"):
        return F.cross_entropy  # of classes that were checked when the data was read
    return NamedLoss("cross_entropy" if spec is None else spec)


def import_forward(spec: str) -> ForwardFn:
    """Import what ``--forward`` names.

    Raises:
        ConfigError: There is no such function.
    """
    return _own_function("--forward", spec, takes="the model and a microbatch")


def token_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy over all tokens, in nats.

    Shapes:
        logits_BTV, targets int64 [B, T] -> scalar.
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@dataclass(frozen=True)
class NamedLoss:
    """One of :data:`LOSSES`, by its name.

    Example:
        >>> import torch
        >>> NamedLoss("mse")(torch.ones(2, 1), torch.zeros(2, 1)).item()
        1.0
    """

    name: str

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss.

        Raises:
            ConfigError: torch would take such outputs or targets for something else.
        """
        if self.name != "cross_entropy" and targets.shape != outputs.shape:
            self._refuse(f"Targets must have the outputs' shape {_shape(outputs)}", targets)
        if self.name == "cross_entropy" and (outputs.dim() < 2 or outputs.shape[1] < 2):
            self._refuse("Outputs must have a column for each of 2 or more classes", outputs)
        return _FUNCTIONS[self.name](outputs, targets)

    def _refuse(self, wanted: str, found: Tensor) -> None:
        others = ", ".join(name for name in LOSSES if name != self.name)
        raise ConfigError(
            f"{wanted} for the loss {self.name}, but have shape {_shape(found)}. Give --loss "
            f"({others}, or your own as module:attribute), or change data or model."
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _own_function(flag: str, spec: str, *, takes: str) -> Callable[..., Any]:
    """Import a function; a class is called without arguments for an object of it."""
    found = import_attribute(spec)
    if isinstance(found, type):
        found = call_without_arguments(found, spec)
    if not callable(found):
        raise ConfigError(
            f"`{flag}` must name a function of {takes}, but `{spec}` is a {type(found).__name__}."
        )
    if isinstance(found, nn.Module) and next(found.parameters(), None) is not None:
        raise ConfigError(
            f"`{flag}` must name what has no parameters, but `{spec}` has. Make them part of the "
            "model, and let --forward compute the loss."
        )
    function: Callable[..., Any] = found
    return function

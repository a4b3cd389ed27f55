"""Another module's weights in the place of the trained ones, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError

__all__ = ["Weights", "find_weights", "lent_weights"]

# Parameters and buffers by name.
Weights = dict[str, Tensor]


def find_weights(trained: nn.Module, lender: Any) -> Weights | None:  # Any: what the user wrote
    """Return the weights and buffers of ``lender``, which are to be looked at as ``trained``'s.

    Args:
        lender: A module, or something with one as its ``module``, such as an `EMA` or torch's
            `AveragedModel`; None for none.

    Raises:
        ConfigError: It is neither, or of other parameters.
    """
    if lender is None:
        return None
    ours = _tensors_of(trained)
    for module in (lender, getattr(lender, "module", None)):
        if isinstance(module, nn.Module):
            lent = _tensors_of(module)
            if _kinds_of(lent) == _kinds_of(ours):
                return lent
    raise ConfigError(
        "`module` must be a module, or have one as its `module`, with the parameters and buffers "
        f"of the trained one, in name, dtype and shape, but is {lender!r:.200}. Give an `EMA`, or "
        "a copy of the trained module."
    )


@contextmanager
def lent_weights(
    trained: nn.Module, lent: Weights | None, write: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """Let ``trained`` have ``lent`` in the body, then its own weights and buffers again.

    They are copied into its own memory, where replicas of every kind find them, and back bit for
    bit, also after an error.

    Args:
        write: Calls a function that writes to ``trained``, where no Ctrl-C comes in between.
    """
    if lent is None:
        yield
        return
    ours = _tensors_of(trained)
    own = {name: tensor.detach().clone() for name, tensor in ours.items()}

    def copy_from(source: Weights) -> None:
        with torch.no_grad():
            for name, tensor in ours.items():
                tensor.copy_(source[name])

    try:
        write(lambda: copy_from(lent))
        yield
    finally:
        write(lambda: copy_from(own))


def _tensors_of(module: nn.Module) -> Weights:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _kinds_of(tensors: Weights) -> dict[str, object]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}

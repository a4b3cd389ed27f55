"""Another module's weights in the place of the trained ones, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.memory import is_expanded

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
    lent = _tensors_of(_read_lender(lender, ours))
    _check_alike(lent, ours)
    return lent


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


# Any: whatever the user wrote.
def _read_lender(lender: Any, ours: Weights) -> nn.Module:
    """Return the module that is meant: where both could be, the one with our names."""
    inner = getattr(lender, "module", None)
    is_ours = isinstance(lender, nn.Module) and _tensors_of(lender).keys() == ours.keys()
    if isinstance(inner, nn.Module) and not is_ours:
        return inner
    if isinstance(lender, nn.Module):
        return lender
    raise ConfigError(
        f"`module` must be a module, or have one as its `module`, but is {lender!r:.80}. Give an "
        "`EMA`, say."
    )


def _check_alike(lent: Weights, ours: Weights) -> None:
    differing = sorted(lent.keys() ^ ours.keys())
    if differing:
        raise ConfigError(
            f"`module` must have the parameters and buffers of the trained module, but "
            f"{', '.join(map(repr, differing[:3]))} are of one of them only. Give a copy of it."
        )
    for name, tensor in ours.items():
        here, there = (f"{each.dtype} {tuple(each.shape)}" for each in (tensor, lent[name]))
        if here != there:
            raise ConfigError(
                f"`{name}` of `module` must be {here} as in the trained module, but is {there}. "
                "Give a copy of it."
            )
        if is_expanded(tensor):
            raise ConfigError(
                f"`{name}` of the trained module must have memory for each of its elements, which "
                "another module's are copied to, but is expanded. Register a `.clone()` of it."
            )

"""How long and how fast each model is trained on each kind of data, unless the user says otherwise.

All are for ``torch.optim.AdamW`` with its other defaults and :func:`decay_linearly`. With a
constant rate the last accuracy moves up and down by about a percent, and where it stops is luck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Defaults of one training.

    Args:
        epochs: Times through the training set.
        batch_size: Samples, or windows of text, per optimizer step.
        lr: AdamW's learning rate at the first step.
    """

    epochs: int
    batch_size: int
    lr: float


_RECIPE_BY_PAIR = {
    ("digits", "mlp"): Recipe(epochs=20, batch_size=64, lr=1e-3),
    ("digits", "cnn"): Recipe(epochs=10, batch_size=64, lr=2e-3),
    ("text", "gpt"): Recipe(epochs=1, batch_size=32, lr=2e-3),
}
_OTHERWISE = Recipe(epochs=5, batch_size=64, lr=1e-3)


def defaults_for(data: str, model: str) -> Recipe:
    """Look up the recipe for two specs as given on the command line.

    Specs and not opened things, because data cannot be opened without its batch size.

    Example:
        >>> defaults_for("digits", "cnn").batch_size
        64
        >>> defaults_for("my_data:train", "my_model:Net").epochs
        5
    """
    return _RECIPE_BY_PAIR.get((data.partition(":")[0], model), _OTHERWISE)


def default_model(data: str) -> str:
    """Name the built-in model that suits a data spec: ``gpt`` for text, else ``cnn``.

    Example:
        >>> default_model("text:book.txt"), default_model("digits")
        ('gpt', 'cnn')
    """
    return "gpt" if data.partition(":")[0] == "text" else "cnn"


def decay_linearly(total_steps: int) -> Callable[[Optimizer], LRScheduler]:
    """Make a scheduler that brings the learning rate to 0 in a straight line over the training.

    It is stepped once per optimizer step; after ``total_steps`` the rate stays 0. The rate is a
    function of the step alone, so a run that goes on with more steps than it was planned for has
    the rate of its place in the longer training, and not the 0 of its old end.

    Raises:
        ConfigError: ``total_steps`` is less than 1.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = decay_linearly(4)(optimizer)
        >>> rates = []
        >>> for _ in range(5):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step()
        ...     scheduler.step()
        >>> rates
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if total_steps < 1:
        raise ConfigError(f"`total_steps` must be 1 or more, but is {total_steps!r}.")

    from torch.optim.lr_scheduler import LambdaLR  # late: needs torch

    def schedule(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))

    return schedule


def begin_anew(optimizer: Optimizer, scheduler: LRScheduler | None, *, lr: float) -> None:
    """Let all learning rates be what they would be, had the training begun with ``lr``."""
    for group in optimizer.param_groups:
        began = group.get("initial_lr", group["lr"])
        if began == lr:
            continue
        group["lr"] *= lr / began
        if scheduler is not None:
            group["initial_lr"] = lr
            scheduler.base_lrs = [lr] * len(optimizer.param_groups)

"""What is trained to find out what steps cost: a model, and ones that compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.cli.data import open_data
from phalanx.cli.losses import build_loss
from phalanx.cli.models import build_model
from phalanx.cli.options import TrainOptions
from phalanx.errors import ConfigError
from phalanx.plan import flatten, unflatten
from phalanx.types import LossFn, Nested

__all__ = ["SIZES", "Hollow", "Subject", "repeated"]

SIZES = ("empty", "hollow", "whole")
"""The three models of a measurement, see `FormationCosts`."""


class Hollow(nn.Module):
    """A model that computes nothing: its output is 0, and so are its gradients.

    Args:
        shapes: Of its parameters.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.held = nn.ParameterList(torch.zeros(*shape) for shape in shapes)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:  # noqa: ARG002
        output: Tensor = _Nothing.apply(*self.held)  # type: ignore[no-untyped-call]
        return output


# torch's stubs know only of Any here.
class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def _output_as_loss(output: Tensor, targets: Any) -> Tensor:  # noqa: ARG001
    return output


@dataclass(frozen=True)
class Subject:
    """What `phalanx train` would train with these options; it may be sent to other processes."""

    options: TrainOptions

    def build(self, size: str) -> tuple[nn.Module, LossFn]:
        """Return one of the three models, and its loss."""
        data = self._data()
        module = build_model(self.options.model, data, seed=self.options.seed)
        if size == "whole":
            return module, build_loss(self.options.loss, data)
        trained = [each for each in module.parameters() if each.requires_grad]
        shapes = [each.shape if size == "hollow" else (1,) for each in trained]
        return Hollow(shapes), _output_as_loss

    def microbatch(self) -> Nested:
        """Return the first batch of the data.

        Raises:
            ConfigError: There is none.
        """
        for batch in self._data().train:
            return batch
        raise ConfigError(f"`--data` must have a batch, but {self.options.data!r} has none.")

    def optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """Return what makes the optimizer from parameters."""
        return partial(torch.optim.AdamW, lr=self.options.lr)

    def _data(self) -> Any:
        options = self.options
        return open_data(options.data, batch_size=options.batch_size, seed=options.seed)


def repeated(batch: Nested, times: int) -> Nested:
    """Return a batch with all rows so many times."""
    leaves, structure = flatten(batch)
    return unflatten(
        [torch.cat([each] * times) if isinstance(each, Tensor) and each.ndim else each
         for each in leaves],
        structure,
    )  # fmt: skip

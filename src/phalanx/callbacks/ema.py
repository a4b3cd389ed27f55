"""A second set of weights that follows the trained ones: their exponential moving average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx.callbacks.callback import Callback
from phalanx.callbacks.events import StepDone
from phalanx.errors import StateError
from phalanx.execution import signals_held
from phalanx.plan import check_argument, read_number


class EMA(Callback):
    """A callback that averages the weights after every step; torch's `AveragedModel`.

    After the first step the average is the weights themselves, then
    ``average = decay * average + (1 - decay) * weights``. Buffers, such as the statistics of batch
    norm, are the model's own. The average is in checkpoints.

    Args:
        decay: What is kept of the average, at least 0 and below 1.

    Determinism: bitwise identical in every configuration, as the weights are.

    Example:
        >>> ema = EMA(decay=0.5)
        >>> ema.decay
        0.5
    """

    def __init__(self, decay: float = 0.999) -> None:
        fits = 0 <= read_number("decay", decay) < 1
        check_argument(fits, "decay", "be at least 0 and below 1", decay, "Give 0.999, say.")
        self.decay = float(decay)
        self._averaged: AveragedModel | None = None

    @property
    def module(self) -> nn.Module:
        """A copy of the trained module with averaged weights, always the same object.

        Raises:
            StateError: No trainer has it.
        """
        return self._opened.module

    @property
    def _opened(self) -> AveragedModel:
        if self._averaged is None:
            raise StateError(
                "`EMA` must belong to a trainer to have a module, but belongs to none. Give it to "
                "one by `callbacks=[ema]`."
            )
        return self._averaged

    def attach(self, trainer: Any) -> None:
        """Start over, with the weights of ``trainer``, whose module is copied."""
        averaged = AveragedModel(trainer.module, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        super().attach(trainer)
        self._averaged = averaged

    def on_step_end(self, event: StepDone) -> None:  # noqa: ARG002
        """Average the weights."""
        if self.trainer is not None:
            with signals_held():  # the average is of a whole number of steps, as the weights are
                self._opened.update_parameters(self.trainer.module)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average, its buffers, and how many steps it is of."""
        averaged = self._opened
        return {**dict(averaged.named_parameters()), **dict(averaged.named_buffers())}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` returned."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

"""The computation of a microbatch: forward, loss, backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.execution import MicrobatchContext, MicrobatchResult, Task
from phalanx.plan import check_function, check_mean_loss, copy_rows, flatten, unflatten
from phalanx.replicas import placed_on
from phalanx.torch_internals import run_backward
from phalanx.types import ForwardFn, LossFn, Nested

_NOTHING = nullcontext()


class Objective:
    """The loss of a module on microbatches.

    Args:
        loss: (outputs, targets) -> mean loss; needed without ``forward``.
        forward: (module, microbatch) -> loss, (loss, outputs) or (loss, outputs, targets); takes
            the place of calling the module and the loss.

    Attributes:
        function: The one that was given.
        is_forward: Whether it is ``forward``.
    """

    def __init__(self, loss: LossFn | None, forward: ForwardFn | None) -> None:
        if (loss is None) == (forward is None):
            given = "none is given" if loss is None else "both are given"
            raise ConfigError(
                f"`loss` must be given unless `forward` is, but {given}. Give one of them."
            )
        name, function = ("loss", loss) if forward is None else ("forward", forward)
        check_function(name, function)
        if loss is not None:
            check_mean_loss(name, loss)
        self.function: Any = function  # Any: either kind
        self.is_forward = forward is not None

    def compute(
        self, context: MicrobatchContext, keep_outputs: bool, *, trains: bool
    ) -> tuple[Tensor, Nested, Nested]:
        """Run one microbatch forward; where it ``trains``, its tensors must require no gradient.

        Returns:
            The loss; outputs and targets, where they are kept.
        """
        function, device = self.function, context.replica.device
        if isinstance(function, nn.Module):
            function = placed_on(function, device)
        rows = copy_rows(context.batch, device, may_need_grad=not trains)
        with context.rng:
            loss, outputs, targets = self._call(function, context.replica.module, rows)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            name, what = ("forward", "loss") if self.is_forward else ("loss", "tensor")
            is_tensor = isinstance(loss, Tensor)
            way_out = "Take its mean." if is_tensor else "Return the tensor, without `.item()`."
            way_out = "Return its `loss`." if hasattr(loss, "loss") else way_out
            raise ConfigError(
                f"`{name}` must return a {what} of one element, but returned {shown!r}. {way_out}"
            )
        if not keep_outputs:
            return loss, None, None
        return loss, _detached(outputs), _detached(targets)

    def predict(self, context: MicrobatchContext) -> Nested:
        """Return copies of the module's outputs for one microbatch."""
        rows = copy_rows(context.batch, context.replica.device)
        with context.rng:
            found = self._predict(context.replica.module, rows)
        return _detached(found, copies=True)

    # Any: the user's loss, unchecked.
    def _call(self, function: Any, module: nn.Module, batch: Nested) -> tuple[Any, Nested, Nested]:
        """Return the loss, the outputs, and the targets that metrics shall see."""
        if self.is_forward:
            result = function(module, batch)
            given = (result, None)
            if isinstance(result, tuple) and len(result) in (2, 3):
                given = result
            return (*given, batch[1] if is_pair(batch) else None)[:3]
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            of = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise ConfigError(
                f"A batch must be a pair (inputs, targets), but is a {type(batch).__name__}{of}. "
                "Give `forward=` to take batches of another form."
            )
        inputs, targets = batch
        is_one = isinstance(inputs, Tensor)
        outputs = module(inputs) if is_one else _call_module(module, inputs)
        return function(outputs, targets), outputs, targets

    def _predict(self, module: nn.Module, batch: Nested) -> Nested:
        if not self.is_forward:
            return _call_module(module, batch[0] if is_pair(batch) else batch)
        result = self.function(module, batch)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise ConfigError(
                "`forward` must return (loss, outputs) to predict, but returned "
                f"{type(result).__name__!r}. Return the outputs with the loss."
            )
        return result[1]


@dataclass(frozen=True)
class TrainTask(Task):
    """Run a microbatch forward and backward; picklable, for worker processes.

    Args:
        scales: Each microbatch's share in the whole batch's loss.
        keep_outputs: Whether metrics will want them.
    """

    objective: Objective
    scales: tuple[float, ...]
    keep_outputs: bool

    def __call__(self, context: MicrobatchContext) -> MicrobatchResult:
        loss, *kept = self.objective.compute(context, self.keep_outputs, trains=True)
        if not loss.requires_grad:
            raise ConfigError(
                "`loss` must depend on a parameter that requires a gradient, but does not. "
                "Unfreeze parameters, and compute the loss from the module's outputs."
            )
        scale = torch.full((), self.scales[context.index], dtype=loss.dtype, device=loss.device)
        loss = loss.reshape(()) if loss.dim() else loss
        kind = loss.device.type
        read = loss.item if kind == "cpu" else _read_later(loss.detach())
        # As in a plain loop: autocast would round what the model computes in float32.
        autocasts = torch.is_autocast_enabled(kind)
        with context.rng, torch.autocast(kind, enabled=False) if autocasts else _NOTHING:
            run_backward([loss], [scale])
        value = read()  # not before: an accelerator would have nothing to do meanwhile
        if not math.isfinite(value):
            empty = " A mean over no targets is nan, too: leave such data out, or weight it by 0."
            raise ConfigError(
                f"`loss` must be finite, but is {value!r} in microbatch {context.index}; "
                "the step was refused and nothing has changed. Lower the learning rate, clip "
                "gradients by `clip_norm`, or look at this microbatch's data."
                + (empty if math.isnan(value) else "")
            )
        return MicrobatchResult(value, *kept)


@dataclass(frozen=True)
class EvaluateTask(Task):
    """Run a microbatch forward only; otherwise as `TrainTask`."""

    objective: Objective
    keep_outputs: bool

    def __call__(self, context: MicrobatchContext) -> MicrobatchResult:
        loss, *kept = self.objective.compute(context, self.keep_outputs, trains=False)
        return MicrobatchResult(loss.item(), *kept)


@dataclass(frozen=True)
class PredictTask(Task):
    """Return the module's outputs for a microbatch; otherwise as `TrainTask`."""

    objective: Objective

    def __call__(self, context: MicrobatchContext) -> MicrobatchResult:
        return MicrobatchResult(0.0, self.objective.predict(context), None)


def is_pair(batch: Nested) -> bool:
    """Tell whether a batch is (inputs, targets)."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _call_module(module: nn.Module, inputs: Nested) -> Nested:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _read_later(number: Tensor) -> Callable[[], float]:
    """Return a function that waits for a number; an accelerator computes more until it is called.

    To wait here would let the accelerator run dry before the next operators are launched.
    """
    on_host = torch.empty((), dtype=number.dtype, pin_memory=True)
    on_host.copy_(number, non_blocking=True)
    arrived = torch.accelerator.current_stream(number.device).record_event()

    def read() -> float:
        arrived.synchronize()
        return on_host.item()

    return read


def _detached(outputs: Nested, *, copies: bool = False) -> Nested:
    leaves, spec = flatten(outputs)
    found = [each.detach() if isinstance(each, Tensor) else each for each in leaves]
    if copies:
        found = [each.clone() if isinstance(each, Tensor) else each for each in found]
    return unflatten(found, spec)

"""The computation of a microbatch: forward, loss, backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


class Objective:
    """The loss of a module on microbatches.

    Args:
        loss: (outputs, targets) -> mean loss; needed without ``forward``.
        forward: (module, microbatch) -> loss, (loss, outputs) or (loss, outputs, targets); takes
            the place of calling the module and the loss.
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
        self._loss = loss
        self._forward = forward

    @property
    def function(self) -> LossFn | ForwardFn:
        """The loss, or the user's own function that takes the batches."""
        function = self._loss if self._forward is None else self._forward
        assert function is not None
        return function

    @property
    def is_forward(self) -> bool:
        """Whether the user's own function takes the batches."""
        return self._forward is not None

    def compute(
        self,
        context: MicrobatchContext,
        keep_outputs: bool,
        *,
        trains: bool,
    ) -> tuple[Tensor, Callable[[], MicrobatchResult]]:
        """Run one microbatch forward; one that ``trains`` must bring no graph.

        Returns:
            The loss, and a function that waits for its number.
        """
        own, device = self._loss, context.replica.device
        if isinstance(own, nn.Module):
            own = placed_on(own, device)
        leaves = flatten(context.batch)[0] if trains else []
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise _has_graph()
        rows = copy_rows(context.batch, device)
        with context.rng:
            loss, outputs, targets = self._call(own, context.replica.module, rows)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            name, what = ("forward", "loss") if self.is_forward else ("loss", "tensor")
            way_out = "Return its `loss`." if hasattr(loss, "loss") else "Take its mean."
            raise ConfigError(
                f"`{name}` must return a {what} of one element, but returned {shown!r}. {way_out}"
            )
        kept = (_detached(outputs), _detached(targets)) if keep_outputs else (None, None)
        read = _read_later(loss.detach())
        return loss, lambda: MicrobatchResult(read(), *kept)

    def predict(self, context: MicrobatchContext) -> Nested:
        """Return the module's outputs for one microbatch, in memory of their own."""
        rows = copy_rows(context.batch, context.replica.device)
        with context.rng:
            found = self._predict(context.replica.module, rows)
        return _detached(found, copies=True)

    def _call(
        self, loss: LossFn | None, module: nn.Module, batch: Nested
    ) -> tuple[Any, Nested, Nested]:  # Any: the user's loss, unchecked
        """Return the loss, the outputs, and the targets that metrics shall see."""
        if self._forward is not None:
            result = self._forward(module, batch)
            given = (result, None)
            if isinstance(result, tuple) and len(result) in (2, 3):
                given = result
            return (*given, batch[1] if is_pair(batch) else None)[:3]
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ConfigError(
                f"A batch must be a pair (inputs, targets), but is {type(batch).__name__!r}. Give "
                "`forward=` to take batches of another form."
            )
        assert loss is not None
        inputs, targets = batch
        is_one = isinstance(inputs, Tensor)
        outputs = module(inputs) if is_one else _call_module(module, inputs)
        return loss(outputs, targets), outputs, targets

    def _predict(self, module: nn.Module, batch: Nested) -> Nested:
        if self._forward is None:
            return _call_module(module, batch[0] if is_pair(batch) else batch)
        result: Any = self._forward(module, batch)  # Any: whatever the user's function returns
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise ConfigError(
                "`forward` must return (loss, outputs) to predict, but returned "
                f"{type(result).__name__!r}. Return the outputs beside the loss."
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
        loss, result_of = self.objective.compute(context, self.keep_outputs, trains=True)
        if not loss.requires_grad:
            raise ConfigError(
                "`loss` must depend on a parameter that requires a gradient, but does not. "
                "Unfreeze parameters, and compute the loss from the module's outputs."
            )
        scale = torch.full((), self.scales[context.index], dtype=loss.dtype, device=loss.device)
        with context.rng:
            run_backward([loss.reshape(()) if loss.dim() else loss], [scale])
        result = result_of()  # not before: an accelerator would have nothing to do meanwhile
        if not math.isfinite(result.loss):
            empty = " A mean over no targets is nan, too: `weight=` of 0 leaves such data out."
            raise ConfigError(
                f"`loss` must be finite, but is {result.loss!r} in microbatch {context.index}; "
                "the step was refused and nothing has changed. Lower the learning rate, clip "
                "gradients by `clip_norm`, or look at this microbatch's data."
                + (empty if math.isnan(result.loss) else "")
            )
        return result


@dataclass(frozen=True)
class EvaluateTask(Task):
    """Run a microbatch forward only; otherwise as `TrainTask`."""

    objective: Objective
    keep_outputs: bool

    def __call__(self, context: MicrobatchContext) -> MicrobatchResult:
        return self.objective.compute(context, self.keep_outputs, trains=False)[1]()


@dataclass(frozen=True)
class PredictTask(Task):
    """Return the module's outputs for a microbatch; otherwise as `TrainTask`."""

    objective: Objective

    def __call__(self, context: MicrobatchContext) -> MicrobatchResult:
        return MicrobatchResult(0.0, self.objective.predict(context), None)


def is_pair(batch: Nested) -> bool:
    """Tell whether a batch is (inputs, targets)."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _has_graph() -> ConfigError:
    return ConfigError(
        "A batch must hold no tensor that requires a gradient, but does. Detach it, or use "
        "`DataParallel` to train what stands before the module."
    )


def _call_module(module: nn.Module, inputs: Nested) -> Nested:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _read_later(number: Tensor) -> Callable[[], float]:
    """Return a function that waits for a number; an accelerator computes more until it is called.

    To wait here would let the accelerator run dry before the next operators are launched.
    """
    if number.device.type == "cpu":
        value = number.item()
        return lambda: value
    on_host = torch.empty((), dtype=number.dtype, pin_memory=True)
    on_host.copy_(number.reshape(()), non_blocking=True)
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

"""What a replica does with one microbatch: forward, loss, backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.plan import check_function, flatten, unflatten
from phalanx.replicas import Turn
from phalanx.train.sharding import Shard
from phalanx.types import ForwardFn, LossFn, Nested

__all__ = ["Outcome", "Work", "enter_training"]


@dataclass(frozen=True)
class Outcome:
    """What one microbatch gave.

    Attributes:
        loss: Its mean loss.
        outputs: The module's outputs, detached; None where nobody asked.
        targets: The microbatch's targets, on the same device.
    """

    loss: float
    outputs: Nested
    targets: Nested


def enter_training(module: nn.Module) -> None:
    """Put a model into training mode, if any part of it is not."""
    if not all(each.training for each in module.modules()):
        module.train()


class Work:
    """Compute losses and gradients of microbatches.

    Args:
        loss: (outputs, targets) -> mean loss; needed without ``forward``.
        forward: (module, microbatch) -> loss, or (loss, outputs); takes the place of calling the
            module and the loss.
    """

    def __init__(self, loss: LossFn | None, forward: ForwardFn | None) -> None:
        if (loss is None) == (forward is None):
            given = "none is given" if loss is None else "both are given"
            raise ConfigError(
                f"`loss` must be given unless `forward` is, but {given}. Give one of them."
            )
        check_function("loss" if forward is None else "forward", forward if loss is None else loss)
        self._loss = loss
        self._forward = forward

    def training(self, scales: Sequence[float], keep_outputs: bool) -> Callable[[Turn], Outcome]:
        """Return what runs a microbatch forward and backward.

        Args:
            scales: Each microbatch's share in the whole batch's loss.
            keep_outputs: Whether metrics will want them.
        """
        return _Training(self, tuple(scales), keep_outputs)

    def evaluation(self, keep_outputs: bool) -> Callable[[Turn], Outcome]:
        """Return what runs a microbatch forward only."""
        return _Evaluation(self, keep_outputs)

    def evaluate(
        self, turn: Turn, keep_outputs: bool, *, trains: bool = False
    ) -> tuple[Tensor, Outcome]:
        """Run one microbatch forward; one that ``trains`` must bring no graph."""
        rows = turn.batch.read() if isinstance(turn.batch, Shard) else turn.batch
        batch = _to_device(rows, turn.replica.device, trains)
        with turn.drawing():
            loss, outputs = self._call(turn.replica.module, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"`loss` must return a tensor of one element, but returned {shown!r}. Take its "
                "mean."
            )
        kept = _detached(outputs) if keep_outputs else None
        targets = batch[1] if keep_outputs and _is_pair(batch) else None
        return loss, Outcome(loss.item(), kept, targets)

    def _call(
        self, module: nn.Module, batch: Nested
    ) -> tuple[Any, Nested]:  # Any: the user's loss, unchecked
        if self._forward is not None:
            result = self._forward(module, batch)
            return result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not _is_pair(batch):
            raise ConfigError(
                f"A batch must be a pair (inputs, targets), but is {type(batch).__name__!r}. Give "
                "`forward=` to take batches of another form."
            )
        assert self._loss is not None
        inputs, targets = batch
        if isinstance(inputs, dict):
            outputs = module(**inputs)
        elif isinstance(inputs, (tuple, list)):
            outputs = module(*inputs)
        else:
            outputs = module(inputs)
        return self._loss(outputs, targets), outputs


@dataclass(frozen=True)
class _Training:
    """Forward and backward; an object, so that it can be sent to other processes."""

    work: Work
    scales: tuple[float, ...]
    keep_outputs: bool

    def __call__(self, turn: Turn) -> Outcome:
        loss, outcome = self.work.evaluate(turn, self.keep_outputs, trains=True)
        if not math.isfinite(outcome.loss):
            raise ConfigError(
                f"`loss` must be finite, but is {outcome.loss!r} in microbatch {turn.index}; "
                "the step was refused and nothing has changed. Lower the learning rate, clip "
                "gradients by `clip_norm`, or look at this microbatch's data."
            )
        if not loss.requires_grad:
            raise ConfigError(
                "`loss` must depend on a parameter that requires a gradient, but does not. "
                "Unfreeze parameters, and compute the loss from the module's outputs."
            )
        loss.reshape(()).backward(
            torch.as_tensor(self.scales[turn.index], dtype=loss.dtype, device=loss.device)
        )
        return outcome


@dataclass(frozen=True)
class _Evaluation:
    """Forward only."""

    work: Work
    keep_outputs: bool

    def __call__(self, turn: Turn) -> Outcome:
        return self.work.evaluate(turn, self.keep_outputs)[1]


def _is_pair(batch: Nested) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _to_device(batch: Nested, device: torch.device, trains: bool) -> Nested:
    """Move a microbatch; its slices get version counters of their own (hence `data`)."""
    leaves, spec = flatten(batch)
    if trains and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        raise ConfigError(
            "A batch must hold no tensor that requires a gradient, but does. Detach it, or use "
            "`DataParallel` to train what stands before the module."
        )
    return unflatten(
        [
            leaf.data.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ],
        spec,
    )


def _detached(outputs: Nested) -> Nested:
    leaves, spec = flatten(outputs)
    return unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

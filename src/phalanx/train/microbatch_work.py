"""What a replica does with one microbatch: forward, loss, backward."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.execution import MicrobatchContext, MicrobatchResult
from phalanx.plan import check_function, flatten, unflatten
from phalanx.replicas import Inputs, MicrobatchRng, run_backward
from phalanx.train.foreign_leaves import find_foreign_leaves, refuse_foreign_leaves
from phalanx.train.loss_buffers import LossBuffers
from phalanx.train.sharding import Shard
from phalanx.types import ForwardFn, LossFn, Nested

__all__ = ["Work", "enter_training", "leave_evaluation"]


def enter_training(module: nn.Module) -> None:
    """Put a model into training mode, but leave parts in eval mode that are so among others.

    Such parts are frozen, as batch norm often is; a model that is in eval mode as a whole has been
    evaluated. A model may freeze its parts in `train()`, too.
    """
    modes = [(each, each.training) for each in module.modules()]
    module.train()
    if any(training for _, training in modes):
        for each, training in modes:
            each.training = training and each.training


def leave_evaluation(module: nn.Module) -> None:
    """Put a model that is in eval mode as a whole into training mode."""
    if not any(each.training for each in module.modules()):
        module.train()


class Work:
    """Compute losses and gradients of microbatches.

    Args:
        loss: (outputs, targets) -> mean loss; needed without ``forward``.
        forward: (module, microbatch) -> loss, (loss, outputs) or (loss, outputs, targets); takes
            the place of calling the module and the loss.
        trained: The module that replicas are made of.
    """

    def __init__(self, loss: LossFn | None, forward: ForwardFn | None, trained: nn.Module) -> None:
        if (loss is None) == (forward is None):
            given = "none is given" if loss is None else "both are given"
            raise ConfigError(
                f"`loss` must be given unless `forward` is, but {given}. Give one of them."
            )
        check_function("loss" if forward is None else "forward", forward if loss is None else loss)
        self._loss = loss
        self._forward = forward
        self._loss_buffers = LossBuffers(
            "forward" if loss is None else "loss", forward if loss is None else loss, trained
        )
        self._leaves_checked = False
        self._inputs = Inputs()

    def training(
        self, scales: tuple[float, ...], keep_outputs: bool
    ) -> Callable[[MicrobatchContext], MicrobatchResult]:
        """Return what runs a microbatch forward and backward.

        Args:
            scales: Each microbatch's share in the whole batch's loss.
            keep_outputs: Whether metrics will want them.
        """
        return _Training(self, scales, keep_outputs)

    def evaluation(self, keep_outputs: bool) -> Callable[[MicrobatchContext], MicrobatchResult]:
        """Return what runs a microbatch forward only."""
        return _Evaluation(self, keep_outputs)

    def evaluate(
        self,
        turn: MicrobatchContext,
        rng: MicrobatchRng,
        keep_outputs: bool,
        *,
        trains: bool = False,
    ) -> tuple[Tensor, MicrobatchResult]:
        """Run one microbatch forward; one that ``trains`` must bring no graph."""
        rows = turn.batch.read() if isinstance(turn.batch, Shard) else turn.batch
        batch, lent = self._inputs.lend(rows, turn.replica.device, trains=trains)
        before = self._loss_buffers.note()
        with rng:
            loss, outputs, targets = self._call(turn.replica.module, batch)
        self._loss_buffers.check(before)
        self._inputs.note(lent)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"`loss` must return a tensor of one element, but returned {shown!r}. Take its "
                "mean."
            )
        kept = _detached(outputs) if keep_outputs else None
        own = _detached(targets) if keep_outputs else None
        return loss, MicrobatchResult(loss.item(), kept, own)

    def foreign_leaves(self, turn: MicrobatchContext, loss: Tensor) -> list[weakref.ref[Tensor]]:
        """Return what else a loss may train in a worker process; the first one tells."""
        if not turn.in_worker or self._leaves_checked:
            return []
        return find_foreign_leaves(loss, turn.replica.leaves() | self._loss_buffers.leaves())

    def check_leaves(self, found: Sequence[weakref.ref[Tensor]]) -> None:
        """Refuse those that are still there when the microbatch is done."""
        refuse_foreign_leaves(found)
        self._leaves_checked = True

    def _call(
        self, module: nn.Module, batch: Nested
    ) -> tuple[Any, Nested, Nested]:  # Any: the user's loss, unchecked
        """Return the loss, the outputs, and the targets that metrics shall see."""
        if self._forward is not None:
            result = self._forward(module, batch)
            given = (result, None)
            if isinstance(result, tuple) and len(result) in (2, 3):
                given = result
            return (*given, batch[1] if _is_pair(batch) else None)[:3]
        if not _is_pair(batch):
            raise ConfigError(
                f"A batch must be a pair (inputs, targets), but is {type(batch).__name__!r}. Give "
                "`forward=` to take batches of another form."
            )
        assert self._loss is not None
        inputs, targets = batch
        if isinstance(inputs, Mapping):
            outputs = module(**inputs)
        elif isinstance(inputs, (tuple, list)):
            outputs = module(*inputs)
        else:
            outputs = module(inputs)
        return self._loss(outputs, targets), outputs, targets


@dataclass(frozen=True)
class _Training:
    """Forward and backward; an object, so that it can be sent to other processes."""

    work: Work
    scales: tuple[float, ...]
    keep_outputs: bool

    def __call__(self, turn: MicrobatchContext) -> MicrobatchResult:
        outcome, foreign = self._train(turn)
        self.work.check_leaves(foreign)
        return outcome

    def _train(self, turn: MicrobatchContext) -> tuple[MicrobatchResult, list[weakref.ref[Tensor]]]:
        rng = turn.drawing()
        loss, outcome = self.work.evaluate(turn, rng, self.keep_outputs, trains=True)
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
        foreign = self.work.foreign_leaves(turn, loss)
        scale = torch.as_tensor(self.scales[turn.index], dtype=loss.dtype, device=loss.device)
        loss = loss.reshape(())
        with rng:
            run_backward([loss], [scale])
        return outcome, foreign


@dataclass(frozen=True)
class _Evaluation:
    """Forward only."""

    work: Work
    keep_outputs: bool

    def __call__(self, turn: MicrobatchContext) -> MicrobatchResult:
        return self.work.evaluate(turn, turn.drawing(), self.keep_outputs)[1]


def _is_pair(batch: Nested) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _detached(outputs: Nested) -> Nested:
    leaves, spec = flatten(outputs)
    return unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

"""One optimizer update over an executor: cut, compute, sum, clip, step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.clock import now_s
from phalanx.codecs import Feedback
from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.execution import (
    Executor,
    ExecutorMaker,
    Gradients,
    MicrobatchContext,
    MicrobatchResult,
    RunResult,
    Span,
    Stepper,
    WholeStepper,
    norm_of_gradients,
)
from phalanx.memory import FlatParameters
from phalanx.replicas import (
    Statistic,
    check_statistics,
    refuse_lazy,
    refuse_scripts,
    sum_statistics,
    write_statistics,
)
from phalanx.train.cutting import Cut, Cutter
from phalanx.train.events import StepDone
from phalanx.train.formation import Formation
from phalanx.train.position import Loss, Position, RunHistory
from phalanx.train.untrained import Untrained
from phalanx.types import Nested

__all__ = ["StepEngine", "Updated", "check_members", "compute", "counted", "loss_of"]


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What one update did; see `StepDone` for the fields of the same name."""

    loss: Loss
    shares: tuple[int, ...]
    busy_s: tuple[float, ...]
    spans: tuple[Span, ...]
    work_s: tuple[float, ...]
    slice_s: tuple[float, ...]
    """Seconds that each slice took before merging, where there is one slice per replica."""

    def told(self, before: Position, seconds: float) -> StepDone:
        """Return what callbacks are told of it."""
        return StepDone(
            step=before.steps + 1,
            epoch=before.epochs,
            batch=before.batch,
            loss=self.loss.value,
            samples=self.loss.samples,
            seconds=seconds,
            shares=self.shares,
            busy_s=self.busy_s,
            spans=self.spans,
            work_s=self.work_s,
        )


class StepEngine:
    """Flat memory, an executor and a stepper around one module and its optimizer.

    Opening it moves the optimizer's parameters into flat buffers; :meth:`close` gives them memory
    of their own again.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        formation: Formation,
        *,
        cutter: Cutter,
        workloads: Sequence[float] | None,
        clip_norm: float | None,
        feedback: Feedback | None,
        history: RunHistory,
        untrained: Untrained,
        open_executor: ExecutorMaker,
    ) -> None:
        self._history = history
        self._untrained = untrained
        self._feedback = feedback
        self._module = module
        self._optimizer = optimizer
        self._cutter = cutter
        self._clip_norm = clip_norm
        self._torn = False  # whether a step failed when the optimizer had begun
        self._num_steps = 0
        refuse_lazy(module)
        refuse_scripts(module)
        check_members(module, optimizer)
        self._groups = _trainable(optimizer)
        self._flat = FlatParameters(self._groups, allocate=open_executor.allocate)
        self._homes = [  # of buffers; where there are others, this is opened anew
            (f"{path}.{key}" if path else key, owner, key)
            for path, owner in module.named_modules(remove_duplicate=False)
            for key in owner._buffers
        ]
        with ExitStack() as failed:
            failed.callback(self._flat.release)
            self.executor = open_executor(
                formation.devices, workloads=workloads, intra_op=formation.intra_op
            )
            failed.callback(self.executor.close)
            self._open_steps()
            failed.pop_all()
        self._show_gradients()

    def _open_steps(self) -> None:
        """Say how gradients are summed and the optimizer steps."""
        self._parts = self._flat.parts(len(self.executor))
        self._sums = self.executor.open_reduction(self._flat)
        # One replica with one slice, and nothing to clip: there is nothing to add or to share.
        self._alone = (
            self.executor.keeps_gradients
            and len(self.executor) == 1
            and self._cutter.microbatches is None
            and self._clip_norm is None
        )
        self._stepper = self._open_stepper()

    def close(self) -> None:
        """Dismiss the executor, and give the parameters memory of their own."""
        self.executor.close()
        self._stepper.dissolve()
        self._flat.release()
        self._untrained.tell()

    def complete_state(self, *, changed: bool = False) -> None:
        """Bring the optimizer's whole state into this process, where ranks have a part each.

        Args:
            changed: What is trained is not what it was; all ranks must find that.

        Raises:
            StateError: There is no whole state: a step failed half way.
            PeerError: Ranks' weights differ.
        """
        if changed:
            self.executor.agree_to_open_anew()
        self._check_whole()
        self._stepper.complete()
        self.executor.check_alike()

    def fits(self) -> bool:
        """Tell whether module and memory are still as they were when this was opened."""
        now, then = _trainable(self._optimizer), self._groups
        return (
            [[id(p) for p in group] for group in now] == [[id(p) for p in group] for group in then]
            and self._stepper.fits()
            and self._flat.intact()
            and self.executor.matches_source()
        )

    def reload_state(self) -> None:
        """Take over a state that was loaded into the optimizer, and into the module."""
        self._torn = False
        self._stepper = self._open_stepper()
        self.executor.outdate()

    def _open_stepper(self) -> Stepper:
        if self._alone or self._history.plain_steps:
            return WholeStepper(self._optimizer, self._flat)
        stepper = self.executor.open_optimizer(self._optimizer, self._flat)
        self._history.plain_steps = stepper.whole
        return stepper

    def _step_plainly(self) -> None:
        """Leave all further steps to the user's optimizer as it is."""
        if not self._stepper.whole:
            self._stepper.complete()
            self._stepper.dissolve()
            self._stepper = WholeStepper(self._optimizer, self._flat)
            self._history.plain_steps = True

    def cut(self, batch: Nested, workloads: Sequence[float]) -> Cut:
        """Cut ``batch`` as this formation computes it, for replicas with ``workloads``.

        Raises:
            ConfigError: It cannot be cut.
            StateError: As :meth:`complete_state`: nothing may be added to it.
        """
        self._check_whole()
        return self._cutter.cut(batch, self.executor.all_workloads(workloads))

    def _check_whole(self) -> None:
        if self._torn:
            raise StateError(
                "The model must be whole to be trained or saved, but the last step failed when its "
                "optimizer had begun: some weights are new and some are not. Put them back by "
                "`resume()`, or begin with another trainer."
            )

    def compute(
        self,
        pieces: Cut,
        run: Callable[[MicrobatchContext], MicrobatchResult],
        seed: tuple[int, ...],
    ) -> RunResult:
        """Run all microbatches; nothing that the caller can see changes."""
        return compute(self.executor, pieces, run, seed, None)

    def update(
        self,
        pieces: Cut,
        run: Callable[[MicrobatchContext], MicrobatchResult],
        seed: tuple[int, ...],
        *,
        count: Callable[[RunResult], None] | None,
        commit: Callable[[Loss], None],
    ) -> Updated:
        """Do one optimizer update.

        Everything that can refuse comes before the first write. From there on all is done in the
        replicas' threads, where no Ctrl-C arrives: weights, statistics and ``commit`` go together.

        Args:
            count: Called when all microbatches have succeeded.
            commit: Called when the weights are new, by the last thread.
        """
        try:
            return self._update(pieces, run, seed, count, commit)
        finally:
            if self._feedback is not None:  # what was committed is pending no longer
                self._feedback.rollback()

    def _update(
        self,
        pieces: Cut,
        run: Callable[[MicrobatchContext], MicrobatchResult],
        seed: tuple[int, ...],
        count: Callable[[RunResult], None] | None,
        commit: Callable[[Loss], None],
    ) -> Updated:
        if self._alone:  # as `zero_grad()` does: the new gradients find the old ones' memory
            for parameter in self._flat.parameters:
                parameter.grad = None
        plain = not self._stepper.is_untouched()
        self.executor.steps_whole = plain or self._stepper.whole
        report = compute(self.executor, pieces, run, seed, self._feedback)
        statistics = sum_statistics(operand.statistics for operand in report.operands)
        buffers = self._buffers() if statistics else {}
        check_statistics(buffers, statistics)
        if count is not None:
            count(report)
        missing = self._sums.take(report)
        if missing or plain:
            self._step_plainly()
        summed = self._clip_norm is not None or self._stepper.whole
        if summed and not self._alone:
            self.executor.each(self._sums.sum_part)
            self._sums.share()
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self._stepper.prepare(missing, self._sums.operands[0] if self._alone else None)
        spans: list[Span] = []
        lock = threading.Lock()
        loss = Loss(loss_of(pieces, report), pieces.weight, sum(pieces.sizes))

        def finish(part: int) -> None:
            start_s = now_s()
            if not summed:
                self._sums.sum_part(part)
            self._torn = True  # here, where no Ctrl-C comes between this and the step
            self._stepper.step_part(part)
            with lock:
                spans.append(Span(replica=part, microbatch=None, start_s=start_s, stop_s=now_s()))
                if len(spans) < len(self.executor):
                    return
            self._finish(buffers, statistics)
            commit(loss)

        self.executor.each(finish, whole=True)
        self._sums.forget()
        self._untrained.note([self._flat.parameters[index] for index in missing])
        self._num_steps += 1
        if self._num_steps.bit_count() == 1:  # 1, 2, 4, 8, …: it costs a pass over all weights
            self.executor.check_alike()
        return self._describe(pieces, report, spans, loss)

    def _finish(self, buffers: dict[str, Tensor], statistics: dict[str, Statistic]) -> None:
        self._stepper.finish()
        if self._feedback is not None:
            self._feedback.commit()
        write_statistics(buffers, statistics)
        self._history.buffers.update(statistics)
        self._torn = False
        self.executor.outdate()

    def _clip(self, clip_norm: float) -> None:
        """Scale the gradients so that their norm is at most ``clip_norm``."""
        count = len(self.executor)
        norm = norm_of_gradients(
            self._flat, lambda work: self.executor.each(lambda thread: work(thread, count))
        )
        if not torch.isfinite(norm):
            raise ConfigError(
                f"The gradients' norm must be finite to be clipped, but is {norm.item()!r}; the "
                "step was refused and nothing has changed. Lower the learning rate, or look at "
                "this batch's data."
            )
        coefficient = min(1.0, clip_norm / (norm.item() + 1e-6))

        def scale(part: int) -> None:
            for each in self._parts[part].ranges:
                each.gradients.mul_(coefficient)

        self.executor.each(scale)

    def _buffers(self) -> dict[str, Tensor]:
        found = ((name, owner._buffers[key]) for name, owner, key in self._homes)
        return {name: buffer for name, buffer in found if buffer is not None}

    def _show_gradients(self) -> None:
        for index, parameter in enumerate(self._flat.parameters):
            parameter.grad = self._flat.gradient(index)

    def _describe(
        self, pieces: Cut, report: RunResult, spans: Sequence[Span], loss: Loss
    ) -> Updated:
        count = len(self.executor)
        shares, busy_s, work_s = [0] * count, [0.0] * count, [0.0] * count
        for place, replica in enumerate(report.replica_of):
            if replica >= 0:
                shares[replica] += pieces.sizes[place]
                work_s[replica] += report.seconds[place]
        everything = [*report.spans, *sorted(spans, key=lambda span: span.replica)]
        for span in everything:
            busy_s[span.replica] += span.stop_s - span.start_s
        return Updated(
            loss=loss,
            shares=tuple(shares),
            busy_s=tuple(busy_s),
            spans=tuple(everything),
            slice_s=tuple(report.seconds),
            work_s=tuple(work_s),
        )


def check_members(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer over parameters that the module has not, and hooks on gradients."""
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ConfigError(
                    f"`optimizer` must hold parameters of `module` only, but group {index} holds "
                    f"one of shape {tuple(parameter.shape)} that is not. Make it part of the "
                    "module (a loss with parameters too)."
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"Parameter `{own[id(parameter)]}` must have no gradient hooks in a `Trainer`, "
                    "but has; `flat_parameters()` gives it some, too. Remove them, train a deep "
                    "copy (it has none), or use `DataParallel`, which runs them."
                )


def _trainable(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """Return the optimizer's parameters that are not frozen, by group."""
    return [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]


def compute(
    executor: Executor,
    pieces: Cut,
    run: Callable[[MicrobatchContext], MicrobatchResult],
    seed: tuple[int, ...],
    feedback: Feedback | None,
) -> RunResult:
    """Run all microbatches of ``pieces`` on ``executor``."""
    shapes = [] if feedback is None else [each.shape for each in executor.parameters]

    def compressed(index: int, gradients: Gradients | None) -> Gradients | None:
        if feedback is None or gradients is None:
            return gradients
        return feedback.compress(index, gradients, shapes)

    return executor.run(
        pieces.microbatches,
        run,
        weights=pieces.weights,
        seed=seed,
        pinned=pieces.pinned,
        gradient_hook=None if feedback is None else compressed,
    )


def loss_of(pieces: Cut, report: RunResult) -> float:
    """Return the loss of the whole batch: the microbatches' mean losses, weighted, in order."""
    return math.fsum(
        scale * outcome.loss
        for scale, outcome in zip(pieces.scales, report.results, strict=True)
        if outcome is not None
    )


# Any: outputs and targets are whatever the user's code makes.
def counted(report: RunResult) -> list[tuple[Any, Any, None] | None]:
    """Return what metrics count of each microbatch."""
    return [
        None if outcome is None else (outcome.outputs, outcome.targets, None)
        for outcome in report.results
    ]

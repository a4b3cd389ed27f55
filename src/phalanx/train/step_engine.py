"""One optimizer update over an executor: split, compute, sum, clip, step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Real

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.callbacks import StepDone
from phalanx.clock import now_s
from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.execution import (
    Executor,
    ExecutorMaker,
    RunResult,
    Span,
    Task,
)
from phalanx.metrics import Joining
from phalanx.replicas import (
    check_statistics,
    refuse_lazy,
    refuse_scripts,
    sum_statistics,
    write_statistics,
)
from phalanx.train.formation import Formation
from phalanx.train.microbatches import Microbatches, Splitter
from phalanx.train.objective import Objective
from phalanx.train.position import Loss, Position, RunHistory
from phalanx.train.untrained import Untrained
from phalanx.types import Nested

__all__ = ["EngineSpec", "StepEngine", "check_members", "loss_of", "outputs_of", "run_task"]

_LIGHT_BYTES = 64 << 10


@dataclass(kw_only=True)
class EngineSpec:
    """What all engines of a trainer have in common, whatever its formation.

    Attributes:
        splitter: It cuts batches into microbatches.
        objective: It computes the loss of one.
        workloads: The replicas' relative shares, where they are fixed.
        clip_norm: Largest norm of the gradients.
        new_maker: Returns what one executor is opened by.
        history: What the run has met so far.
        untrained: Which parameters never got a gradient.
    """

    module: nn.Module
    optimizer: Optimizer
    splitter: Splitter
    objective: Objective
    workloads: Sequence[float] | None
    clip_norm: float | None
    new_maker: Callable[[], ExecutorMaker]
    history: RunHistory
    untrained: Untrained


class StepEngine:
    """An executor around one module, and the module's optimizer in shards."""

    def __init__(self, spec: EngineSpec, formation: Formation) -> None:
        self._spec = spec
        self._torn = False  # whether a step failed when the optimizer had begun
        refuse_lazy(spec.module)
        refuse_scripts(spec.module)
        check_members(spec.module, spec.optimizer)
        maker = spec.new_maker()
        self._trained_ids = _trained_ids(spec.optimizer)
        self._buffer_homes = [  # where there are others, an engine is opened anew
            (f"{path}.{key}" if path else key, owner, key)
            for path, owner in spec.module.named_modules(remove_duplicate=False)
            for key in owner._buffers
        ]
        with ExitStack() as failed:
            self.executor = maker(
                formation.devices, workloads=spec.workloads, intra_op=formation.intra_op
            )
            failed.callback(self.executor.close)
            self.executor.optimizer = spec.optimizer
            self._open_shards()
            self._is_light = _is_light(self._shards.trained)
            failed.pop_all()

    def _open_shards(self) -> None:
        self._generation = self.executor.generation
        self._shards = self.executor.open_shards(self._spec.optimizer)

    def close(self) -> None:
        """Dismiss the executor."""
        self.executor.close()
        self._spec.untrained.tell()

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
        self._check_not_torn()
        self._shards.complete()
        self.executor.check_alike()

    def matches_spec(self) -> bool:
        """Tell whether module and optimizer still are what this was opened for."""
        return (
            _trained_ids(self._spec.optimizer) == self._trained_ids
            and self.executor.matches_source()  # and all parameters lie where they lay
        )

    def reload_state(self) -> None:
        """Take over a state that was loaded into the optimizer, and into the module."""
        self._torn = False
        self._open_shards()
        self.executor.outdate()

    def split(
        self, batch: Nested, workloads: Sequence[float], *, weighs: bool = True
    ) -> Microbatches:
        """Split ``batch`` as this formation computes it, as `Splitter.split`.

        Raises:
            ConfigError: It cannot be split.
            StateError: As :meth:`complete_state`: nothing may be added to it.
        """
        self._check_not_torn()
        return self._spec.splitter.split(
            batch, self.executor.all_workloads(workloads), weighs=weighs
        )

    def _check_not_torn(self) -> None:
        if self._torn:
            raise StateError(
                "The model must be whole to be trained or saved, but the last step failed when its "
                "optimizer had begun: some weights are new and some are not. Put them back by "
                "`resume()`, or begin with another trainer."
            )

    def update(
        self,
        microbatches: Microbatches,
        task: Task,
        seed: tuple[int, ...],
        *,
        before: Position,
        start_s: float,
        count: Callable[[RunResult], None] | None,
        commit: Callable[[Loss], None],
    ) -> StepDone:
        """Do one optimizer update.

        Everything that can refuse comes before the first write. From there on no Ctrl-C arrives, in
        the replicas' threads or while signals are held: weights, statistics and ``commit`` go
        together.

        Args:
            before: Where the run stands.
            start_s: When the batch was at hand.
            count: Called when all microbatches have succeeded.
            commit: Called when the weights are new, by the last thread.
        """
        if self._generation != self.executor.generation:
            self._open_shards()
        result = run_task(self.executor, microbatches, task, seed)
        statistics = sum_statistics([operand.statistics for operand in result.operands])
        buffers = self._buffers() if statistics else {}
        check_statistics(buffers, statistics)
        if count is not None:
            count(result)
        missing = self._shards.take(result)
        norm, scale = None, 1.0
        added = self._spec.clip_norm is not None or self._shards.adds_first
        if added:
            self.executor.each(self._shards.add, light=self._is_light)
            self._shards.share()
        if self._spec.clip_norm is not None:
            norm = self._norm()
            scale = min(1.0, self._spec.clip_norm / (norm + 1e-6))
        rates = _learning_rates(self._spec.optimizer)  # now: the commit steps the scheduler
        loss = Loss(loss_of(microbatches, result), microbatches.weight, sum(microbatches.sizes))

        def finish() -> None:
            self._shards.finish()
            write_statistics(buffers, statistics)
            self._spec.history.buffers.update(statistics)
            self._torn = False
            self.executor.outdate()
            self.executor.mark_done()
            commit(loss)

        spans = self._step(finish, added=added, scale=scale)
        self._spec.untrained.note(missing)
        if (before.steps + 1).bit_count() == 1:  # 1, 2, 4, 8, …: it costs a pass over all weights
            self.executor.check_alike()
        rows, work_s = self._work_of_replicas(microbatches.sizes, result)
        spans = [*result.spans, *spans]
        return StepDone(
            step=before.steps + 1,
            epoch=before.epochs + 1,
            batch=before.batch + 1,
            loss=loss.value,
            samples=loss.samples,
            seconds=now_s() - start_s,
            shares=tuple(rows),
            busy_s=_busy_s(spans, len(rows)),
            spans=tuple(spans),
            work_s=tuple(work_s),
            grad_norm=norm,
            learning_rates=rates,
        )

    def _step(self, finish: Callable[[], None], *, added: bool, scale: float) -> list[Span]:
        """Let each replica's thread step its shard; the last one calls ``finish``.

        Args:
            added: All gradients are added; else each thread adds those of its shard first.
            scale: What they are multiplied by.
        """
        spans: list[Span] = []
        lock = threading.Lock()

        def step(shard: int) -> None:
            start_s = now_s()
            if not added:
                self._shards.add(shard)
            self._torn = True  # here, where no Ctrl-C comes between this and the step
            self._shards.step(shard, scale)
            with lock:
                spans.append(Span(replica=shard, microbatch=None, start_s=start_s, stop_s=now_s()))
                if len(spans) < len(self.executor):
                    return
            finish()

        self.executor.each(step, uninterrupted=True, light=self._is_light)
        return sorted(spans, key=lambda span: span.replica)

    def _norm(self) -> float:
        """Return the norm of all gradients together."""
        squares = self.executor.each(self._shards.squares, light=self._is_light)
        norm = math.sqrt(self._shards.total([each for shard in squares for each in shard]))
        if not math.isfinite(norm):
            raise ConfigError(
                f"The gradients' norm must be finite to be clipped, but is {norm!r}; the step was "
                "refused and nothing has changed. Lower the learning rate, or look at this "
                "batch's data."
            )
        return norm

    def _buffers(self) -> dict[str, Tensor]:
        found = ((name, owner._buffers[key]) for name, owner, key in self._buffer_homes)
        return {name: buffer for name, buffer in found if buffer is not None}

    def _work_of_replicas(
        self, sizes: Sequence[int], result: RunResult
    ) -> tuple[list[int], list[float]]:
        """Return the rows that each replica has computed, and the seconds that it took."""
        rows, seconds = [0] * len(self.executor), [0.0] * len(self.executor)
        for index, replica in enumerate(result.replica_of):
            if replica >= 0:
                rows[replica] += sizes[index]
                seconds[replica] += result.seconds[index]
        return rows, seconds


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


def _is_light(parameters: Sequence[Tensor]) -> bool:
    """Tell whether summing and stepping take less than the 0.1 ms of waking threads for it."""
    on_cpu = all(each.device.type == "cpu" for each in parameters)
    return on_cpu and sum(each.nbytes for each in parameters) <= _LIGHT_BYTES


def _busy_s(spans: Sequence[Span], num_replicas: int) -> tuple[float, ...]:
    busy_s = [0.0] * num_replicas
    for span in spans:
        busy_s[span.replica] += span.stop_s - span.start_s
    return tuple(busy_s)


def _learning_rates(optimizer: Optimizer) -> tuple[float, ...]:
    """Return each group's; nan where an optimizer of the user's own has none, or no number."""
    return tuple([_number(group.get("lr")) for group in optimizer.param_groups])


def _number(rate: object) -> float:
    if isinstance(rate, Tensor):
        return rate.item() if rate.numel() == 1 and not rate.is_complex() else math.nan
    return float(rate) if isinstance(rate, Real) else math.nan


def _trained_ids(optimizer: Optimizer) -> list[list[int]]:
    """Return the ids of the optimizer's parameters that are not frozen, by group."""
    return [[id(p) for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]


def run_task(
    executor: Executor,
    microbatches: Microbatches,
    task: Task,
    seed: tuple[int, ...],
) -> RunResult:
    """Run ``task`` on all microbatches; nothing that the caller can see changes."""
    return executor.run(
        task,
        microbatches.pieces,
        weights=microbatches.weights,
        seed=seed,
        owners=microbatches.owners,
    )


def loss_of(microbatches: Microbatches, result: RunResult) -> float:
    """Return the loss of the whole batch: the microbatches' mean losses, weighted, in order."""
    return math.fsum(
        [
            scale * each.loss
            for scale, each in zip(microbatches.scales, result.results, strict=True)
            if each is not None
        ]
    )


def outputs_of(
    microbatches: Microbatches, result: RunResult, joining: Joining
) -> tuple[Nested, Nested, int]:
    """Return the outputs and targets of the whole batch, and its rows.

    Microbatches that were left out, because they weigh nothing, are in none of them.
    """
    columns = (result.results, microbatches.sizes, microbatches.weights)
    kept = [each for each in zip(*columns, strict=True) if each[0] is not None]
    found, sizes, weights = zip(*kept, strict=True)
    outputs = joining.outputs([each.outputs for each in found], sizes, weights)
    targets = joining.targets([each.targets for each in found], sizes, weights)
    return outputs, targets, sum(sizes)

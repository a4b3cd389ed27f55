"""One optimizer update, from a batch to new weights: the algorithm of this package.

    batch ─ split ─► pieces ─ replicas ─► losses, and partial sums of gradients and buffers
                                                    │
    new weights ◄─ optimizer's step, in shards ◄─ last addition, in shards ─ clip

Read :meth:`StepEngine.update` first; everything else in `train/` and `execution/` serves it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Real
from operator import attrgetter

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.callbacks import StepDone
from phalanx.clock import now_s
from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.execution import Executor, RunResult, Span, Task
from phalanx.memory import dense_strides
from phalanx.metrics import Joining, Metrics
from phalanx.replicas import (
    Statistic,
    check_statistics,
    refuse_lazy,
    refuse_scripts,
    sum_statistics,
    write_statistics,
)
from phalanx.train.formation import Formation
from phalanx.train.microbatches import Microbatches, Splitter
from phalanx.train.objective import Objective, TrainTask
from phalanx.train.position import Loss, Position
from phalanx.types import Nested

__all__ = ["EngineSpec", "StepEngine", "check_members", "loss_of", "outputs_of"]


@dataclass(kw_only=True)
class EngineSpec:
    """The parts that all engines of a trainer have in common, on any number of replicas.

    Attributes:
        splitter: It cuts batches into microbatches.
        objective: It computes the loss of one.
        seed: Where all random numbers start.
        workloads: The replicas' relative shares, where they are fixed.
        clip_norm: Largest norm of the gradients.
        open_executor: Called with devices, `workloads` and `intra_op`.
        written: The names of the buffers that training has written.
    """

    module: nn.Module
    optimizer: Optimizer
    splitter: Splitter
    objective: Objective
    seed: int
    workloads: Sequence[float] | None
    clip_norm: float | None
    open_executor: Callable[..., Executor]
    written: set[str]


class StepEngine:
    """An executor around one module, and the module's optimizer in shards."""

    def __init__(self, spec: EngineSpec, formation: Formation) -> None:
        self._spec = spec
        self._is_half_stepped = False
        refuse_lazy(spec.module)
        refuse_scripts(spec.module)
        check_members(spec.module, spec.optimizer)
        _close_gaps(spec.optimizer)
        self._trained_ids = _trained_ids(spec.optimizer)
        self._buffer_homes = [  # where there are others, an engine is opened again
            (f"{path}.{key}" if path else key, owner, key)
            for path, owner in spec.module.named_modules(remove_duplicate=False)
            for key in owner._buffers
        ]
        with ExitStack() as failed:
            self.executor = spec.open_executor(
                formation.devices, workloads=spec.workloads, intra_op=formation.intra_op
            )
            failed.callback(self.executor.close)
            self.executor.optimizer = spec.optimizer
            self._open_shards()
            failed.pop_all()

    def _open_shards(self) -> None:
        self._generation = self.executor.peers.generation
        self._shards = self.executor.open_shards(self._spec.optimizer)

    # -- one update --------------------------------------------------

    def update(
        self,
        batch: Nested,
        before: Position,
        workloads: Sequence[float],
        *,
        start_s: float,
        metrics: Metrics | None,
        commit: Callable[[Loss], None],
    ) -> StepDone:
        """Do one optimizer update on ``batch``.

        Everything that can refuse comes before the first write. From there on no Ctrl-C arrives, in
        the replicas' threads or while signals are held: weights, buffers and ``commit`` go
        together.

        Args:
            before: Where the run stands.
            workloads: The replicas' relative shares.
            start_s: When the batch was at hand.
            metrics: Counted where there are some; the caller takes that back if this raises.
            commit: Called when the weights are new, in the thread that is last.
        """
        spec, executor = self._spec, self.executor

        # Forward, loss and backward of each microbatch; gradients are added along the fixed tree.
        pieces = self.split(batch, workloads)
        task = TrainTask(spec.objective, pieces.scales, keep_outputs=metrics is not None)
        result = self.run(task, pieces, (spec.seed, before.steps))
        buffers, statistics = self._merged_buffers(result)
        if metrics is not None:
            metrics.keep()
            metrics.update(*outputs_of(pieces, result, metrics.joining))

        # The last addition, and the norm of the whole gradient where that is to be clipped.
        if self._generation != executor.peers.generation:
            self._open_shards()  # the ranks are others now
        shards = self._shards
        shards.take(result)
        is_added = shards.adds_first or spec.clip_norm is not None
        if is_added:
            executor.each(shards.add)
            shards.share()
        norm = None if spec.clip_norm is None else self._norm()
        scale = 1.0 if norm is None else min(1.0, (spec.clip_norm or 0.0) / (norm + 1e-6))

        # From here on nothing refuses: each thread steps its shard, and the last one commits.
        loss = Loss(loss_of(pieces, result), pieces.weight, sum(pieces.sizes))
        rates = _learning_rates(spec.optimizer)  # now: the commit steps the scheduler

        def step(shard: int) -> None:
            if not is_added:
                shards.add(shard)
            self._is_half_stepped = True  # here: no Ctrl-C comes between this and the step
            shards.step(shard, scale)

        def finish() -> None:
            shards.finish()
            write_statistics(buffers, statistics)
            spec.written.update(statistics)
            self._is_half_stepped = False
            executor.peers.mark_done()
            commit(loss)

        spans = [*result.spans, *self._in_each_thread(step, finish)]

        if (before.steps + 1).bit_count() == 1:  # 1, 2, 4, 8, …: it costs a pass over all weights
            executor.peers.check_alike()
        rows, work_s = self._work_of_replicas(pieces.sizes, result)
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

    def split(
        self, batch: Nested, workloads: Sequence[float], *, weighs: bool = True
    ) -> Microbatches:
        """Split ``batch`` for replicas with ``workloads``, as `Splitter.split`.

        Raises:
            ConfigError: It cannot be split.
            StateError: As :meth:`complete_state`: nothing may be added to it.
        """
        self._check_is_whole()
        everybodys = self.executor.peers.all_workloads(workloads)
        return self._spec.splitter.split(batch, everybodys, weighs=weighs)

    def run(self, task: Task, pieces: Microbatches, seed: tuple[int, ...]) -> RunResult:
        """Run ``task`` on all microbatches; nothing that the caller can see changes."""
        return self.executor.run(
            task, pieces.pieces, weights=pieces.weights, seed=seed, owners=pieces.owners
        )

    def _merged_buffers(self, result: RunResult) -> tuple[dict[str, Tensor], dict[str, Statistic]]:
        """Return the module's buffers, and those values of them that the microbatches left.

        Raises:
            UnsupportedError: A buffer has changed its shape.
        """
        statistics = sum_statistics([operand.statistics for operand in result.operands])
        homes = self._buffer_homes if statistics else []
        found = ((name, owner._buffers[key]) for name, owner, key in homes)
        buffers = {name: buffer for name, buffer in found if buffer is not None}
        check_statistics(buffers, statistics)
        return buffers, statistics

    def _norm(self) -> float:
        """Return the norm of all gradients together."""
        squares = self.executor.each(self._shards.squares)
        norm = math.sqrt(self._shards.total([each for shard in squares for each in shard]))
        if not math.isfinite(norm):
            raise ConfigError(
                f"The gradients' norm must be finite to be clipped, but is {norm!r}; the step was "
                "refused and nothing has changed. Lower the learning rate, or look at this "
                "batch's data."
            )
        return norm

    def _in_each_thread(
        self, step: Callable[[int], None], finish: Callable[[], None]
    ) -> list[Span]:
        """Call ``step(shard)`` in each replica's thread, and ``finish()`` in the last one.

        No Ctrl-C arrives meanwhile.
        """
        spans: list[Span] = []
        lock = threading.Lock()

        def timed(shard: int) -> None:
            start_s = now_s()
            step(shard)
            with lock:
                spans.append(Span(replica=shard, microbatch=None, start_s=start_s, stop_s=now_s()))
                if len(spans) < len(self.executor):
                    return
            finish()

        self.executor.each(timed, uninterrupted=True)
        return sorted(spans, key=attrgetter("replica"))

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

    # -- between updates ---------------------------------------------

    def matches_spec(self) -> bool:
        """Tell whether module and optimizer still are what this was opened for."""
        return (
            _trained_ids(self._spec.optimizer) == self._trained_ids
            and self.executor.matches_source()  # and all parameters lie where they lay
        )

    def complete_state(self, *, changed: bool = False) -> None:
        """Bring the optimizer's whole state into this process, where ranks have a part each.

        Args:
            changed: The trained parameters are others now; all ranks must find that.

        Raises:
            StateError: There is no whole state: a step failed half way.
            PeerError: Ranks' weights differ.
        """
        if changed:
            self.executor.peers.agree_to_open_again()
        self._check_is_whole()
        self._shards.complete()
        self.executor.peers.check_alike()

    def reload_state(self) -> None:
        """Take over a state that was loaded into the optimizer, and into the module."""
        self._is_half_stepped = False
        self._open_shards()

    def close(self) -> None:
        """Dismiss the executor."""
        self.executor.close()

    def _check_is_whole(self) -> None:
        if self._is_half_stepped:
            raise StateError(
                "The model must be whole to be trained or saved, but the last step failed when its "
                "optimizer had begun: some weights are new and some are not. Put them back by "
                "`resume()`, or begin with another trainer."
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
                    "but has. Remove them, train a deep copy (it has none), or use `DataParallel`, "
                    "which runs them."
                )


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


def _close_gaps(optimizer: Optimizer) -> None:
    """Give memory of their own to parameters with gaps, which optimizers step in other ways."""
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        if parameter.stride() != dense_strides(parameter):
            parameter.data = parameter.data.clone()


def _trained_ids(optimizer: Optimizer) -> list[list[int]]:
    """Return the ids of the optimizer's parameters that are not frozen, by group."""
    return [[id(p) for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]


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

"""One optimizer update, from a batch to new weights: the algorithm of this package.

    batch ─ split ─► pieces ─ replicas ─► losses, and partial sums of gradients and buffers
                                                               │
    new weights ◄─ optimizer's step, in shards ◄─ clip ◄─ last addition, in shards

Read :meth:`Engine.update` first; everything else in `train/` and `execution/` serves it.

A replica computes in a thread here, or in a worker process that a thread here waits for. The
optimizer is always stepped in threads of this process. On ranks, `executor.run` returns the sums
over all ranks, and each rank steps all parameters, in shards. Where an elastic rank is lost,
`executor.run` raises `GroupChanged`, and `Trainer` calls :meth:`Engine.update` again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.callbacks import StepDone
from phalanx.clock import now_s
from phalanx.errors import ConfigError, StateError
from phalanx.execution import Executor, ExecutorChoice, Shards, Span
from phalanx.memory import dense_strides
from phalanx.metrics import Joining, Metrics
from phalanx.plan import Layout, equal_sizes, open_rows, read_weights
from phalanx.replicas import Statistics, check_statistics, sum_statistics, write_statistics
from phalanx.train.objective import Objective, TrainTask
from phalanx.train.position import BatchLoss, Position
from phalanx.train.trainer_arguments import check_members
from phalanx.types import Nested, WeightFn
from phalanx.warning import warn_user


@dataclass(kw_only=True, eq=False)
class Engine:
    """Replicas of a module, and its optimizer in shards; the first step opens them.

    The other fields are a trainer's arguments after their checks; each replica has one of
    ``devices``.

    Attributes:
        executor: The replicas, while ``is_open``.
    """

    module: nn.Module
    optimizer: Optimizer
    layout: Layout
    microbatches: int | None
    weight: WeightFn | None
    objective: Objective
    seed: int
    devices: tuple[torch.device, ...]
    intra_op: int
    clip_norm: float | None
    choice: ExecutorChoice
    executor: Executor = field(init=False)
    is_open: bool = False
    _shards: Shards = field(init=False)
    _trained_ids: list[list[int]] = field(default_factory=list)
    _is_half_stepped: bool = False
    _kernels_are_named: bool = False

    # -- one update --------------------------------------------------

    def update(
        self,
        batch: Nested,
        before: Position,
        *,
        start_s: float,
        metrics: Metrics | None,
        commit: Callable[[BatchLoss, StepDone], None],
    ) -> None:
        """Do one optimizer update on ``batch``; :meth:`open` comes first.

        Everything that can raise an error comes before the first write. From there on no Ctrl-C
        comes in between: all is written in the executor's threads, or while signals are held.
        So weights, buffers and ``commit`` go together, unless the optimizer or scheduler raises.

        Args:
            before: The position of the run.
            start_s: When the batch had been read.
            metrics: Counted before the first write; the caller restores them if this raises.
            commit: Called once all weights are new, in the thread that steps the last shard. A
                Ctrl-C that came meanwhile is raised after it.
        """
        executor, shards = self.executor, self._shards

        # Forward, loss and backward of each microbatch; gradients are added along the fixed tree,
        # but for the last addition: `operands` are its one or two sides.
        microbatches = self.split(batch)
        result = executor.run(
            TrainTask(self.objective, microbatches.scales, keep_outputs=metrics is not None),
            microbatches.pieces,
            weights=microbatches.weights,
            seed=(self.seed, before.steps),
            owners=microbatches.owners,
        )
        operands = result.operands
        statistics: Statistics = {}
        buffers: dict[str, Tensor] = {}
        if written := [each.statistics for each in operands if each.statistics]:
            statistics = sum_statistics(written)
            buffers = dict(self.module.named_buffers(remove_duplicate=False))
            check_statistics(buffers, statistics)
        loss = BatchLoss(
            microbatches.loss_of(result.results), microbatches.weight, sum(microbatches.sizes)
        )
        if metrics is not None:
            metrics.update(*microbatches.outputs_of(result.results, metrics.joining))

        shards.begin(operands)
        norm, scale = None, 1.0
        if self.clip_norm is not None:
            norm = self._norm()  # for which the last addition is made here
            scale = min(1.0, self.clip_norm / (norm + 1e-6))

        # From here on nothing refuses. The rates of this step: the commit steps the scheduler.
        rates = tuple([_rate_of(group) for group in self.optimizer.param_groups])
        owned = list(zip(result.replica_of, microbatches.sizes, strict=True))
        replicas = range(len(executor.devices))

        def finish(stepped: list[Span]) -> None:
            shards.finish()
            if statistics:
                write_statistics(buffers, statistics)
            self._is_half_stepped = False
            executor.mark_done()
            done = StepDone(
                step=before.steps + 1,
                epoch=before.epochs + 1,
                batch=before.batch + 1,
                loss=loss.value,
                samples=loss.samples,
                seconds=now_s() - start_s,
                shares=tuple([sum([n for i, n in owned if i == replica]) for replica in replicas]),
                spans=(*result.spans, *sorted(stepped, key=attrgetter("replica"))),
                grad_norm=norm,
                learning_rates=rates,
            )
            commit(loss, done)

        self._step_shards(scale, finish)

    def _step_shards(self, scale: float, finish: Callable[[list[Span]], None]) -> None:
        """Make each shard's last addition and step it in its thread; the last one done finishes."""
        executor, shards = self.executor, self._shards
        num_shards = len(executor.devices)
        stepped: list[Span] = []
        lock = threading.Lock()

        def step(shard: int) -> None:
            begin_s = now_s()
            shards.add(shard)  # unless `_norm` has
            self._is_half_stepped = True  # from here on weights change
            shards.step(shard, scale)
            span = Span(replica=shard, microbatch=None, start_s=begin_s, stop_s=now_s())
            with lock:
                stepped.append(span)
                if len(stepped) < num_shards:
                    return
            finish(stepped)

        executor.each(step, uninterrupted=True)

    def split(self, batch: Nested, *, weighs: bool = True) -> Microbatches:
        """Split ``batch`` for the replicas.

        Args:
            weighs: Ask ``weight`` for each microbatch's weight; else it is its number of rows.

        Raises:
            ConfigError: Leaves differ in their rows, there are none, or weights are wrong.
            StateError: As :meth:`check_whole`.
        """
        self.check_whole()
        rows = open_rows(batch, self.layout)
        count = rows.count()
        if count == 0:
            raise ConfigError(
                "`batch` must hold at least 1 row, but is empty. Leave empty batches out."
            )
        number = self.microbatches or self.executor.count_replicas()
        owners = range(number) if self.microbatches is None else None
        sizes = equal_sizes(count, number)
        pieces = rows.cut(sizes)
        weights = list(map(float, sizes))
        if weighs and self.weight is not None:
            weights = read_weights(self.weight, pieces, sizes)
        weight = math.fsum(weights)
        scales = tuple([each / weight for each in weights])
        return Microbatches(pieces, sizes, weights, scales, weight, owners)

    def _norm(self) -> float:
        """Make each shard's last addition, and return the norm of all gradients together."""
        shards = self._shards

        def add_and_square(shard: int) -> list[float]:
            shards.add(shard)
            return shards.squared_norms(shard)

        squares = self.executor.each(add_and_square)
        norm = math.sqrt(math.fsum([each for shard in squares for each in shard]))
        if not math.isfinite(norm):
            raise ConfigError(
                f"The gradients' norm must be finite to be clipped, but is {norm!r}; the step was "
                "refused and nothing has changed. Lower the learning rate, or look at this "
                "batch's data."
            )
        return norm

    # -- replicas ----------------------------------------------------

    def open(self) -> None:
        """Have replicas that fit module and optimizer."""
        if self.is_open:
            is_same = _trained_ids(self.optimizer) == self._trained_ids
            if not is_same or not self.executor.follow_attributes():
                self.close()
        if not self.is_open:
            self._make()

    def refresh(self) -> None:
        """Let the next run see everything that module and loss hold by then."""
        if self.is_open:
            self.executor.refresh()

    def close(self) -> None:
        """Dismiss the replicas."""
        if self.is_open:
            with torch.inference_mode(False):
                self.executor.close()
            self.is_open = False
            vars(self).pop("executor", None)  # a signal's handler may have closed it meanwhile

    def _make(self) -> None:
        check_members(self.module, self.optimizer)
        # A caller who evaluates in inference mode still trains afterwards, and the memory that an
        # engine gives to parameters is what they keep.
        with torch.inference_mode(False):
            _close_gaps(self.optimizer)
            executor = self.choice.open(
                self.module,
                self.devices,
                intra_op=self.intra_op,
                shared=[self.objective],
                reads=[self.objective.function],
            )
            try:
                executor.optimizer = self.optimizer
                self._trained_ids = _trained_ids(self.optimizer)
                self._shards = Shards(self.optimizer, executor.parameters, len(executor))
                self.executor, self.is_open = executor, True
            except BaseException:
                executor.close()
                raise
        if not self._kernels_are_named:
            self._kernels_are_named = True
            _warn_of_kernels(self.devices)

    # -- state -------------------------------------------------------

    def check_whole(self) -> None:
        """Refuse a state in which only some of the weights are new.

        Raises:
            StateError: The last step failed half way.
        """
        if self._is_half_stepped:
            raise StateError(
                "The model must be whole to be trained or saved, but the last step failed when its "
                "optimizer had begun: some weights are new and some are not. Put them back by "
                "`resume()`, or begin with another trainer."
            )

    def mark_whole(self) -> None:
        """Take the weights for whole again: a state was loaded into module and optimizer."""
        self._is_half_stepped = False


def _rate_of(group: dict[str, Any]) -> float:
    """Return a group's learning rate; nan where an optimizer of the user's own has none."""
    try:
        return float(group["lr"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        return math.nan


def _warn_of_kernels(devices: Sequence[torch.device]) -> None:
    """Name torch's switch where kernels of an accelerator may add in any order."""
    kinds = {device.type for device in devices} - {"cpu"}
    if kinds and not torch.are_deterministic_algorithms_enabled():
        warn_user(
            f"Some kernels on {' and '.join(sorted(kinds))} may give other bits in each run. "
            "`torch.use_deterministic_algorithms(True)` chooses others, or raises where torch has "
            "none.",
        )


def _close_gaps(optimizer: Optimizer) -> None:
    """Copy parameters with gaps in memory, which optimizers would step in another way."""
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        if parameter.stride() != dense_strides(parameter):
            parameter.data = parameter.data.clone()


def _trained_ids(optimizer: Optimizer) -> list[list[int]]:
    """Return the ids of the optimizer's parameters that are not frozen, by group."""
    return [[id(p) for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]


# -- a batch in microbatches -----------------------------------------


@dataclass
class Microbatches:
    """A batch in pieces, whose gradients are summed.

    Attributes:
        pieces: In order; some may be without rows.
        sizes: Rows of each.
        weights: The weight of each: by default its rows.
        scales: The weight of each, divided by that of the whole batch.
        weight: The sum of the weights.
        owners: The replica of each, where every replica has one slice; None: the next that is free.
    """

    pieces: list[Nested]
    sizes: list[int]
    weights: list[float]
    scales: tuple[float, ...]
    weight: float
    owners: range | None

    # Any, here and below: a `MicrobatchResult`; None for a microbatch that weighs nothing.
    def loss_of(self, results: Sequence[Any]) -> float:
        """Return the loss of the whole batch: the mean losses, weighted, in order."""
        pairs = zip(self.scales, results, strict=True)
        return math.fsum([scale * each.loss for scale, each in pairs if each is not None])

    def outputs_of(self, results: Sequence[Any], joining: Joining) -> tuple[Nested, Nested, int]:
        """Return the outputs and targets of the whole batch, and its rows.

        Microbatches that were left out, because they weigh nothing, are in none of them.
        """
        columns = zip(results, self.sizes, self.weights, strict=True)
        found, sizes, weights = zip(*[each for each in columns if each[0] is not None], strict=True)
        outputs = joining.join([each.outputs for each in found], sizes, weights)
        targets = [each.targets for each in found]
        joined = joining.join(targets, sizes, weights, are_targets=True)
        return outputs, joined, sum(sizes)

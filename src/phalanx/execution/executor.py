"""The base of all executors: replicas with a thread each, and the run over microbatches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.execution.run import RunResult, RunState, Task
from phalanx.execution.thread_pool import CallerThread, ThreadPool
from phalanx.replicas import (
    Replica,
    RngPlan,
    callers_streams,
    check_replicable,
    current_streams,
    has_compiled,
    has_fused_evaluation,
    num_cores,
    warn_of_assigned,
)
from phalanx.types import Nested

T = TypeVar("T")
_ONE_VALUE = "Expected more than 1 value per channel when training"  # what torch says


class Executor(ABC):
    """Replicas that run microbatches, with a thread of this process for each.

    Args:
        modules: The user's modules: one for each replica, or the one that all are replicas of.
        devices: One per replica.
        intra_op: Threads inside operators, per replica. Default: cores divided by CPU replicas.

    Attributes:
        parameters: All parameters, each once, in whose order gradients are summed.
        owns_generator: Whether each replica has a separate process, whose generator is seeded.
        worker_pids: The worker processes' ids; empty without any.
        optimizer: Set by a trainer: workers drop the state of theirs, ranks compare its options.
    """

    _threads: ThreadPool | CallerThread
    owns_generator = False
    worker_pids: Sequence[int] = ()
    optimizer: Optimizer | None = None

    def __init__(
        self,
        modules: Sequence[nn.Module],
        devices: Sequence[torch.device],
        intra_op: int | None,
    ) -> None:
        for module in dict.fromkeys(modules):
            check_replicable(module)
        self.modules = tuple(modules)
        self.devices = tuple(devices)
        self._on_cpu = all(device.type == "cpu" for device in devices)
        self.intra_op = intra_op or default_intra_op(devices)
        self.parameters = parameters_of(modules)
        self._addresses = addresses_of(self.parameters)
        self._plans: dict[object, RngPlan] = {}  # by kind of run, once its first is done
        self._warned: set[str] = set()  # attributes that `forward` was seen to assign

    def each(self, function: Callable[[int], T], *, uninterrupted: bool = False) -> list[T]:
        """Call ``function(replica index)`` in every replica's thread, on the caller's streams.

        After :meth:`close` a backward pass may still come: the caller's thread runs it.

        Args:
            uninterrupted: Let all calls end, whatever signals come; else a second Ctrl-C does not
                wait.
        """
        streams = () if self._on_cpu else callers_streams(self.devices)

        def on_streams(index: int) -> T:
            with current_streams(streams, self.devices[index]):
                return function(index)

        run = on_streams if streams else function
        threads = self._threads
        if threads.closed:
            threads = CallerThread(self.devices, intra_op=self.intra_op)
        return threads.each(run, uninterrupted=uninterrupted)

    def run(
        self,
        task: Task,
        pieces: Sequence[Nested],
        *,
        weights: Sequence[float],
        seed: tuple[int, ...],
        owners: Sequence[int] | None = None,
        only: range | None = None,
    ) -> RunResult:
        """Run ``task`` on every piece of weight above 0, each on one replica.

        Args:
            task: Called under the caller's grad, inference and autocast modes.
            pieces: The microbatches.
            weights: What each microbatch stands for; one of weight 0 is left out.
            seed: Where the random numbers of this run start; each microbatch appends its index.
            owners: The replica that computes each microbatch. Default: the next that is free.
            only: The microbatches that run here, while others run on other ranks. Default: all.
                `DistributedDataParallel` gives it; `RankExecutor` chooses it itself.

        Returns:
            The results by microbatch, and the sums along the tree of the gradients that ``task``
            left in the replicas' parameters and of the statistics that it left in their buffers.

        Raises:
            Exception: What ``task`` raised, with a note that names replica and microbatch. Nothing
                that the caller can see has changed then.
        """
        modes = [each.training for each in self.modules]
        kind = (type(task), torch.is_grad_enabled(), *modes)
        plan = self._plans.get(kind) or self._first_plan(all(modes))
        state = RunState(task, pieces, weights, seed, plan, len(self.devices), owners, only)
        self._compute(state)
        if plan.watched:
            self._keep_plan(kind, state)
        state.result.sums = state.sums.waiting
        state.result.spans.sort(key=attrgetter("start_s"))
        return state.result

    def _first_plan(self, trains: bool) -> RngPlan:
        """Return how the first run of a kind gets its random numbers."""
        compiled = any(map(has_compiled, self.modules))
        # A mode that sees calls would keep torch from a faster way.
        fused = not trains and any(map(has_fused_evaluation, self.modules))
        return RngPlan(
            watched=True,
            throughout=compiled or fused,
            own=self.owns_generator,
            shared=any(d.type != "cpu" and self.devices.count(d) > 1 for d in self.devices),
        )

    def _keep_plan(self, kind: object, state: RunState) -> None:
        """Keep how later runs of a kind get their random numbers, after its first one."""
        self._plans[kind] = replace(state.rng, watched=False)
        warn_of_assigned([name for name in state.assigned if name not in self._warned])
        self._warned |= state.assigned.keys()

    def count_replicas(self) -> int:
        """Return the number of replicas, those of other ranks too."""
        return len(self)

    def mark_done(self) -> None:  # noqa: B027 - nothing to do but for ranks
        """Count a run whose result is kept; elastic ranks compare counts to find a late rank."""

    def __len__(self) -> int:
        """Return the number of replicas."""
        return len(self.devices)

    @abstractmethod
    def follow_attributes(self) -> bool:
        """Let the next runs see attributes that were assigned; to be called before a run.

        Returns:
            False where parameters were replaced or moved, or the threads were left behind by a
            second Ctrl-C: another executor must be opened.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Let the next run see everything that the module holds by then."""

    @abstractmethod
    def close(self) -> None:
        """Dismiss threads and replicas; closing twice does nothing."""

    @abstractmethod
    def _compute(self, state: RunState) -> None:
        """Run all microbatches of ``state`` that weigh something."""


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return all parameters of the modules, each once."""
    return list(dict.fromkeys(p for module in dict.fromkeys(modules) for p in module.parameters()))


def addresses_of(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Return which parameters these are, and where they lie in memory."""
    return [(id(parameter), parameter.data_ptr()) for parameter in parameters]


def default_intra_op(devices: Sequence[torch.device]) -> int:
    """Return the threads inside operators that give every CPU replica its share of the cores."""
    on_cpu = sum(device.type == "cpu" for device in devices)
    return max(1, num_cores() // max(1, on_cpu))


def annotate_error(error: BaseException, replica: Replica, microbatch: int) -> None:
    """Note on ``error`` where it was raised."""
    explain_error(error)
    error.add_note(
        f"Raised by replica {replica.index} on {replica.device}, microbatch {microbatch}."
    )


def explain_error(error: BaseException) -> None:
    """Note the remedy on an error that comes from cutting the batch."""
    if isinstance(error, ValueError) and _ONE_VALUE in str(error):
        error.add_note(
            "This piece of the batch has 1 row, of which batch norm has no variance. Cut the batch "
            "into fewer pieces (`microbatches`, `replicas`), or leave a short last batch out, by "
            "`drop_last=True` of its loader."
        )

"""What the executors have in common: the run over microbatches, and what it gives back."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.distributed import GroupChanged
from phalanx.execution.partial_sums import (
    Gradients,
    RunResult,
    Span,
    TreeSums,
    add_sums,
)
from phalanx.execution.shards import Shards
from phalanx.execution.thread_pool import CallerThread, ThreadPool
from phalanx.execution.work_queue import WorkQueue
from phalanx.plan import Node, Shares, workload_sizes
from phalanx.replicas import (
    MicrobatchRng,
    Replica,
    RngPlan,
    autocast_off,
    callers_streams,
    current_streams,
    derive_seed,
    has_compiled,
    has_fused_evaluation,
    num_cores,
    warn_of_assigned,
)
from phalanx.types import Nested

__all__ = [
    "Executor",
    "MicrobatchContext",
    "MicrobatchResult",
    "RunState",
    "Task",
    "annotate_error",
    "default_intra_op",
    "explain_error",
    "repeated",
]

T = TypeVar("T")
_ONE_VALUE = "Expected more than 1 value per channel when training"  # what torch says


@dataclass(frozen=True, kw_only=True)
class MicrobatchContext:
    """One microbatch in the hands of one replica.

    Attributes:
        replica: The one that computes it.
        index: Which microbatch it is.
        batch: Its rows.
        rng: Its random numbers, entered around the user's code only.
    """

    replica: Replica
    index: int
    batch: Nested
    rng: MicrobatchRng


class Task(ABC):
    """The work on one microbatch: called by a replica, under the caller's modes.

    Attributes:
        goes_back: Whether it goes back through graphs of an earlier run. Nothing is taken over
            from the source then, no buffers are collected, and a closed executor runs it, too.
    """

    goes_back: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, context: MicrobatchContext) -> Any:  # Any: the task's own result type
        """Compute the microbatch; leave gradients and buffers in the replica."""


@dataclass(frozen=True)
class MicrobatchResult:
    """What one microbatch gave a trainer.

    Attributes:
        loss: Its mean loss.
        outputs: The module's outputs, detached; None where nobody asked.
        targets: The microbatch's targets, on the same device.
    """

    loss: float
    outputs: Nested
    targets: Nested


class Peers:
    """The other processes of a job, as a trainer talks to them; here there are none.

    Attributes:
        generation: How often they have changed.
    """

    generation: int = 0

    def all_workloads(self, own: Sequence[float]) -> Sequence[float]:
        """Return the relative shares of all the job's replicas, where those here have ``own``."""
        return own

    def admit(self) -> None:
        """Let new processes in, between two steps, where some wait."""

    def agree_to_open_again(self) -> None:
        """Tell all processes that the trained parameters were changed.

        Raises:
            ConfigError: They were not changed in all processes.
        """

    def mark_done(self) -> None:
        """Count a run whose outcome is kept here: ranks that were cut off from it do it alone."""

    def check_alike(self) -> None:
        """Compare the weights of all processes.

        Raises:
            PeerError: They differ.
        """


def repeated(attempt: Callable[[], T]) -> T:
    """Return the result of ``attempt``, called again whenever ranks have come or gone under it."""
    while True:
        with contextlib.suppress(GroupChanged):
            return attempt()


class Executor(ABC):
    """Replicas that run microbatches, each with a thread of this process that looks after it.

    Attributes:
        workloads: Relative shares of the replicas.
        devices: Each replica's.
        sources: Each replica's module, or the one that all are replicas of.
        parameters: All parameters, each once, in whose order gradients are summed.
        owns_generator: Whether each replica has a process of its own, whose generator is seeded.
        worker_pids: The worker processes' numbers; empty without any.
        optimizer: The one that is stepped, whose options ranks compare before each step.
        peers: The other processes of the job.
    """

    workloads: list[float]
    devices: tuple[torch.device, ...]
    sources: tuple[nn.Module, ...]
    parameters: list[nn.Parameter]
    _threads: ThreadPool | CallerThread
    owns_generator = False
    worker_pids: Sequence[int] = ()
    optimizer: Optimizer | None = None
    peers: Peers = Peers()
    _warned: frozenset[str] = frozenset()  # attributes that `forward` was seen to assign
    _rng_watched: frozenset[object] = frozenset()  # the kinds of runs that were watched
    _fused: bool | None = None  # see `has_fused_evaluation`; None: not known yet
    _compiled = False  # see `has_compiled`

    def each(self, function: Callable[[int], T], *, uninterrupted: bool = False) -> list[T]:
        """Call ``function(replica index)`` in every replica's thread, on the caller's streams.

        After :meth:`close`, for a backward pass that is still to come, on threads of its own.

        Args:
            uninterrupted: A Ctrl-C arrives after it, also where the one replica is the caller's
                thread.
        """
        streams = callers_streams(self.devices)

        def on_streams(index: int) -> T:
            with current_streams(streams, self.devices[index]):
                return function(index)

        run = on_streams if streams else function
        threads = self._threads
        if isinstance(threads, CallerThread) and (uninterrupted or not threads.closed):
            with autocast_off(self.devices):  # as in a replica's thread: it gives other bits
                return threads.each_uninterrupted(run) if uninterrupted else threads.each(run)
        if not threads.closed:
            return threads.each(run)
        with contextlib.closing(ThreadPool(len(self), intra_op=self.intra_op)) as pool:
            return pool.each(run)

    def run(
        self,
        task: Task,
        pieces: Sequence[Nested],
        *,
        weights: Sequence[float],
        seed: tuple[int, ...],
        owners: Sequence[int] | None = None,
    ) -> RunResult:
        """Run ``task`` on every piece of weight above 0, each on one replica.

        Args:
            task: Called under the caller's grad, inference and autocast modes.
            pieces: The microbatches.
            weights: What each microbatch stands for; one of weight 0 is left out.
            seed: Where the random numbers of this run start; each microbatch appends its index.
            owners: The replica that computes each microbatch; another one does only if that one
                is lost. Default: whoever is free.

        Returns:
            The results by microbatch, and the sums along the tree of the gradients that ``task``
            left in the replicas' parameters and of the statistics that it left in their buffers.

        Raises:
            Exception: What ``task`` raised, with a note that names replica and microbatch. Nothing
                that the caller can see has changed then.
        """
        return self._run(RunState(task, pieces, weights, seed, owners))

    def _run(self, state: RunState) -> RunResult:
        """Run what there is in ``state``, under the random numbers of its kind."""
        task = state.task
        trains = tuple([source.training for source in self.sources])
        name = getattr(task, "__qualname__", type(task).__qualname__)
        kind = name, trains, torch.is_grad_enabled()
        watched = kind not in self._rng_watched
        state.rng = RngPlan(
            watched=watched,
            throughout=self._sees_operators(all(trains)),
            own=self.owns_generator,
            shared=frozenset(each for each in self.devices if self.devices.count(each) > 1),
        )
        self._start(state)
        if watched:
            self._rng_watched |= {kind}
            warn_of_assigned([name for name in state.assigned if name not in self._warned])
            self._warned |= state.assigned.keys()
        return state.result()

    def open_shards(self, optimizer: Optimizer) -> Shards:
        """Return the optimizer in shards, one for each replica's thread."""
        return Shards(optimizer, self.parameters, len(self))

    def _sees_operators(self, trains: bool) -> bool:
        """Tell whether a mode that sees calls would keep torch from a faster way."""
        if self._fused is None:
            self._fused = any(map(has_fused_evaluation, self.sources))
            self._compiled = any(map(has_compiled, self.sources))
        return self._compiled or (self._fused and not trains)

    def _start(self, state: RunState) -> None:
        left = [index for index in state.leaves if state.weights[index] > 0]
        if state.owners is not None:
            owners = state.owners
            left.sort(key=lambda index: (owners[index], index))
            counts = Counter(owners[index] for index in left)
            shares = Shares([counts[replica] for replica in range(len(self))], stealing=False)
        else:
            shares = Shares(workload_sizes(len(left), self.workloads))
        state.queue = WorkQueue(left, shares, [workload > 0 for workload in self.workloads])
        self._work_on(state)

    @property
    @abstractmethod
    def intra_op(self) -> int:
        """Threads inside operators, per replica."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of replicas."""

    @abstractmethod
    def matches_source(self) -> bool:
        """Tell whether the replicas can follow all that was done to the module since."""

    @abstractmethod
    def refresh(self) -> None:
        """Take over everything from the module now."""

    @abstractmethod
    def close(self) -> None:
        """Dismiss threads and replicas; closing twice does nothing."""

    @abstractmethod
    def _work_on(self, state: RunState) -> None:
        """Run all microbatches of ``state`` that weigh something."""


class RunState:
    """The state of one run, shared by the threads of the executor.

    Args:
        only: The microbatches that this executor runs, while others run elsewhere; None for all.
    """

    def __init__(
        self,
        task: Task,
        pieces: Sequence[Nested],
        weights: Sequence[float],
        seed: tuple[int, ...],
        owners: Sequence[int] | None,
        only: range | None = None,
    ) -> None:
        self.task = task
        self.pieces = pieces
        self.weights = weights
        self.seed = seed
        self.owners = owners
        self.rng = RngPlan()
        self.drew = False  # whether a microbatch drew random numbers
        self.assigned: dict[str, None] = {}  # names of attributes; looked for where rng is watched
        self.queue: WorkQueue  # set when it starts
        self.sums = TreeSums(len(pieces), add_sums)
        self.leaves = range(len(pieces)) if only is None else only
        for index in self.leaves:
            if not weights[index] > 0:
                self.sums.put(Node(0, index), None)
        self.results: list[Any] = [None] * len(pieces)
        self.replica_of = [-1] * len(pieces)
        self.spans: list[Span] = []
        self.seconds = [0.0] * len(pieces)

    def context(self, replica: Replica, index: int) -> MicrobatchContext:
        """Put microbatch ``index`` into the hands of ``replica``."""
        return MicrobatchContext(
            replica=replica,
            index=index,
            batch=self.pieces[index],
            rng=MicrobatchRng(derive_seed(*self.seed, index), self.rng),
        )

    def replace_gradients(self, total: Gradients) -> None:
        """Take the sum of all gradients, which were not put here, when all is put."""
        for own in self.sums.waiting().values():
            if own is not None:
                own.gradients, total = total, [None] * len(total)

    def result(self) -> RunResult:
        """Return what the run gave, when it is over."""
        sums = self.sums.waiting()
        operands = [value for value in sums.values() if value is not None]
        return RunResult(
            results=self.results,
            operands=operands,
            sums=sums,
            replica_of=self.replica_of,
            spans=sorted(self.spans, key=attrgetter("start_s")),
            seconds=self.seconds,
            drew=self.drew,
        )


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
    """Note on torch's error that batch norm cannot train on one row, and the ways out."""
    if isinstance(error, ValueError) and _ONE_VALUE in str(error):
        error.add_note(
            "This piece of the batch has 1 row, of which batch norm has no variance. Cut the batch "
            "into fewer pieces (`microbatches`, `replicas`), or leave a short last batch out, by "
            "`drop_last=True` of its loader."
        )

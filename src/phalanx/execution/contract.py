"""What the executors have in common: the run over microbatches, and what it gives back."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from phalanx.plan import Node, Shares, workload_sizes
from phalanx.replicas import (
    MicrobatchRng,
    ProcessRng,
    Replica,
    RngPlan,
    autocast_off,
    callers_streams,
    current_streams,
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
    "WorkQueue",
    "annotate_error",
    "default_intra_op",
    "explain_error",
    "parameters_of",
    "places_of",
    "repeated",
]

T = TypeVar("T")
_THREADS_AT_FORK = "Unable to handle autograd's threading"  # what torch says
_ONE_VALUE = "Expected more than 1 value per channel when training"  # what torch says


@dataclass(kw_only=True, slots=True)
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
    rng: MicrobatchRng | ProcessRng


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
    """The other processes of a job, where there are some, as a trainer talks to them.

    Attributes:
        generation: How often they have changed.
    """

    generation: int = 0

    def all_workloads(self) -> Sequence[float]:
        """Return the relative shares of the replicas of all processes."""
        raise NotImplementedError

    def admit(self) -> None:
        """Let new processes in, between two steps, where some wait."""

    def agree_to_open_again(self) -> None:
        """Tell all processes that the trained parameters were changed.

        Raises:
            ConfigError: They were not changed in all processes.
        """
        raise NotImplementedError

    def mark_done(self) -> None:
        """Count a run whose outcome is kept here: ranks that were cut off from it do it alone."""

    def check_alike(self) -> None:
        """Compare the weights of all processes.

        Raises:
            PeerError: They differ.
        """
        raise NotImplementedError


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
        peers: The other processes of the job; None without any.
    """

    workloads: list[float]
    devices: tuple[torch.device, ...]
    sources: tuple[nn.Module, ...]
    parameters: list[nn.Parameter]
    _threads: ThreadPool | CallerThread
    owns_generator = False
    worker_pids: Sequence[int] = ()
    optimizer: Optimizer | None = None
    peers: Peers | None = None

    def __init__(self) -> None:
        self._plans: dict[object, RngPlan] = {}  # by kind of run, of those that were watched
        self._warned: set[str] = set()  # attributes that `forward` was seen to assign

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
        only: range | None = None,
    ) -> RunResult:
        """Run ``task`` on every piece of weight above 0, each on one replica.

        Args:
            task: Called under the caller's grad, inference and autocast modes.
            pieces: The microbatches.
            weights: What each microbatch stands for; one of weight 0 is left out.
            seed: Where the random numbers of this run start; each microbatch appends its index.
            owners: The replica that computes each microbatch; another one does only if that one
                is lost. Default: whoever is free.
            only: The microbatches that run here, while others run elsewhere. Default: all. It is
                for executors of ranks, which choose it themselves.

        Returns:
            The results by microbatch, and the sums along the tree of the gradients that ``task``
            left in the replicas' parameters and of the statistics that it left in their buffers.

        Raises:
            Exception: What ``task`` raised, with a note that names replica and microbatch. Nothing
                that the caller can see has changed then.
        """
        modes = [source.training for source in self.sources]
        kind = (type(task), torch.is_grad_enabled(), *modes)
        plan = self._plans.get(kind) or self._first_plan(all(modes))
        state = RunState(task, pieces, weights, seed, plan, self.workloads, owners, only)
        self._compute(state)
        if plan.watched:
            self._keep_plan(kind, state)
        return state.result()

    def _first_plan(self, trains: bool) -> RngPlan:
        """Return how the first run of a kind gets its random numbers."""
        compiled = any(map(has_compiled, self.sources))
        # A mode that sees calls would keep torch from a faster way.
        fused = not trains and any(map(has_fused_evaluation, self.sources))
        return RngPlan(
            watched=True,
            throughout=compiled or fused,
            own=self.owns_generator,
            shared=frozenset(each for each in self.devices if self.devices.count(each) > 1),
        )

    def _keep_plan(self, kind: object, state: RunState) -> None:
        """Keep how later runs of a kind get their random numbers, after its first one."""
        self._plans[kind] = replace(state.rng, watched=False)
        warn_of_assigned([name for name in state.assigned if name not in self._warned])
        self._warned |= state.assigned.keys()

    def open_shards(self, optimizer: Optimizer) -> Shards:
        """Return the optimizer in shards, one for each replica's thread."""
        return Shards(optimizer, self.parameters, len(self))

    @property
    @abstractmethod
    def intra_op(self) -> int:
        """Threads inside operators, per replica."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of replicas."""

    @abstractmethod
    def follow(self) -> bool:
        """Let the next runs see the attributes that were assigned; call it before a run.

        Returns:
            False where the parameters are others, or lie elsewhere: open another executor.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Take over everything from the module now."""

    @abstractmethod
    def close(self) -> None:
        """Dismiss threads and replicas; closing twice does nothing."""

    @abstractmethod
    def _compute(self, state: RunState) -> None:
        """Run all microbatches of ``state`` that weigh something."""


class WorkQueue:
    """The microbatches of a run that nobody has done yet; for any thread.

    Threads only :meth:`take` and :meth:`fail`: a replica that takes a microbatch does it. The
    others are for worker processes, which may be lost with one.

    Args:
        microbatches: Which there are.
        shares: Whose they are, by place.
        active: Which replicas may take what was brought back; not those that are switched off.
    """

    def __init__(self, microbatches: Sequence[int], shares: Shares, active: Sequence[bool]) -> None:
        self._microbatches = microbatches
        self._shares = shares
        self._active = active
        self._changed = threading.Condition()
        self._returned: list[int] = []
        self._left = len(microbatches)
        self._failed = False

    @property
    def over(self) -> bool:
        """Whether all were counted as done, or something failed."""
        return self._left == 0 or self._failed

    def take(self, replica: int, wait_s: float = 0.0) -> int | None:
        """Return the next microbatch for ``replica``; None when none is left, or one failed.

        Args:
            wait_s: How long to wait for one that is brought back.
        """
        with self._changed:
            place = None if self._failed else self._shares.take(replica)
            if place is not None:
                return self._microbatches[place]
            returned = self._returned if self._active[replica] else []
            if wait_s and not returned and not self.over:
                self._changed.wait(wait_s)
            return returned.pop(0) if returned and not self._failed else None

    def give_back(self, microbatch: int) -> None:
        """Let another one compute it."""
        with self._changed:
            self._returned.append(microbatch)
            self._changed.notify_all()

    def leave_to_others(self, replica: int) -> None:
        """Give the share of ``replica`` to whoever is free."""
        with self._changed:
            while (place := self._shares.take(replica)) is not None:
                self._returned.append(self._microbatches[place])
                self._changed.notify_all()

    def count(self) -> None:
        """One more is done."""
        with self._changed:
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()

    def fail(self) -> None:
        """End the run."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class RunState:
    """The state of one run, shared by the threads of the executor; arguments as `Executor.run`.

    Args:
        rng: How the microbatches get their random numbers.
        workloads: The replicas' relative shares.
    """

    def __init__(
        self,
        task: Task,
        pieces: Sequence[Nested],
        weights: Sequence[float],
        seed: tuple[int, ...],
        rng: RngPlan,
        workloads: Sequence[float],
        owners: Sequence[int] | None,
        only: range | None,
    ) -> None:
        self.task = task
        self.pieces = pieces
        self.weights = weights
        self.seed = seed
        self.rng = rng
        self.drew = False  # whether a microbatch drew random numbers
        self.assigned: dict[str, None] = {}  # names of attributes; looked for where rng is watched
        self.sums = TreeSums(len(pieces), add_sums)
        self.results: list[Any] = [None] * len(pieces)
        self.replica_of = [-1] * len(pieces)
        self.spans: list[Span] = []
        self.seconds = [0.0] * len(pieces)
        left = []
        for index in range(len(pieces)) if only is None else only:
            if weights[index] > 0:
                left.append(index)
            else:
                self.sums.put(Node(0, index), None)
        if owners is None:
            shares = Shares(workload_sizes(len(left), workloads))
        else:
            left.sort(key=lambda index: (owners[index], index))
            counts = Counter(owners[index] for index in left)
            shares = Shares([counts[each] for each in range(len(workloads))], stealing=False)
        self.queue = WorkQueue(left, shares, [workload > 0 for workload in workloads])

    def replace_gradients(self, total: Gradients) -> None:
        """Take the sum of all gradients, which were not put here, when all is put."""
        for own in self.sums.waiting().values():
            if own is not None:
                own.gradients, total = total, [None] * len(total)

    def result(self) -> RunResult:
        """Return what the run gave, when it is over."""
        sums = self.sums.waiting()
        return RunResult(
            results=self.results,
            sums=sums,
            replica_of=self.replica_of,
            spans=sorted(self.spans, key=attrgetter("start_s")),
            seconds=self.seconds,
            drew=self.drew,
        )


def parameters_of(sources: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return all parameters of the modules, each once."""
    return list(dict.fromkeys(p for source in dict.fromkeys(sources) for p in source.parameters()))


def places_of(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
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
    """Note the ways out on errors of torch's that do not name them."""
    if isinstance(error, ValueError) and _ONE_VALUE in str(error):
        error.add_note(
            "This piece of the batch has 1 row, of which batch norm has no variance. Cut the batch "
            "into fewer pieces (`microbatches`, `replicas`), or leave a short last batch out, by "
            "`drop_last=True` of its loader."
        )
    elif isinstance(error, RuntimeError) and _THREADS_AT_FORK in str(error):
        error.add_note(
            "The program has run a backward pass before its worker processes were forked, and "
            'torch sees a GPU. Set `CUDA_VISIBLE_DEVICES=""` before the start, run no backward '
            "pass in the program, or use executor='threads'."
        )

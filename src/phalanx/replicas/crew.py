"""What the crews have in common: the run over microbatches, and what it gives back."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phalanx.codecs import Feedback
from phalanx.plan import Node, Shares, workload_sizes
from phalanx.replicas.draws import Draws, derive_seed
from phalanx.replicas.intra_op import num_cores
from phalanx.replicas.replica import Replica
from phalanx.replicas.sums import Partial, PartialSums
from phalanx.replicas.team import Inline, Team
from phalanx.types import Nested

__all__ = ["Crew", "Job", "Report", "Span", "Turn", "blame", "default_intra_op"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Span:
    """What one replica did when; ``microbatch`` None stands for merging and the optimizer."""

    replica: int
    microbatch: int | None
    start_s: float
    stop_s: float


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One microbatch in the hands of one replica.

    Attributes:
        replica: Who computes it.
        index: Which microbatch it is.
        batch: Its rows.
        seed: Where its random numbers start, or None when the model draws none.
        kept: In a worker process, what it keeps from run to run, by name.
    """

    replica: Replica
    index: int
    batch: Nested
    seed: int | None
    kept: dict[str, Any] = field(default_factory=dict)  # Any: whatever runs leave there

    @contextlib.contextmanager
    def drawing(self) -> Iterator[Draws | None]:
        """Give the model its random numbers; to be entered around the forward pass alone."""
        if self.seed is None:
            yield None
        else:
            with Draws(self.seed) as draws:
                yield draws
                if draws.used:
                    self.drew.set()

    drew: threading.Event = field(default_factory=threading.Event)


@dataclass(kw_only=True)
class Report:
    """What a run over microbatches gave.

    Attributes:
        results: What `run` returned, by microbatch; None for microbatches of weight 0.
        operands: The last one or two partial sums of gradients and statistics, left one first.
        sums: Where only some microbatches were run: what their sums have come to, by node of the
            tree.
        replica_of: Who computed each microbatch; -1 for those left out.
        seconds: What each pinned microbatch took until its gradients were there: without waiting
            for other replicas, and before any merging; 0 for those left out.
    """

    results: list[Any]  # Any: whatever the caller's `run` returns
    operands: list[Partial] = field(default_factory=list)
    sums: dict[Node, Partial | None] = field(default_factory=dict)
    replica_of: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Crew(ABC):
    """Replicas that run microbatches, each with a thread of this process that looks after it.

    Attributes:
        workloads: Relative shares of the replicas.
        devices: Each replica's.
        sources: Each replica's module, or the one that all are replicas of.
        parameters: All parameters, each once, in whose order gradients are summed.
    """

    workloads: list[float]
    devices: tuple[torch.device, ...]
    sources: tuple[nn.Module, ...]
    parameters: list[nn.Parameter]
    _team: Team | Inline
    _draws: bool | None = None  # None: not known yet whether the model draws random numbers

    @property
    def draws(self) -> bool | None:
        """Whether the model has drawn random numbers so far; None before the first run."""
        return self._draws

    def each(self, task: Callable[[int], T]) -> list[T]:
        """Run ``task(replica index)`` in every replica's thread at once.

        After :meth:`close`, for a backward pass that is still to come, on threads of its own.
        """
        if not self._team.closed:
            return self._team.each(task)
        with contextlib.closing(Team(len(self), intra_op=self.intra_op)) as team:
            return team.each(task)

    def run(
        self,
        microbatches: Sequence[Nested],
        run: Callable[[Turn], Any],  # Any: the caller's own result type
        *,
        weights: Sequence[float],
        seed: tuple[int, ...],
        pinned: bool = False,
        feedback: Feedback | None = None,
        only: range | None = None,
    ) -> Report:
        """Run every microbatch of weight above 0 on some replica.

        Args:
            run: Called by a replica, under the caller's grad, inference and autocast modes.
            weights: What each microbatch stands for; one of weight 0 is left out.
            seed: Where the random numbers of this run start; each microbatch appends its index.
            pinned: Microbatch i goes to replica i, and to another only if that one is lost.
            feedback: Each microbatch's gradient passes through its codec, in the slot of the
                microbatch's index; new errors are pending when this returns.
            only: Run these, while others run elsewhere; default: all.

        Returns:
            The results by microbatch, and the sums along the tree of the gradients that ``run``
            left in the replicas' parameters and of the statistics that it left in their buffers.

        Raises:
            Exception: What ``run`` raised, with a note that names replica and microbatch. Nothing
                that the caller can see has changed then.
        """
        draws = self._draws is not False
        job = Job(
            microbatches, run, weights, seed, pinned, draws=draws, feedback=feedback, only=only
        )
        before = torch.get_rng_state()
        self._start(job)
        if not job.draws and self._drew_aside(job, before):
            # Somebody drew from the process's own generator, though this model had drawn nothing
            # before: forget this run, and do it again with a generator for each microbatch.
            if feedback is not None:
                feedback.rollback()
            job = Job(
                microbatches, run, weights, seed, pinned, draws=True, feedback=feedback, only=only
            )
            self._start(job)
            self._draws = True
        elif self._draws is None:
            self._draws = job.drew.is_set()
        return job.report()

    def _start(self, job: Job) -> None:
        if job.pinned:
            own = [int(job.weights[index] > 0) for index in job.leaves]
            job.shares = Shares(own, stealing=False)
        else:
            job.shares = Shares(workload_sizes(len(job.queue), self.workloads))
        self._work_on(job)

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
    def outdate(self) -> None:
        """Make the next run take over everything from the module, whatever its versions say."""

    @abstractmethod
    def refresh(self) -> None:
        """Take over everything from the module now."""

    @abstractmethod
    def close(self) -> None:
        """Dismiss threads and replicas; closing twice does nothing."""

    @abstractmethod
    def _work_on(self, job: Job) -> None:
        """Run all microbatches of ``job`` that weigh something."""

    @abstractmethod
    def _drew_aside(self, job: Job, before: Tensor) -> bool:
        """Tell whether a replica drew from its process's own generator, and put that back."""


class Job:
    """The state of one run, shared by the threads of the crew.

    Args:
        only: The microbatches that this crew runs, while others run elsewhere; None for all.
    """

    def __init__(
        self,
        microbatches: Sequence[Nested],
        run: Callable[[Turn], Any],
        weights: Sequence[float],
        seed: tuple[int, ...],
        pinned: bool,
        draws: bool,
        feedback: Feedback | None,
        only: range | None,
    ) -> None:
        self.microbatches = microbatches
        self.run = run
        self.weights = weights
        self.seed = seed
        self.pinned = pinned
        self.draws = draws
        self.feedback = feedback
        self.drew = threading.Event()
        self.drew_aside = threading.Event()  # from the own generator of a worker's process
        self.sums = PartialSums(len(microbatches))
        self.leaves = range(len(microbatches)) if only is None else only
        self.queue = [index for index in self.leaves if weights[index] > 0]
        for index in self.leaves:
            if not weights[index] > 0:
                self.sums.put(index, None)
        self.shares = Shares([])
        self.failed = False
        self.lock = threading.Lock()
        self.results: list[Any] = [None] * len(microbatches)
        self.replica_of = [-1] * len(microbatches)
        self.spans: list[Span] = []
        self.seconds = [0.0] * len(microbatches)

    def take(self, replica: int) -> int | None:
        """Return the next microbatch for ``replica``; None when none is left or one failed."""
        with self.lock:
            place = None if self.failed else self.shares.take(replica)
        return None if place is None else self.queue[place]

    def turn(self, replica: Replica, index: int) -> Turn:
        """Put microbatch ``index`` into the hands of ``replica``."""
        seed = derive_seed(*self.seed, index) if self.draws else None
        return Turn(
            replica=replica, index=index, batch=self.microbatches[index], seed=seed, drew=self.drew
        )

    def report(self) -> Report:
        """Return what the run gave, when it is over."""
        return Report(
            results=self.results,
            operands=self.sums.operands(),
            sums=self.sums.waiting(),
            replica_of=self.replica_of,
            spans=sorted(self.spans, key=lambda span: span.start_s),
            seconds=self.seconds,
        )


def default_intra_op(devices: Sequence[torch.device]) -> int:
    """Return the threads inside operators that give every CPU replica its share of the cores."""
    on_cpu = sum(device.type == "cpu" for device in devices)
    return max(1, num_cores() // max(1, on_cpu))


def blame(error: BaseException, replica: Replica, microbatch: int) -> None:
    """Note on ``error`` where it was raised."""
    error.add_note(
        f"Raised by replica {replica.index} on {replica.device}, microbatch {microbatch}."
    )

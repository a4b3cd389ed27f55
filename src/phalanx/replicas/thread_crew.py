"""A crew of threads in this process that runs microbatches on replicas."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from phalanx.clock import now_s
from phalanx.codecs import Feedback
from phalanx.errors import ConfigError
from phalanx.memory import keep_freed_memory
from phalanx.plan import BufferRules, Shares, check_workloads, workload_sizes
from phalanx.replicas.batch_norm import batch_norm_names, synchronise_batch_norm
from phalanx.replicas.draws import Draws, derive_seed
from phalanx.replicas.intra_op import num_cores
from phalanx.replicas.meeting import Meeting
from phalanx.replicas.modes import CallerModes
from phalanx.replicas.replica import Replica
from phalanx.replicas.stopwatch import Stopwatch
from phalanx.replicas.sums import Partial, PartialSums
from phalanx.replicas.team import Team
from phalanx.types import Nested

__all__ = ["Report", "Span", "ThreadCrew", "Turn", "blame", "default_intra_op"]

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
    """

    replica: Replica
    index: int
    batch: Nested
    seed: int | None

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
        replica_of: Who computed each microbatch; -1 for those left out.
        seconds: What each pinned microbatch took until its gradients were there: without waiting
            for other replicas, and before any merging; 0 for those left out.
    """

    results: list[Any]  # Any: whatever the caller's `run` returns
    operands: list[Partial] = field(default_factory=list)
    replica_of: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class ThreadCrew:
    """Replicas of one module, or of one module each, on threads of this process.

    Replicas on a module's own device share its parameter memory. Microbatches are handed out in
    consecutive shares by ``workloads``; a replica that runs dry takes from the one with most left.

    Args:
        source: The module that the user trains, or one for each device; parameters are read in
            place. Buffers of several modules go by their name after the module's index, such as
            ``"0.seen"``.
        devices: One per replica.
        workloads: Relative shares; equal by default; 0 switches a replica off.
        intra_op: Threads inside operators, per replica. Default: cores divided by CPU replicas.
        rules: What becomes of buffers that replicas write.
        timed: Wait for devices that work behind their thread's back, so that seconds are theirs.

    Attributes:
        sources: Each replica's module.
        parameters: All parameters, each once, in whose order gradients are summed.

    Raises:
        ConfigError: Workloads or `intra_op` do not fit the devices.

    Determinism: with the same microbatches and `intra_op`, the operands' sum is bitwise the same
    for any number of replicas on the same kind of device and for any timing.
    """

    def __init__(
        self,
        source: nn.Module | Sequence[nn.Module],
        devices: Sequence[torch.device],
        *,
        workloads: Sequence[float] | None = None,
        intra_op: int | None = None,
        rules: BufferRules | None = None,
        timed: bool = False,
    ) -> None:
        self.workloads = list(workloads) if workloads is not None else [1.0] * len(devices)
        check_workloads(self.workloads, len(devices))
        if intra_op is not None and intra_op < 1:
            raise ConfigError(f"`intra_op` must be at least 1 thread, but is {intra_op!r}.")
        alone = isinstance(source, nn.Module)
        sources = [source] * len(devices) if isinstance(source, nn.Module) else list(source)
        self.sources = tuple(sources)
        self.parameters = _all_parameters(sources)
        self.devices = tuple(devices)
        self.intra_op = intra_op or default_intra_op(devices)
        self._timed = timed
        keep_freed_memory()
        self.replicas = [
            Replica(
                own,
                device,
                index,
                all_parameters=self.parameters,
                prefix="" if alone else f"{index}.",
                rules=rules,
            )
            for index, (own, device) in enumerate(zip(sources, devices, strict=True))
        ]
        # Replicas of one module see the same changes, so one of them watches for all.
        self._watchers = self.replicas[:1] if alone else self.replicas
        self._places = [
            (owner, key, parameter, parameter.data_ptr())
            for own in dict.fromkeys(sources)
            for owner in own.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._meeting = self._synchronise(sources[0], rules) if alone and rules else None
        self._team = Team(len(devices), intra_op=self.intra_op)
        self._draws: bool | None = (
            None  # None: not known yet whether the model draws random numbers
        )

    def _synchronise(self, source: nn.Module, rules: BufferRules) -> Meeting | None:
        """Let the replicas' batch norms meet where statistics are to be the whole batch's."""
        names = [
            name
            for name in batch_norm_names(source)
            if rules.of(f"{name}.running_mean" if name else "running_mean") == "sync"
        ]
        if not names or len(self.replicas) == 1:
            return None
        meeting = Meeting()
        synchronise_batch_norm([replica.module for replica in self.replicas], names, meeting)
        return meeting

    @property
    def meets(self) -> bool:
        """Whether replicas wait for each other inside the model (synchronised batch norm)."""
        return self._meeting is not None

    def open_meeting(self, members: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Say which replicas take part in the run of the body, where they wait for each other."""
        if self._meeting is None:
            return contextlib.nullcontext()
        return self._meeting.open(members)

    @contextlib.contextmanager
    def attending(self, replica: int) -> Iterator[None]:
        """Take part in the meeting until the body ends, so that nobody waits any longer then."""
        if self._meeting is None:
            yield
            return
        # Torch runs all backward passes of one GPU on one thread of its own, where the first
        # replica would wait for those behind it.
        with self._meeting.attending(replica), torch.autograd.set_multithreading_enabled(False):
            yield

    def stopwatch(self, replica: int) -> Stopwatch:
        """Measure what ``replica`` does from now on; to be called in its thread."""
        meeting = self._meeting
        return Stopwatch(
            self.devices[replica],
            waited_s=lambda: 0.0 if meeting is None else meeting.waited_s(replica),
            settles=self._timed,
        )

    @property
    def draws(self) -> bool | None:
        """Whether the model has drawn random numbers so far; None before the first run."""
        return self._draws

    def matches_source(self) -> bool:
        """Tell whether the replicas can follow all that was done to the module since."""
        return all(
            owner._parameters.get(key) is parameter and parameter.data_ptr() == pointer
            for owner, key, parameter, pointer in self._places
        ) and all(replica.matches_source() for replica in self._watchers)

    def outdate(self) -> None:
        """Make the next run copy everything from the module, whatever its versions say."""
        for replica in self.replicas:
            replica.outdate()

    def __len__(self) -> int:
        return len(self.replicas)

    def each(self, task: Callable[[int], T]) -> list[T]:
        """Run ``task(replica index)`` in every replica's thread at once.

        After :meth:`close`, for a backward pass that is still to come, on threads of its own.
        """
        if not self._team.closed:
            return self._team.each(task)
        with contextlib.closing(Team(len(self.replicas), intra_op=self.intra_op)) as team:
            return team.each(task)

    def close(self) -> None:
        """Dismiss the threads; closing twice does nothing."""
        self._team.close()

    def run(
        self,
        microbatches: Sequence[Nested],
        run: Callable[[Turn], Any],  # Any: the caller's own result type
        *,
        weights: Sequence[float],
        seed: tuple[int, ...],
        pinned: bool = False,
        feedback: Feedback | None = None,
    ) -> Report:
        """Run every microbatch of weight above 0 on some replica.

        Args:
            run: Called in a replica's thread, under the caller's grad, inference and autocast
            modes. weights: What each microbatch stands for; one of weight 0 is left out.
            seed: Where the random numbers of this run start; each microbatch appends its index.
            pinned: Microbatch i goes to replica i and nowhere else.
            feedback: Each microbatch's gradient passes through its codec, in the slot of the
                microbatch's index; new errors are pending when this returns.

        Returns:
            The results by microbatch, and the sums along the tree of the gradients that ``run``
            left in the replicas' parameters and of the statistics that it left in their buffers.

        Raises:
            Exception: What ``run`` raised, with a note that names replica and microbatch. Nothing
                that the caller can see has changed then.
        """
        draws = self._draws is not False
        job = _Job(microbatches, run, weights, seed, pinned, draws=draws, feedback=feedback)
        before = torch.get_rng_state()
        self._work_on(job)
        if not job.draws and not torch.equal(before, torch.get_rng_state()):
            # Somebody drew from the process's own generator, though this model had drawn nothing
            # before: forget this run, and do it again with a generator for each microbatch.
            torch.set_rng_state(before)
            if feedback is not None:
                feedback.rollback()
            job = _Job(microbatches, run, weights, seed, pinned, draws=True, feedback=feedback)
            self._work_on(job)
            self._draws = True
        elif self._draws is None:
            self._draws = job.drew.is_set()
        return job.report()

    def _work_on(self, job: _Job) -> None:
        if job.pinned:
            job.shares = Shares([int(weight > 0) for weight in job.weights], stealing=False)
        else:
            job.shares = Shares(workload_sizes(len(job.queue), self.workloads))
        modes = CallerModes.capture(self.devices)
        shapes = [parameter.shape for parameter in self.parameters] if job.feedback else []
        members = [index for index, weight in enumerate(job.weights) if weight > 0]

        def serve(index: int) -> None:
            with modes.entered(self.devices[index]), self.attending(index):
                _serve(self.replicas[index], job, shapes, self.stopwatch(index))

        with self.open_meeting(members):
            self._team.each(serve)


class _Job:
    """The state of one run, shared by the threads of the crew."""

    def __init__(
        self,
        microbatches: Sequence[Nested],
        run: Callable[[Turn], Any],
        weights: Sequence[float],
        seed: tuple[int, ...],
        pinned: bool,
        draws: bool,
        feedback: Feedback | None,
    ) -> None:
        self.microbatches = microbatches
        self.run = run
        self.weights = weights
        self.seed = seed
        self.pinned = pinned
        self.draws = draws
        self.feedback = feedback
        self.drew = threading.Event()
        self.sums = PartialSums(len(microbatches))
        self.queue = [index for index, weight in enumerate(weights) if weight > 0]
        for index, weight in enumerate(weights):
            if not weight > 0:
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
        seed = derive_seed(*self.seed, index) if self.draws else None
        return Turn(
            replica=replica, index=index, batch=self.microbatches[index], seed=seed, drew=self.drew
        )

    def report(self) -> Report:
        return Report(
            results=self.results,
            operands=self.sums.operands(),
            replica_of=self.replica_of,
            spans=sorted(self.spans, key=lambda span: span.start_s),
            seconds=self.seconds,
        )


def _all_parameters(sources: Sequence[nn.Module]) -> list[nn.Parameter]:
    found = {id(p): p for source in dict.fromkeys(sources) for p in source.parameters()}
    return list(found.values())


def default_intra_op(devices: Sequence[torch.device]) -> int:
    """Return the threads inside operators that give every CPU replica its share of the cores."""
    on_cpu = sum(device.type == "cpu" for device in devices)
    return max(1, num_cores() // max(1, on_cpu))


def blame(error: BaseException, replica: Replica, microbatch: int) -> None:
    """Note on ``error`` where it was raised."""
    error.add_note(
        f"Raised by replica {replica.index} on {replica.device}, microbatch {microbatch}."
    )


def _serve(replica: Replica, job: _Job, shapes: Sequence[torch.Size], watch: Stopwatch) -> None:
    replica.refresh()
    while (index := job.take(replica.index)) is not None:
        start_s = now_s()
        try:
            job.results[index] = job.run(job.turn(replica, index))
            written = replica.statistics.collect(job.weights[index])
            gradients = replica.take_gradients()
            if job.feedback is not None:
                gradients = job.feedback.compress(index, gradients, shapes)
            job.seconds[index] = watch.lap()
            job.sums.put(index, Partial(gradients, written))
        except BaseException as error:
            job.failed = True
            replica.drop_gradients()
            replica.statistics.collect(0.0)
            blame(error, replica, index)
            raise
        job.replica_of[index] = replica.index
        job.spans.append(
            Span(replica=replica.index, microbatch=index, start_s=start_s, stop_s=now_s())
        )

"""A crew of worker processes that runs microbatches and outlives each of its workers.

    this process                                 worker processes
    module ──── parameters on the shelf ───────► the same memory
    thread i ── microbatch i ─────────────────►  forward, backward
             ◄─ loss, outputs, statistics ─────
             ◄─ gradients, in a slot on the shelf

Each worker has a thread here that hands it one microbatch after another, adds what comes back
along the tree, and notices at once when the worker is gone. Everything that has come back lies
here, so a death costs the microbatch in the worker's hands and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import PeerLost, StateError, UnsupportedError
from phalanx.plan import BufferRules, check_workloads
from phalanx.replicas.crew import Crew, Job, Span, default_intra_op
from phalanx.replicas.failures import WorkerFailure
from phalanx.replicas.intra_op import num_cores
from phalanx.replicas.mailbox import Mailbox, collect
from phalanx.replicas.mirror import Changes, Mirrored
from phalanx.replicas.modes import CallerModes
from phalanx.replicas.parcel import load, pack, pack_data, picklable_or_named
from phalanx.replicas.patience import LONGEST_S
from phalanx.replicas.replica import refuse_lazy
from phalanx.replicas.sent_once import Keep, OnceNames, SentOnce
from phalanx.replicas.settings import read_settings
from phalanx.replicas.shelf import Place, Shelf
from phalanx.replicas.sums import Partial
from phalanx.replicas.team import Team
from phalanx.replicas.worker import Birth, BirthPlace, Done, Errand, Failed, Task
from phalanx.replicas.worker_process import START_S, Lost, WorkerProcess, dismiss_all, rebuilt
from phalanx.types import Nested

__all__ = ["Portion", "ProcessCrew", "check_shareable"]

_LOOK_S = 0.02  # how often a thread without a worker looks whether the run is over
_CPU = torch.device("cpu")


class Portion(ABC):
    """A base for microbatches of which a worker is sent what it does not keep already."""

    # Any: whatever the run takes for its batch.
    @abstractmethod
    def for_worker(self, kept: dict[str, int]) -> Any:
        """Return what is to be sent; called in the worker's thread here.

        Args:
            kept: Notes on what runs have left there, which die with the worker; it may write to
                them.
        """


class ProcessCrew(Crew):
    """Replicas of one module in worker processes of this host.

    Args:
        source: The module that the user trains; all its parameters lie on the CPU.
        num_workers: Number of processes.
        shelf: Where its parameters lie, or will: those that do not yet are moved there. Kept as
            an attribute.
        shared: Objects that the run refers to, such as the loss; sent once, with the module.
        workloads: Relative shares; equal by default; 0 switches a worker off.
        intra_op: Threads inside operators, per worker.
        rules: What becomes of buffers that workers write.
        steps: Whether errands will step an optimizer: a worker is ready only when it has imported
            what that takes.
        timeout_s: How long one microbatch may take before its worker counts as hung; what is
            longer than three weeks, as infinity is, counts as that.
        on_failure: Called for every lost worker, in any thread; what it raises ends the run.

    Raises:
        ConfigError: The module cannot be sent, or options do not fit.
        UnsupportedError: It has parameters or buffers that processes cannot share.

    Determinism: as `ThreadCrew`, with the same bits, whoever dies.
    """

    _team: Team

    def __init__(
        self,
        source: nn.Module,
        num_workers: int,
        *,
        shelf: Shelf,
        shared: Sequence[object] = (),
        workloads: Sequence[float] | None = None,
        intra_op: int | None = None,
        rules: BufferRules | None = None,
        steps: bool = False,
        timeout_s: float = 300.0,
        on_failure: Callable[[WorkerFailure], None] = lambda _: None,
    ) -> None:
        self.workloads = list(workloads) if workloads is not None else [1.0] * num_workers
        check_workloads(self.workloads, num_workers)
        self.devices = (_CPU,) * num_workers
        self._intra_op = intra_op or default_intra_op(self.devices)
        _warn_of_crowd(num_workers, self._intra_op)
        self.parameters = list(source.parameters())
        check_shareable(source)
        self._source = source
        self.sources = (source,)
        self.shelf = shelf
        self._shared = list(shared)
        self._timeout_s = min(float(timeout_s), LONGEST_S)
        self._on_failure = on_failure
        self._pid = os.getpid()
        self._once = OnceNames()
        self._deferred: Exception | None = None
        self._moment: Changes | None = None
        self._as_of: Changes | None = None
        self._settings = read_settings()
        self._mail = [(Mailbox(shelf), Mailbox(shelf)) for _ in range(num_workers)]
        self._team = Team(num_workers, intra_op=self._intra_op, name="phalanx-crew")
        self._workers: list[WorkerProcess] = []
        self._dismiss = weakref.finalize(self, dismiss_all, self._workers)
        self._moved: list[nn.Parameter] = []
        try:
            elsewhere = [p for p in self.parameters if p.numel() and shelf.place_of(p) is None]
            self._moved = _move(elsewhere, shelf)
            self._pointers = [parameter.data_ptr() for parameter in self.parameters]
            self._mirrored = Mirrored(source, shelf)
            self._slots = _Slots(self.parameters, shelf)
            module = self._packed_module()
            self._birth = self._shelved(
                Birth(module, self._mirrored.places, self._slots.layout, rules, steps)
            )
            self._workers.extend(self._team.each(self._launch))
            self._team.each(self._await_first)
        except BaseException:
            self.close()
            raise

    # -- what crews have ---------------------------------------------

    @property
    def intra_op(self) -> int:
        """Threads inside operators, per worker."""
        return self._intra_op

    @property
    def pids(self) -> list[int]:
        """The workers' process numbers."""
        return [worker.pid for worker in self._workers]

    def __len__(self) -> int:
        return len(self.devices)

    def matches_source(self) -> bool:
        """Tell whether the workers can follow all that was done to the module since."""
        now = list(self._source.parameters())
        return (
            not self._team.closed
            and len(now) == len(self.parameters)
            and all(a is b for a, b in zip(now, self.parameters, strict=True))
            and [parameter.data_ptr() for parameter in now] == self._pointers
            and self._mirrored.can_follow()
        )

    def outdate(self) -> None:
        """Make the next run take over all buffers, whatever their versions say."""
        self._mirrored.outdate()

    def refresh(self) -> None:
        """Take over everything from the module with the next run, before which nothing is due."""
        self.outdate()

    @property
    def moment(self) -> Changes:
        """The module as the last run saw it."""
        assert self._moment is not None
        return self._moment

    def knows(self, moment: Changes) -> bool:
        """Tell whether workers can still be given the module as it was at ``moment``."""
        return self._mirrored.is_at(moment)

    @contextlib.contextmanager
    def as_of(self, moment: Changes) -> Iterator[None]:
        """Let workers see the module as it was at ``moment`` in runs of the body.

        For the backward pass of an earlier run, which may have to repeat the forward.
        """
        self._as_of = moment
        try:
            yield
        finally:
            self._as_of = None

    def close(self) -> None:
        """Dismiss threads and workers, and give moved parameters memory of their own."""
        if self._team.closed and os.getpid() == self._pid:
            for worker in self._workers:  # threads left by an interrupt may wait for them still
                worker.end()
        self._team.close()  # a call that is on in another thread ends first
        if not self._team.closed:
            return  # from inside of a call: threads go after it, and the workers with them
        self._dismiss()
        for parameter in self._moved:
            parameter.data = parameter.data.clone()
        self._moved = []

    # -- workers -----------------------------------------------------

    def _packed_module(self) -> bytes:
        numbers = {id(parameter): index for index, parameter in enumerate(self.parameters)}

        def aside(obj: Any) -> Any:
            if not isinstance(obj, nn.Parameter) or id(obj) not in numbers:
                return None
            place = self.shelf.place_of(obj)
            value = None if place is not None else pack(obj.detach())
            kind, others = type(obj), dict(obj.__dict__)
            return ("parameter", numbers[id(obj)], kind, place, value, obj.requires_grad, others)

        try:
            return pack((self._source, self._shared), aside)
        except Exception as error:  # whatever the user's objects raise when pickled
            raise picklable_or_named(self._source, error) from error

    def _shelved(self, birth: Birth) -> BirthPlace:
        """Put it where workers read it; a message that long would wait until one has started."""
        packed = np.frombuffer(pack(birth), dtype=np.uint8)
        room = self.shelf.allocate(len(packed), torch.uint8, _CPU)
        room.numpy()[:] = packed
        place = self.shelf.place_of(room)
        assert place is not None
        return BirthPlace(place)

    def _launch(self, index: int) -> WorkerProcess:
        mail = self._mail[index]  # a dead worker's, for its replacement: the shelf frees nothing
        return WorkerProcess(index, mail, self._intra_op, self._birth, self.shelf)

    def _await_first(self, index: int) -> None:
        try:
            if not self._workers[index].poll_ready(START_S):
                raise PeerLost(
                    f"Worker {index} must be ready within {START_S:g} s, but is not. Importing "
                    "what the module needs takes too long here; use crew='threads'.",
                    index,
                )
        except Lost as lost:
            if lost.own_doing:
                raise PeerLost(
                    f"Worker {index} must start, but {lost.reason} before it was ready; its own "
                    "output says why. A script must start its work under `if __name__ == "
                    "'__main__':`.",
                    index,
                ) from None
            self._replace(index, lost, None)
            self._await_first(index)

    def _replace(self, index: int, lost: Lost, microbatch: int | None) -> None:
        failure = WorkerFailure(
            worker=index,
            pid=self._workers[index].pid,
            reason=lost.reason,
            microbatch=microbatch,
            dump=lost.dump,
            noticed_s=lost.at_s,
        )
        if not self._team.closed:  # else it was left behind by an interrupt, and is being closed
            self._workers[index] = self._launch(index)
        self._on_failure(failure)

    def errand(self, index: int, make: Callable[[dict[str, int]], object]) -> bool:
        """Send worker ``index`` on an errand; return False if it is not there to complete it.

        To be called in the worker's thread (see :meth:`each`). A loss on the way is told by the
        next run: in the middle of an optimizer step nothing may be raised.

        Args:
            make: Returns what is called with the `Worker`, over there, from notes on what earlier
                errands have left there; it may write to them. It has the last run's settings.
        """
        worker = self._workers[index]
        try:
            if not worker.poll_ready(0.0):
                return False
            notes = dict(worker.kept)
            errand = Errand(pack(make(notes)), self._settings)
            answer = worker.ask(errand, self._timeout_s)
        except Lost as lost:
            try:
                self._replace(index, lost, None)
            except Exception as error:  # too many losses, or the system starts no more processes
                self._deferred = error
            return False
        except Exception as error:  # what its replacement raised when it was started
            self._deferred = error
            return False
        if isinstance(answer, Failed):
            return False  # and what it failed to keep is not noted
        worker.kept = notes
        return True

    def _drew_aside(self, job: Job, before: Tensor) -> bool:  # noqa: ARG002
        return job.drew_aside.is_set()

    # -- a run -------------------------------------------------------

    def _work_on(self, job: Job) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "A process crew must be used by the process that made it, but this is a fork of "
                "it. Make a trainer or a group in the child."
            )
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            raise deferred
        self._moment = self._mirrored.changes() if self._as_of is None else self._as_of
        self._settings = read_settings()  # here: some of them are the calling thread's
        run = _Run(
            job=job,
            task=Task(
                index=-1,
                run=self._packed_run(job),
                batch=b"",
                weight=0.0,
                seed=job.seed if job.draws else None,
                slot=-1,
                changes=self._moment,
                modes=CallerModes.capture(self.devices),
                settings=self._settings,
            ),
            desk=_Desk(job, [workload > 0 for workload in self.workloads]),
            shapes=[parameter.shape for parameter in self.parameters] if job.feedback else [],
        )
        self._team.each(lambda index: self._look_after(index, run), on_interrupt=run.desk.fail)

    def _packed_run(self, job: Job) -> bytes:
        numbers = {id(each): index for index, each in enumerate(self._shared)}
        return pack(
            job.run, lambda obj: ("shared", numbers[id(obj)]) if id(obj) in numbers else None
        )

    def _look_after(self, index: int, run: _Run) -> None:
        """Keep worker ``index`` busy until the run is over."""
        try:
            while not run.desk.over:
                if not self._is_ready(index, run):
                    continue
                microbatch = run.desk.take(index)
                if microbatch is None:
                    return
                try:
                    self._compute(index, microbatch, run)
                except Lost as lost:
                    run.desk.give_back(microbatch)
                    self._replace(index, lost, microbatch)
        except BaseException:
            run.desk.fail()
            raise

    def _is_ready(self, index: int, run: _Run) -> bool:
        worker = self._workers[index]
        try:
            if worker.poll_ready(0.0):
                return True
            run.desk.leave_to_others(index)
            if worker.poll_ready(_LOOK_S):
                return True
            worker.check_start()
        except Lost as lost:
            self._replace(index, lost, None)
        return False

    def _compute(self, index: int, microbatch: int, run: _Run) -> None:
        worker, job = self._workers[index], run.job
        slot = self._slots.take() if run.task.modes.grad else None
        task = replace(
            run.task,
            index=microbatch,
            batch=self._packed_batch(worker, job.microbatches[microbatch]),
            weight=job.weights[microbatch],
            slot=-1 if slot is None else slot.region,
            reply=worker.answers.place,
            changes=run.task.changes.since(worker.knows),
        )
        answer = worker.ask(task, self._timeout_s)
        if isinstance(answer, Failed):
            raise rebuilt(
                answer,
                f"Raised by replica {index} in process {worker.pid}, microbatch {microbatch}.",
            )
        worker.knows = run.task.changes.version
        worker.answers.reserve(answer.result_bytes)
        self._count(index, microbatch, answer, slot, run)

    def _packed_batch(self, worker: WorkerProcess, batch: Nested) -> bytes:
        """Pack a microbatch; what it has to be sent once goes first, where the worker lacks it."""
        found: dict[str, SentOnce] = {}
        if isinstance(batch, Portion):
            batch = batch.for_worker(worker.kept)
        worker.mailbox.clear()

        def aside(obj: Any) -> Any:
            if not isinstance(obj, SentOnce):
                return worker.mailbox.put(obj)
            found[name := self._once.of(obj)] = obj
            return ("once", name)

        packed = pack_data(batch, aside)
        for name in [name for name in found if name not in worker.kept]:
            keep = Keep(name, found[name], self._once.alive())
            answer = worker.ask(Errand(pack_data(keep)), START_S)
            if isinstance(answer, Failed):
                raise rebuilt(answer, f"Raised by worker {worker.index}, which was sent data.")
            keep.note(worker.kept)
        return packed

    def _count(
        self, index: int, microbatch: int, done: Done, slot: _Slot | None, run: _Run
    ) -> None:
        job = run.job
        gradients: list[Tensor | None] = [None] * len(self.parameters)
        if slot is not None:
            gradients = [
                g if there else None for g, there in zip(slot.gradients, done.present, strict=True)
            ]
        if job.feedback is not None:
            gradients = job.feedback.compress(microbatch, gradients, run.shapes)
        if done.drew:
            job.drew.set()
        if done.drew_aside:
            job.drew_aside.set()
        job.results[microbatch] = load(done.result, lambda pid: collect(self.shelf, *pid[1:]))
        job.seconds[microbatch] = done.busy_s
        job.replica_of[microbatch] = index
        job.spans.append(
            Span(
                replica=index,
                microbatch=microbatch,
                start_s=done.start_s,
                stop_s=done.stop_s,
            )
        )
        job.sums.put(microbatch, Partial(gradients, done.statistics.open(), owners=(slot,)))
        run.desk.count()


@dataclass(frozen=True)
class _Run:
    """What the threads of one run share."""

    job: Job
    task: Task  # what all tasks of the run have in common
    desk: _Desk
    shapes: list[torch.Size]


class _Desk:
    """Where threads fetch microbatches, and bring back those of workers that were lost.

    Args:
        active: Who may take what was brought back; not those that are switched off.
    """

    def __init__(self, job: Job, active: Sequence[bool]) -> None:
        self._job = job
        self._active = active
        self._changed = threading.Condition()
        self._returned: list[int] = []
        self._left = len(job.queue)

    @property
    def over(self) -> bool:
        """Whether everything is done, or something failed."""
        return self._left == 0 or self._job.failed

    def take(self, replica: int) -> int | None:
        """Return the next microbatch; wait while others might still bring one back."""
        with self._changed:
            while not self.over:
                microbatch = self._job.take(replica)
                if microbatch is None and self._returned and self._active[replica]:
                    microbatch = self._returned.pop(0)
                if microbatch is not None:
                    return microbatch
                self._changed.wait()
        return None

    def give_back(self, microbatch: int) -> None:
        """Let another one compute it."""
        with self._changed:
            self._returned.append(microbatch)
            self._changed.notify_all()

    def leave_to_others(self, replica: int) -> None:
        """Give what only ``replica`` would take to whoever is free."""
        if self._job.pinned:
            while (microbatch := self._job.take(replica)) is not None:
                self.give_back(microbatch)

    def count(self) -> None:
        """One more is done."""
        with self._changed:
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()

    def fail(self) -> None:
        """End the run."""
        with self._changed:
            self._job.failed = True
            self._changed.notify_all()


class _Slot:
    """Shared memory for the gradients of one microbatch; free again when nobody holds it."""

    def __init__(self, region: int, gradients: list[Tensor | None]) -> None:
        self.region = region
        self.gradients = gradients


class _Slots:
    """Slots, made when there are none free."""

    def __init__(self, parameters: Sequence[nn.Parameter], shelf: Shelf) -> None:
        self._flat = [torch.empty(p.numel(), dtype=p.dtype, device="meta") for p in parameters]
        self.shelf = shelf
        self._lock = threading.Lock()
        self._free: list[tuple[int, list[Tensor | None]]] = []
        self.layout: list[Place | None] = []
        region, gradients = self._make()
        self.layout = [None if g is None else shelf.place_of(g) for g in gradients]
        self._free.append((region, gradients))

    def take(self) -> _Slot:
        """Return a free slot; it is free again when it is collected."""
        with self._lock:
            region, gradients = self._free.pop() if self._free else self._make()
        slot = _Slot(region, gradients)
        weakref.finalize(slot, self._free.append, (region, gradients)).atexit = False
        return slot

    def _make(self) -> tuple[int, list[Tensor | None]]:
        tensors = self.shelf.allocate_like(self._flat)
        places = [self.shelf.place_of(tensor) for tensor in tensors]
        region = next((place.region for place in places if place is not None), -1)
        return region, [t if t.numel() else None for t in tensors]


def _move(parameters: list[nn.Parameter], shelf: Shelf) -> list[nn.Parameter]:
    """Move parameters that the optimizer does not hold, such as frozen ones, to the shelf."""
    for parameter, place in zip(parameters, shelf.allocate_like(parameters), strict=True):
        parameter.data = place.copy_(parameter.detach())
    return parameters


def _warn_of_crowd(num_workers: int, intra_op: int) -> None:
    if num_workers * intra_op > num_cores():
        warnings.warn(
            f"`replicas` should be at most the {num_cores()} cores of this machine, but is "
            f"{num_workers} processes × {intra_op} threads: they will wait for each other.",
            stacklevel=2,
        )


def check_shareable(source: nn.Module) -> None:
    """Refuse a module whose tensors processes cannot share; nothing is done to it.

    Raises:
        ConfigError: A parameter has no shape yet.
        UnsupportedError: A tensor lies on another device, or is not dense.
    """
    refuse_lazy(source)
    tensors = {"Parameter": source.named_parameters(), "Buffer": source.named_buffers()}
    for kind, named in tensors.items():
        for name, tensor in named:
            if tensor.device.type != "cpu":
                raise UnsupportedError(
                    f"{kind} `{name}` must lie on the CPU for crew='processes', but is on "
                    f"{tensor.device}. Use crew='threads', which serves several devices from one "
                    "process."
                )
            if tensor.layout is not torch.strided or tensor.is_quantized:
                told = "quantized" if tensor.is_quantized else f"of layout {tensor.layout}"
                raise UnsupportedError(
                    f"{kind} `{name}` must be dense for crew='processes', but is {told}. Use "
                    "crew='threads'."
                )

"""An executor of worker processes that runs microbatches and outlives each of its workers.

    this process                                 worker processes
    module ──── parameters in the pool ───────► the same memory
    thread i ── microbatch i ─────────────────►  forward, backward
             ◄─ loss, outputs, statistics ─────
             ◄─ gradients, in a buffer in the pool

Each worker has a thread here that hands it one microbatch after another, adds what comes back
along the tree, and notices at once when the worker is gone. Everything that has come back lies
here, so a death costs the microbatch in the worker's hands and nothing else.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.execution.contract import (
    Executor,
    ParameterPlaces,
    RunState,
    Span,
    default_intra_op,
)
from phalanx.execution.failures import WorkerFailure
from phalanx.execution.gradient_buffers import GradientBuffer, GradientBuffers
from phalanx.execution.partial_sums import PartialSum
from phalanx.execution.reduction import LocalReduction
from phalanx.execution.settings import read_settings
from phalanx.execution.sharded_optimizer import FlatStepper, Stepper, open_stepper
from phalanx.execution.shared_objects import PackedObjects, SharedObjects
from phalanx.execution.source_sync import Changes, SourceSync
from phalanx.execution.thread_pool import ThreadPool
from phalanx.execution.timeouts import LONGEST_S
from phalanx.execution.worker_client import START_S, Lost, WorkerProcess, rebuilt
from phalanx.execution.worker_group import WorkerGroup
from phalanx.execution.worker_main import (
    AdoptObjects,
    Done,
    Failed,
    MicrobatchMessage,
    RemoteCall,
    RunSpec,
    WorkerInit,
)
from phalanx.memory import FlatParameters, SharedMemoryPool
from phalanx.plan import BufferRules, check_workloads
from phalanx.replicas import (
    CallerModes,
    Definitions,
    RunOrder,
    num_cores,
    pack,
    pack_data,
    picklable_or_named,
    refuse_aliases,
    refuse_compiled_in_place,
    refuse_lazy,
    refuse_scripts,
    statistic_specs,
)

__all__ = ["ProcessExecutor"]

_LOOK_S = 0.02  # how often a thread whose worker has nothing to do looks how all is
_CPU = torch.device("cpu")


class ProcessExecutor(Executor):
    """Replicas of one module in worker processes of this host.

    Args:
        source: The module that the user trains; all its parameters lie on the CPU.
        num_workers: Number of processes.
        pool: Where its parameters lie, or will: those that do not yet are moved there. Kept as
            an attribute.
        shared: Objects that runs refer to, such as the loss; sent with the module, and anew when
            anything that they reach has changed.
        workloads: Relative shares; equal by default; 0 switches a worker off.
        intra_op: Threads inside operators, per worker.
        rules: What becomes of buffers that workers write.
        timeout_s: How long one microbatch may take before its worker counts as hung; what is
            longer than three weeks, as infinity is, counts as that.
        on_failure: Called for every lost worker, in any thread; what it raises ends the run.

    Raises:
        ConfigError: The module cannot be sent, or options do not fit.
        UnsupportedError: It has parameters or buffers that processes cannot share.

    Determinism: as `ThreadExecutor`, with the same bits, whoever dies.
    """

    _threads: ThreadPool

    def __init__(
        self,
        source: nn.Module,
        num_workers: int,
        *,
        pool: SharedMemoryPool,
        shared: Sequence[object] = (),
        workloads: Sequence[float] | None = None,
        intra_op: int | None = None,
        rules: BufferRules | None = None,
        timeout_s: float = 300.0,
        on_failure: Callable[[WorkerFailure], None] = lambda _: None,
    ) -> None:
        self.workloads = list(workloads) if workloads is not None else [1.0] * num_workers
        check_workloads(self.workloads, num_workers)
        self.devices = (_CPU,) * num_workers
        self._intra_op = intra_op or default_intra_op(self.devices)
        _warn_of_oversubscription(num_workers, self._intra_op)
        self.parameters = list(source.parameters())
        _check_shareable(source)
        self._source = source
        self.sources = (source,)
        self.pool = pool
        self._shared = list(shared)
        self._timeout_s = min(float(timeout_s), LONGEST_S)
        self._pid = os.getpid()
        self._order = RunOrder(self.devices)
        self._settings = read_settings()
        self._threads = ThreadPool(num_workers, intra_op=self._intra_op, name="phalanx-executor")
        self._definitions = Definitions(source)
        self._workers = WorkerGroup(
            self._threads, pool, num_workers, self._intra_op, self._definitions, on_failure
        )
        self._moved: list[nn.Parameter] = []
        try:
            elsewhere = [p for p in self.parameters if p.numel() and pool.handle_of(p) is None]
            self._moved = _move(elsewhere, pool)
            self._places = ParameterPlaces([source])
            self._sync = SourceSync(source, pool)
            specs = statistic_specs(source, rules if rules is not None else BufferRules())
            self._gradient_buffers = GradientBuffers(self.parameters, specs, pool)
            places, layout = self._sync.handles, self._gradient_buffers.layout
            packed = self._packed_module()
            self._objects = objects = SharedObjects(source, self._shared, pool, self._definitions)
            values = objects.globals_at_first
            definitions = tuple(self._definitions.packed)
            self._workers.start(
                WorkerInit(
                    definitions,
                    packed,
                    objects.packed,
                    places,
                    layout,
                    rules,
                    values,
                    num_workers,
                )
            )
        except BaseException:
            self.close()
            raise

    # -- what executors have ---------------------------------------------

    @property
    def intra_op(self) -> int:
        """Threads inside operators, per worker."""
        return self._intra_op

    @property
    def worker_pids(self) -> tuple[int, ...]:  # type: ignore[override]
        """The worker processes' numbers."""
        return tuple([worker.pid for worker in self._workers])

    def open_reduction(self, flat: FlatParameters) -> LocalReduction:
        """Sum gradients into ``flat``, each worker's thread its part."""
        return LocalReduction(flat, len(self), self.places_of(flat), alike=True)

    def open_optimizer(self, optimizer: Optimizer, flat: FlatParameters) -> Stepper:
        """Share the optimizer's step among the threads of this process."""
        return open_stepper(optimizer, flat, partial(FlatStepper, num_parts=len(self)))

    def __len__(self) -> int:
        return len(self.devices)

    def matches_source(self) -> bool:
        """Tell whether the workers can follow all that was done to the module since."""
        return not self._threads.closed and self._sync.can_follow() and self._places.are_still()

    def outdate(self) -> None:
        """Make the next run take over all buffers, whatever their versions say."""
        self._sync.outdate()

    def refresh(self) -> None:
        """Let the next run take over everything: workers compute nothing before."""
        self.outdate()

    def close(self) -> None:
        """Dismiss threads and workers, and give moved parameters memory of their own."""
        if self._threads.closed and os.getpid() == self._pid:
            for worker in self._workers:  # threads left by an interrupt may wait for them still
                worker.end()
        self._threads.close()  # a call that is on in another thread ends first
        if not self._threads.closed:
            return  # from inside of a call: threads go after it, and the workers with them
        self._workers.dismiss()
        for parameter in self._moved:
            parameter.data = parameter.data.clone()
        self._moved = []

    # -- workers -----------------------------------------------------

    def _packed_module(self) -> bytes:
        numbers = {id(parameter): index for index, parameter in enumerate(self.parameters)}

        def aside(obj: Any) -> Any:
            if not isinstance(obj, nn.Parameter) or id(obj) not in numbers:
                return None
            place = self.pool.handle_of(obj)
            value = None if place is not None else pack(obj.detach())
            kind, others = type(obj), dict(obj.__dict__)
            return ("parameter", numbers[id(obj)], kind, place, value, obj.requires_grad, others)

        try:
            return pack(self._source, aside, self._definitions)
        except Exception as error:  # whatever the user's objects raise when pickled
            raise picklable_or_named(self._source, error) from None

    # -- a run -------------------------------------------------------

    def _work_on(self, state: RunState) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "A process executor must be used by the process that made it, but this is a fork "
                "of it. Make a trainer or a group in the child."
            )
        assert not state.task.goes_back
        changes = self._sync.changes()
        self._objects.look()
        self._settings = read_settings()  # here: some of them are the calling thread's
        modes = CallerModes.capture(self.devices)
        run = _ProcessRun(
            state=state,
            spec=self._packed_spec(state, modes),
            wants_gradients=modes.grad,
            changes=changes,
            objects=self._objects.packed,
        )
        self._prepare_first(run)
        self._threads.each(
            lambda index: self._look_after(index, run), on_interrupt=state.queue.fail
        )

    def _packed_spec(self, state: RunState, modes: CallerModes) -> bytes:
        numbers = {id(each): index for index, each in enumerate(self._shared)}
        return pack(
            RunSpec(
                state.task,
                modes,
                self._settings,
                dataclasses.replace(state.rng, alone=True),
                self._objects.changed_globals(),
            ),
            lambda obj: ("shared", numbers[id(obj)]) if id(obj) in numbers else None,
            self._definitions,
        )

    def _prepare_first(self, run: _ProcessRun) -> None:
        """Prepare what workers do first, here: threads of their own would wait for each other."""
        for index, worker in enumerate(self._workers):
            microbatch = run.state.queue.take(index) if worker.ready else None
            if microbatch is not None:
                run.first[index] = self._prepare(index, microbatch, run)

    def _look_after(self, index: int, run: _ProcessRun) -> None:
        """Keep worker ``index`` busy until the run is over."""
        queue = run.state.queue
        try:
            message = run.first.pop(index, None)
            while not queue.over:
                if message is None:
                    if not self._is_ready(index, run):
                        continue
                    microbatch = queue.take(index, _LOOK_S)
                    if microbatch is None:
                        continue
                    message = self._prepare(index, microbatch, run)
                try:
                    self._compute(index, message, run)
                except Lost as lost:
                    queue.give_back(message.microbatch)
                    self._workers.replace(index, lost, message.microbatch)
                message = None
        except BaseException:
            queue.fail()
            raise

    def _is_ready(self, index: int, run: _ProcessRun) -> bool:
        worker = self._workers[index]
        try:
            if worker.poll_ready(0.0):
                worker.check_alive()
                return True
            if run.state.owners is not None:
                run.state.queue.leave_to_others(index)
            if worker.poll_ready(_LOOK_S):
                return True
            worker.check_start()
        except Lost as lost:
            self._workers.replace(index, lost)
        return False

    def _prepare(self, index: int, microbatch: int, run: _ProcessRun) -> _SentMicrobatch:
        """Pack a microbatch for worker ``index``; its rows go where that one reads them."""
        worker, state = self._workers[index], run.state
        worker.mailbox.clear()
        buffer = self._gradient_buffers.take() if run.wants_gradients else None
        batch = state.pieces[microbatch]
        changes = run.changes.since(worker.version)
        task = MicrobatchMessage(
            index=microbatch,
            spec=run.spec,
            rows=pack_data((batch, changes), worker.mailbox.put, self._definitions),
            weight=state.weights[microbatch],
            seed=state.seed,
            gradient_buffer=-1 if buffer is None else buffer.region,
            reply=worker.answers.place,
        )
        return _SentMicrobatch(microbatch, buffer, pack(task))

    def _compute(self, index: int, message: _SentMicrobatch, run: _ProcessRun) -> None:
        worker = self._workers[index]
        self._send_objects(worker, run.objects)
        answer = worker.ask(message.packed, self._timeout_s)
        if isinstance(answer, Failed):
            raise rebuilt(
                answer,
                f"Raised by replica {index} in process {worker.pid}, "
                f"microbatch {message.microbatch}.",
            )
        worker.version = run.changes.version
        worker.answers.reserve(answer.result_bytes)
        self._count(index, message, answer, run)

    def _send_objects(self, worker: WorkerProcess, objects: PackedObjects) -> None:
        if worker.objects == objects.version:
            return
        call = RemoteCall(AdoptObjects(objects), self._settings)
        answer = worker.ask(pack(call), START_S)
        if isinstance(answer, Failed):
            raise rebuilt(answer, f"Raised by worker {worker.index}, which was sent the loss.")
        worker.objects = objects.version

    def _count(self, index: int, message: _SentMicrobatch, done: Done, run: _ProcessRun) -> None:
        state, microbatch, buffer = run.state, message.microbatch, message.gradient_buffer
        specs, weight = self._gradient_buffers.layout.specs, state.weights[microbatch]
        gradients, statistics = done.written.read(buffer, specs, weight)
        if done.drew:
            state.rng_use.drew = True
        if done.drew_hidden:
            state.rng_use.hidden = True
        state.results[microbatch] = done.result
        state.seconds[microbatch] = done.seconds
        state.replica_of[microbatch] = index
        state.spans.append(
            Span(
                replica=index,
                microbatch=microbatch,
                start_s=done.start_s,
                stop_s=done.stop_s,
            )
        )
        state.put(microbatch, PartialSum(gradients, statistics, owners=(buffer,)))
        state.queue.count()


@dataclass(frozen=True)
class _ProcessRun:
    """What the threads of one run share."""

    state: RunState
    spec: bytes  # what all tasks of the run have in common
    wants_gradients: bool
    changes: Changes  # what workers take over from the module
    objects: PackedObjects
    first: dict[int, _SentMicrobatch] = field(default_factory=dict)  # by worker


@dataclass(frozen=True)
class _SentMicrobatch:
    """A microbatch as it is sent to one worker."""

    microbatch: int
    gradient_buffer: GradientBuffer | None  # takes its gradients
    packed: bytes


def _move(parameters: list[nn.Parameter], pool: SharedMemoryPool) -> list[nn.Parameter]:
    """Move parameters that the optimizer does not hold, such as frozen ones, to the pool."""
    for parameter, place in zip(parameters, pool.allocate_like(parameters), strict=True):
        parameter.data = place.copy_(parameter.detach())
    return parameters


def _warn_of_oversubscription(num_workers: int, intra_op: int) -> None:
    if num_workers * intra_op > num_cores():
        warnings.warn(
            f"`replicas` should be at most the {num_cores()} cores of this machine, but is "
            f"{num_workers} processes × {intra_op} threads: they will wait for each other.",
            stacklevel=2,
        )


def _check_shareable(source: nn.Module) -> None:
    """Refuse a module whose tensors processes cannot share; nothing is done to it.

    Raises:
        ConfigError: A parameter has no shape yet, or a hook would collect in the workers.
        UnsupportedError: A tensor lies on another device, or is not dense; or copies of the module
            would not be compiled as it is.
    """
    refuse_lazy(source)
    refuse_aliases(source)
    refuse_scripts(source)
    refuse_compiled_in_place(source)
    _refuse_collecting_hooks(source)
    tensors = {"Parameter": source.named_parameters(), "Buffer": source.named_buffers()}
    for kind, named in tensors.items():
        for name, tensor in named:
            if tensor.device.type != "cpu":
                raise UnsupportedError(
                    f"{kind} `{name}` must lie on the CPU for executor='processes', but is on "
                    f"{tensor.device}. Use executor='threads', which serves several devices from "
                    "one "
                    "process."
                )
            if tensor.layout is not torch.strided or tensor.is_quantized:
                told = "quantized" if tensor.is_quantized else f"of layout {tensor.layout}"
                raise UnsupportedError(
                    f"{kind} `{name}` must be dense for executor='processes', but is {told}. Use "
                    "executor='threads'."
                )


def _refuse_collecting_hooks(source: nn.Module) -> None:
    """Refuse hooks with a container of this process's, which would stay as it is here."""
    for path, module in source.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            variables = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
            for name, value in variables.items():
                if isinstance(value, (list, dict, set)):
                    where = f"`{path}`" if path else "`module`"
                    raise ConfigError(
                        f"A hook of {where} must not capture a list, dict or set in worker "
                        f"processes, as each would fill its own, but captures `{name}`. Return "
                        "from `forward` what it collects, or use executor='threads'."
                    )

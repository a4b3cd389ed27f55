"""What a worker process does: one replica, one microbatch after another.

It is started as a program of its own (see `worker_start.py`) that imports nothing of the user's but
modules: its `__main__` holds what it was told of the script's (see `Definitions`).

Whatever the worker has to keep lies in shared memory or comes with the message, so that losing it
at any instruction loses nothing but what it was about to do.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from phalanx.clock import now_s
from phalanx.errors import ConfigError
from phalanx.execution.contract import MicrobatchContext
from phalanx.execution.gradient_buffers import GradientBufferLayout, WrittenGradients
from phalanx.execution.gradient_writer import GradientWriter
from phalanx.execution.mailbox import Outbox, collect
from phalanx.execution.settings import adopt_settings
from phalanx.execution.shared_objects import PackedObjects, unpack_objects
from phalanx.execution.source_sync import Changes, place_buffers, take_over
from phalanx.execution.stopwatch import Stopwatch
from phalanx.ipc import die_with_parent, fail_point, inject
from phalanx.memory import SharedMemoryPool, TensorHandle
from phalanx.plan import BufferRules
from phalanx.replicas import (
    CallerModes,
    PackedGlobals,
    Replica,
    RngPlan,
    add_definitions,
    adopt_globals,
    derive_seed,
    load,
    pack,
    refuse_other_parameters,
    set_intra_op,
    why_missing,
)
from phalanx.torch_internals import make_subclass

__all__ = [
    "AddDefinitions",
    "AdoptObjects",
    "Done",
    "Failed",
    "MicrobatchMessage",
    "ProcessArguments",
    "RegionsFollow",
    "RemoteCall",
    "RunSpec",
    "Worker",
    "WorkerInit",
    "WorkerInitHandle",
    "main",
    "serve",
]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ProcessArguments:
    """What a process is told first.

    Attributes:
        argv: The arguments of the script that runs.
        main: What `__main__` says of itself.
    """

    worker: int
    parent_pid: int
    intra_op: int
    fault: Any  # Any: a planted fault of the chaos tests, or None
    argv: list[str]
    main: dict[str, str | None]


@dataclass(frozen=True)
class RegionsFollow:
    """The next ``count`` regions of the pool follow."""

    count: int


@dataclass(frozen=True)
class AddDefinitions:
    """Code that the messages to come refer to; there is no answer."""

    packed: tuple[bytes, ...]


@dataclass(frozen=True)
class WorkerInit:
    """The model.

    Attributes:
        definitions: The code that it is of, where that cannot be imported.
        blob: The module, packed; parameters are places in the pool.
        objects: What runs refer to beside it.
        buffers: Where the module's buffers lie.
        layout: Where in a gradient buffer things lie; its region comes with each task.
        rules: What becomes of buffers that it writes.
        values: Those of global variables that the code of both reads.
        num_workers: How many workers the executor has.
    """

    definitions: tuple[bytes, ...]
    blob: bytes
    objects: PackedObjects
    buffers: list[TensorHandle | None]
    layout: GradientBufferLayout
    rules: BufferRules | None = None
    values: PackedGlobals = field(default_factory=dict)
    num_workers: int = 1


@dataclass(frozen=True)
class WorkerInitHandle:
    """Where a `WorkerInit` lies in the pool, packed."""

    place: TensorHandle


@dataclass(frozen=True)
class RunSpec:
    """What the microbatches of a run have in common.

    Attributes:
        task: What is to be called with the `MicrobatchContext`.
        settings: Those of the executor's process.
        rng: How microbatches get their random numbers.
        values: Of global variables that have changed since the worker was made.
    """

    task: Callable[[MicrobatchContext], Any]  # Any: the result, whatever the caller's
    modes: CallerModes
    settings: tuple[Any, ...]  # Any: see `read_settings`
    rng: RngPlan
    values: PackedGlobals = field(default_factory=dict)


@dataclass(frozen=True)
class MicrobatchMessage:
    """One microbatch.

    Attributes:
        spec: A `RunSpec`, packed: most of the time it is that of the microbatch before.
        rows: Its batch, and the `Changes` of the source, packed. They are unpacked when the
            settings of the spec hold, which may say how they are made.
        gradient_buffer: The region that takes the gradients; -1 for none.
        reply: Bytes that take what is large in the result; None for none.
    """

    index: int
    spec: bytes
    rows: bytes
    weight: float
    seed: tuple[int, ...]
    gradient_buffer: int
    reply: TensorHandle | None


@dataclass(frozen=True)
class RemoteCall:
    """Something else to do; the answer is None.

    Attributes:
        call: What is to be called with the `Worker`.
        settings: Those of the executor's process, where they matter.
    """

    call: Callable[[Worker], object]
    settings: tuple[Any, ...] | None = None  # Any: see `read_settings`


@dataclass(frozen=True)
class AdoptObjects:
    """Lets a worker take over what runs refer to, as it is now."""

    objects: PackedObjects

    def __call__(self, worker: Worker) -> None:
        """Do it, in the worker."""
        worker.adopt(self.objects)


class Needed:
    """What an outbox comes to need, as a number over there."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self._outbox.needed_bytes,)


@dataclass(frozen=True)
class Done:
    """What a microbatch gave.

    Attributes:
        result: What the task returned.
        written: What is in the gradient buffer.
        result_bytes: How much room those before it would take where the task said `reply`; known
            when they have been packed.
        drew: Whether the model drew random numbers.
        drew_hidden: Whether it drew any where calls from Python do not show it.
        seconds: As in `RunResult`.
    """

    result: Any  # Any: whatever the task returns
    written: WrittenGradients
    result_bytes: int | Needed
    drew: bool
    drew_hidden: bool
    start_s: float
    stop_s: float
    seconds: float


@dataclass(frozen=True)
class Failed:
    """What the worker raised: packed where it can be, and as text."""

    error: bytes | None
    kind: str
    text: str


def main() -> None:
    """Be a worker: the program that `worker_start.py` starts."""
    connection, dump = (Connection(int(word)) for word in sys.argv[1:3])
    serve(connection, dump)


def serve(connection: Connection, dump: Connection) -> None:
    """Work until the parent closes the connection or is gone."""
    try:
        arguments: ProcessArguments = load(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
    die_with_parent(arguments.parent_pid)
    sys.argv[:] = arguments.argv
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"]).update(arguments.main)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    faulthandler.register(signal.SIGUSR1, file=dump.fileno(), all_threads=True)
    inject(arguments.fault, arguments.worker)
    torch.set_num_interop_threads(1)
    set_intra_op(arguments.intra_op)
    pool = SharedMemoryPool()
    worker: Worker | None = None
    while True:
        try:
            packed = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            match message := load(packed) if worker is None else load(packed, worker.find):
                case RegionsFollow(count):
                    pool.receive(connection, count)
                    continue
                case AddDefinitions(definitions):
                    add_definitions(definitions)
                    continue
                case WorkerInitHandle(place):
                    init: WorkerInit = load(pool.at(place).numpy().tobytes())
                    add_definitions(init.definitions)
                    worker = Worker(arguments.worker, init, pool)
                    _warm_up()
                    fail_point("born")
                    answer = pack(None)
                case _:
                    assert worker is not None
                    answer = worker.work(message)
        except BaseException as error:
            answer = pack(_failed(error))
        try:
            connection.send_bytes(answer)
        except OSError:  # the parent is gone
            os._exit(0)


class Worker:
    """One replica in a process of its own.

    Attributes:
        pool: The memory that it shares with its executor.
    """

    def __init__(self, index: int, init: WorkerInit, pool: SharedMemoryPool) -> None:
        self.pool = pool
        self._writer = GradientWriter(init.layout, pool)
        self._module = _unpacked(init, pool)
        self._shared = unpack_objects(init.objects, self._module, pool)
        adopt_globals(init.values, [self._module, *self._shared])
        self._replica = Replica(self._module, _CPU, index, rules=init.rules)
        self._packed_spec = b""
        self._spec: RunSpec | None = None
        self._buffers_seen = -1

    def adopt(self, objects: PackedObjects) -> None:
        """Take over what runs refer to, in the place of what it was before."""
        self._shared = unpack_objects(objects, self._module, self.pool)
        self._spec = None  # it holds the former ones

    def work(self, message: Any) -> bytes:  # Any: the messages above
        """Answer one message."""
        if isinstance(message, RemoteCall):
            if message.settings is not None:
                adopt_settings(message.settings)
            message.call(self)
            return pack(None)
        assert isinstance(message, MicrobatchMessage)
        fail_point("microbatch taken")
        outbox = Outbox(self.pool, message.reply)
        done = self._compute(message, outbox)
        fail_point("before reply")
        return pack(done, outbox.put)

    def _compute(self, task: MicrobatchMessage, outbox: Outbox) -> Done:
        spec = self._begin(task.spec)
        batch, changes = load(task.rows, self.find)
        start_s = now_s()
        self._follow(changes)
        context = MicrobatchContext(
            replica=self._replica,
            index=task.index,
            batch=batch,
            seed=derive_seed(*task.seed, task.index),
            rng=spec.rng,
            in_worker=True,
        )
        watch = Stopwatch(_CPU)
        replica = self._replica
        try:
            with spec.modes.entered(_CPU):
                with replica.running():
                    fail_point("before forward")
                    result = spec.task(context)
                    fail_point("after backward")
                statistics = replica.statistics.collect(task.weight)
                gradients = replica.take_gradients()
                written = self._writer.fill(task.gradient_buffer, gradients, statistics)
        except BaseException:
            replica.drop_gradients()
            replica.statistics.collect(0.0)
            raise
        watch.lap()
        (seconds,) = watch.laps_s()
        return Done(
            result=result,
            written=written,
            result_bytes=Needed(outbox),
            drew=context.rng_use.drew,
            drew_hidden=context.rng_use.hidden,
            start_s=start_s,
            stop_s=now_s(),
            seconds=seconds,
        )

    def _begin(self, packed: bytes) -> RunSpec:
        """Be as the spec of a microbatch says, before its rows are unpacked, and return it."""
        if self._spec is None or packed != self._packed_spec:
            spec: RunSpec = load(packed, lambda token: self._shared[token[1]])
            self._spec, self._packed_spec = spec, packed
            adopt_globals(spec.values, [self._module, *self._shared])
        adopt_settings(self._spec.settings)
        return self._spec

    # Any: a token, and what it stands for.
    def find(self, token: Any) -> Any:
        """Return what a message has set aside."""
        _, *place = token
        return collect(self.pool, *place)

    def _follow(self, changes: Changes) -> None:
        take_over(self._module, changes)
        if changes.buffers != self._buffers_seen:
            self._replica.statistics.outdate()
            self._buffers_seen = changes.buffers
        self._replica.refresh()


def _unpacked(init: WorkerInit, pool: SharedMemoryPool) -> nn.Module:
    """Unpack the module, its parameters in the memory that all workers share."""
    made: dict[int, nn.Parameter] = {}

    def find(pid: Any) -> nn.Parameter:
        _, index, kind, place, value, trained, attributes = pid
        if index not in made:
            # `data`: a region's tensors have one version, which must tell of this one's writes.
            tensor = pool.at(place).data if value is None else load(value)
            made[index] = make_subclass(kind, tensor, trained)
            made[index].__dict__.update(attributes)
        return made[index]

    module: nn.Module = load(init.blob, find)
    refuse_other_parameters(module, made.values())
    place_buffers(module, init.buffers, pool)
    return module


def _warm_up() -> None:
    """Let torch import what it imports at a first backward pass (half a second's work)."""
    output = nn.Linear(1, 1)(torch.zeros(1, 1))
    output.backward(torch.ones_like(output))


def _failed(error: BaseException) -> Failed:
    if isinstance(error, NameError) and (reason := why_missing(str(error.name))) is not None:
        told = ConfigError(
            f"`{error.name}`, a global variable of the script, must be picklable where code reads "
            f"it that worker processes run, but is not: {reason}. Make it in a file of its own, "
            "such as `model.py`, and import it from there, or use executor='threads'."
        )
        error = told.with_traceback(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    packed: bytes | None = None
    for args, attributes in (
        (error.args, error.__dict__),
        ((str(error),), {"__notes__": getattr(error, "__notes__", [])}),
    ):
        try:
            packed = pack((type(error), args, attributes))
            break
        except Exception:  # the user's exceptions may hold anything
            continue
    return Failed(packed, f"{type(error).__module__}.{type(error).__qualname__}", text)

"""What a worker process does: one replica, one microbatch or one slice of the step after another.

Whatever the worker has to keep lies in shared memory or comes with the message, so that losing it
at any instruction loses nothing but what it was about to do.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from phalanx.clock import now_s
from phalanx.execution.contract import MicrobatchContext
from phalanx.execution.gradient_buffers import Filling, SlotLayout
from phalanx.execution.gradient_writer import GradientWriter
from phalanx.execution.mailbox import Outbox, collect
from phalanx.execution.settings import adopt_settings
from phalanx.execution.source_sync import Changes, place_buffers, take_over
from phalanx.execution.stopwatch import Stopwatch
from phalanx.ipc import die_with_parent, plant, reach
from phalanx.memory import SharedMemoryPool, TensorHandle, keep_awake
from phalanx.plan import BufferRules
from phalanx.replicas import (
    CallerModes,
    PackedGlobals,
    Replica,
    RngPlan,
    adopt_globals,
    derive_seed,
    load,
    pack,
    set_intra_op,
)
from phalanx.types import Nested

__all__ = [
    "BirthPlace",
    "Done",
    "Failed",
    "Forget",
    "NewRegions",
    "Packed",
    "RemoteCall",
    "RunSpec",
    "Start",
    "Task",
    "Worker",
    "WorkerInit",
    "serve",
]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Start:
    """What a process is started with; everything else comes through its connection."""

    worker: int
    parent_pid: int
    intra_op: int
    fault: Any  # Any: a planted fault of the chaos tests, or None


@dataclass(frozen=True)
class NewRegions:
    """The next ``count`` regions of the shelf follow."""

    count: int


@dataclass(frozen=True)
class WorkerInit:
    """The model.

    Attributes:
        blob: The module and what goes with it, packed; parameters are places on the shelf.
        buffers: Where the module's buffers lie.
        slot: Where in a slot what one microbatch leaves lies; the region comes with each task.
        rules: What becomes of buffers that it writes.
        steps: Whether errands will step an optimizer.
        values: Those of global variables that the code in ``blob`` reads.
        num_workers: How many workers the executor has.
    """

    blob: bytes
    buffers: list[TensorHandle | None]
    slot: SlotLayout
    rules: BufferRules | None = None
    steps: bool = False
    values: PackedGlobals = field(default_factory=dict)
    num_workers: int = 1


@dataclass(frozen=True)
class BirthPlace:
    """Where a `WorkerInit` lies on the shelf, packed."""

    place: TensorHandle


@dataclass(frozen=True)
class RunSpec:
    """What the microbatches of a run have in common.

    Attributes:
        run: What is to be called with the `MicrobatchContext`.
        settings: Those of the executor's process.
        rng: How microbatches get their random numbers.
        values: Of global variables that have changed since the worker's birth.
    """

    run: Callable[[MicrobatchContext], Any]  # Any: the result, whatever the caller's
    modes: CallerModes
    settings: tuple[Any, ...]  # Any: see `read_settings`
    rng: RngPlan
    values: PackedGlobals = field(default_factory=dict)


@dataclass(frozen=True)
class Packed:
    """An `RunSpec` on its way: most of the time it is that of the run before."""

    order: bytes


@dataclass(frozen=True)
class Task:
    """One microbatch.

    Attributes:
        order: In the executor's process it is packed. It comes before the rows, as settings may
            say how those are made.
        batch: Its rows.
        slot: The region that takes the gradients; -1 for none.
        reply: Bytes that take what is large in the result; None for none.
    """

    index: int
    order: RunSpec | Packed
    batch: Nested
    weight: float
    seed: tuple[int, ...]
    slot: int
    changes: Changes
    reply: TensorHandle | None


@dataclass(frozen=True)
class RemoteCall:
    """Something else to do; the answer is a `Called`.

    Attributes:
        call: What is to be called with the `Worker`.
        settings: Those of the executor's process, where they matter.
    """

    call: Callable[[Worker], object]
    settings: tuple[Any, ...] | None = None  # Any: see `read_settings`


@dataclass(frozen=True)
class Forget:
    """Drop what is saved under ``names``; there is no answer."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Called:
    """A `RemoteCall` was made.

    Attributes:
        saved: The names of all that is saved now.
    """

    saved: tuple[str, ...]


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
        result: What the run returned.
        filling: What is in the slot.
        result_bytes: How much room those before it would take where the task said `reply`; known
            when they have been packed.
        drew: Whether the model drew random numbers.
        drew_hidden: Whether it drew any where calls from Python do not show it.
        busy_s: Seconds of work.
        saved: The names of all that is saved now.
    """

    result: Any  # Any: whatever the caller's `run` returns
    filling: Filling
    result_bytes: int | Needed
    drew: bool
    drew_hidden: bool
    start_s: float
    stop_s: float
    busy_s: float
    saved: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """What the worker raised: packed where it can be, and as text; and all that is saved now."""

    error: bytes | None
    kind: str
    text: str
    saved: tuple[str, ...]


def serve(start: Start, connection: Connection, dump: Connection) -> None:
    """Work until the parent closes the connection or is gone."""
    die_with_parent(start.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    faulthandler.register(signal.SIGUSR1, file=dump.fileno(), all_threads=True)
    plant(start.fault, start.worker)
    torch.set_num_interop_threads(1)
    set_intra_op(start.intra_op)
    shelf = SharedMemoryPool()
    worker: Worker | None = None
    stay_awake: Callable[[], object] = bool
    while True:
        try:
            packed = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        stay_awake()
        try:
            match message := load(packed) if worker is None else load(packed, worker.find):
                case NewRegions(count):
                    shelf.receive(connection, count)
                    continue
                case Forget(names):
                    assert worker is not None
                    for name in names:
                        worker.saved.pop(name, None)
                    continue
                case BirthPlace(place):
                    birth: WorkerInit = load(shelf.at(place).numpy().tobytes())
                    worker = Worker(start.worker, birth, shelf)
                    _warm_up(steps=birth.steps)
                    stay_awake = _watch(start, birth.num_workers)
                    reach("born")
                    answer = pack(None)
                case _:
                    assert worker is not None
                    answer = worker.work(message)
        except BaseException as error:
            answer = pack(_failed(error, () if worker is None else tuple(worker.saved)))
        stay_awake()  # the next message is a moment away
        try:
            connection.send_bytes(answer)
        except OSError:  # the parent is gone
            os._exit(0)


def _watch(start: Start, num_workers: int) -> Callable[[], object]:
    busy = num_workers if start.intra_op == 1 else 0
    return keep_awake(busy, place=start.worker, sharers=num_workers, ours=True)


class Worker:
    """One replica in a process of its own.

    Attributes:
        shelf: The memory that it shares with its executor.
        saved: What calls and runs have left for later ones, by name.
    """

    def __init__(self, index: int, birth: WorkerInit, shelf: SharedMemoryPool) -> None:
        self.shelf = shelf
        self.saved: dict[str, Any] = {}
        self._filler = GradientWriter(birth.slot, shelf)
        self._module, self._shared = _born(birth, shelf)
        adopt_globals(birth.values, [self._module, *self._shared])
        self._replica = Replica(self._module, _CPU, index, rules=birth.rules)
        self._packed_order = b""
        self._order: RunSpec | None = None
        self._buffers_seen = -1

    def work(self, message: Any) -> bytes:  # Any: the messages above
        """Answer one message."""
        if isinstance(message, RemoteCall):
            if message.settings is not None:
                adopt_settings(message.settings)
            message.call(self)
            return pack(Called(tuple(self.saved)))
        assert isinstance(message, Task)
        reach("microbatch taken")
        outbox = Outbox(self.shelf, message.reply)
        done = self._compute(message, outbox)
        reach("before reply")
        return pack(done, outbox.put)

    def _compute(self, task: Task, outbox: Outbox) -> Done:
        start_s = now_s()
        order = task.order
        assert isinstance(order, RunSpec)
        self._follow(task.changes)
        turn = MicrobatchContext(
            replica=self._replica,
            index=task.index,
            batch=task.batch,
            seed=derive_seed(*task.seed, task.index),
            rng=order.rng,
            saved=self.saved,
            in_worker=True,
        )
        watch = Stopwatch(_CPU, waited_s=lambda: 0.0, settles=False)
        replica = self._replica
        try:
            with order.modes.entered(_CPU):
                with replica.running():
                    reach("before forward")
                    result = order.run(turn)
                    reach("after backward")
                written = replica.statistics.collect(task.weight)
                filling = self._filler.fill(task.slot, replica.take_gradients(), written)
        except BaseException:
            replica.drop_gradients()
            replica.statistics.collect(0.0)
            raise
        busy_s = watch.lap()
        return Done(
            result=result,
            filling=filling,
            result_bytes=Needed(outbox),
            drew=turn.rng_use.drew.is_set(),
            drew_hidden=turn.rng_use.hidden.is_set(),
            start_s=start_s,
            stop_s=now_s(),
            busy_s=busy_s,
            saved=tuple(self.saved),
        )

    def _begin(self, packed: bytes) -> RunSpec:
        """Return the order of a microbatch whose rows come next, and be as it says."""
        if self._order is None or packed != self._packed_order:
            order: RunSpec = load(packed, lambda token: self._shared[token[1]])
            self._order, self._packed_order = order, packed
            adopt_globals(order.values, [self._module, *self._shared])
        adopt_settings(self._order.settings)
        return self._order

    # Any: a token, and what it stands for.
    def find(self, token: Any) -> Any:
        """Return what a message has set aside."""
        kind, *rest = token
        if kind == "order":
            return self._begin(*rest)
        return collect(self.shelf, *rest) if kind == "mail" else self.saved[rest[0]]

    def _follow(self, changes: Changes) -> None:
        take_over(self._module, changes)
        if changes.buffers != self._buffers_seen:
            self._replica.statistics.outdate()
            self._buffers_seen = changes.buffers
        self._replica.refresh()


def _born(birth: WorkerInit, shelf: SharedMemoryPool) -> tuple[nn.Module, list[Any]]:
    """Unpack the module, its parameters in the memory that all workers share."""
    made: dict[int, nn.Parameter] = {}

    def find(pid: Any) -> nn.Parameter:
        _, index, kind, place, value, trained, attributes = pid
        if index not in made:
            # `data`: a region's tensors have one version, which must tell of this one's writes.
            tensor = shelf.at(place).data if value is None else load(value)
            made[index] = torch.Tensor._make_subclass(kind, tensor, trained)
            made[index].__dict__.update(attributes)
        return made[index]

    module, shared = load(birth.blob, find)
    place_buffers(module, birth.buffers, shelf)
    return module, shared


def _warm_up(*, steps: bool) -> None:
    """Let torch import what it imports at a first backward pass (half a second's work).

    For a first optimizer it imports its compiler as well, for another second.
    """
    output = nn.Linear(1, 1)(torch.zeros(1, 1))
    output.backward(torch.ones_like(output))
    if steps:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0).step()


def _failed(error: BaseException, saved: tuple[str, ...]) -> Failed:
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
    return Failed(packed, f"{type(error).__module__}.{type(error).__qualname__}", text, saved)

"""The code that runs in a worker process: one replica, one microbatch after another.

A worker is a fork of the program (see `worker_process.py`), so it has the module, the loss and all
that they read as they were at that moment. Parameters and buffers lie in memory that it shares with
the program; everything else that a microbatch needs comes with its message. A worker that is lost
at any instruction costs only the microbatch that it was computing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.clock import now_s
from phalanx.execution.executor import explain_error
from phalanx.execution.gradient_slots import GradientSlots, SlotWriter
from phalanx.execution.mailbox import Mailbox, adopt
from phalanx.execution.run import MicrobatchContext, Task
from phalanx.ipc import fail_point, fail_points, flush_output, inject
from phalanx.memory import forget_memory
from phalanx.replicas import (
    AttributeFingerprint,
    CallerModes,
    PlainChanges,
    Replica,
    RngPlan,
    Source,
    SourceGradients,
    Statistics,
    entered_modes,
    set_intra_op,
)
from phalanx.types import Nested

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RunSpec:
    """The common part of all microbatches of a run.

    Attributes:
        run: Its number, so that no two runs have the same spec: at another spec a worker
            copies the buffers again.
        task: Called with the `MicrobatchContext`.
        modes: Of the caller's thread.
        rng: How microbatches get their random numbers.
        changes: Of attributes, since the worker was forked.
    """

    run: int
    task: Task
    modes: CallerModes
    rng: RngPlan
    changes: PlainChanges


@dataclass(frozen=True)
class MicrobatchMessage:
    """One microbatch.

    Attributes:
        spec: A `RunSpec`, packed: the same bytes for all microbatches of a run.
        rows: Its batch, which a worker must copy before it returns it or keeps it.
        slot: Where in the pool its gradients go; None for nowhere.
    """

    index: int
    spec: bytes
    rows: Nested
    weight: float
    seed: tuple[int, ...]
    slot: int | None


@dataclass(frozen=True)
class Done:
    """The results of a microbatch.

    Attributes:
        result: The value that the task returned.
        gradients: By parameter, whether there is one in the slot.
        statistics: What the microbatch left in the buffers.
        assigned: The attributes that `forward` has assigned; looked for in first runs.
    """

    result: Any  # Any: whatever the task returns
    gradients: Sequence[bool]
    statistics: Statistics
    assigned: Sequence[str]
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Raised:
    """An exception that a microbatch raised in a worker.

    Attributes:
        parts: The name of its class, arguments and attributes, pickled.
        text: Its traceback.
    """

    parts: bytes
    text: str


@dataclass(kw_only=True)
class Worker:
    """One replica in a separate process.

    The program makes this object, then forks: the child calls :meth:`serve`, and the replica below
    is made there.

    Attributes:
        index: The number of the worker.
        module: The module that the user trains.
        shared: Objects that tasks refer to, such as the loss.
        fingerprint: The objects whose attributes a message may change.
        slots: Shared memory for the gradients.
        intra_op: Threads inside operators.
        optimizer: The program's; the worker drops its state.
        inbox: Messages of the program.
        outbox: Answers of the worker.
    """

    index: int
    module: nn.Module
    shared: Sequence[object]
    fingerprint: AttributeFingerprint
    slots: GradientSlots
    intra_op: int
    optimizer: Optimizer | None
    inbox: Mailbox
    outbox: Mailbox
    _spec: RunSpec = field(init=False)
    _packed_spec: bytes = b""

    def serve(self, connection: Connection, dump: Connection) -> None:
        """Work until the program closes the connection.

        Args:
            connection: An empty message says that there is one in a mailbox, in either direction.
            dump: Takes the stacks of all threads, when the program asks for them by SIGUSR1.
        """
        faulthandler.register(signal.SIGUSR1, file=dump.fileno(), all_threads=True)
        inject(fail_points.fault, self.index)
        set_intra_op(self.intra_op)
        if self.optimizer is not None:
            _forget_state(self.optimizer)
        fail_point("born")
        adopt(self.shared)
        with contextlib.suppress(EOFError, OSError):  # the program is gone
            while True:
                connection.recv_bytes()
                try:
                    fail_point("microbatch taken")
                    done = self._compute(self.inbox.read(copies=False))
                    fail_point("before reply")
                    self.outbox.write(done)
                except BaseException as error:
                    self.outbox.write(_raised(error))
                flush_output()
                connection.send_bytes(b"")

    @functools.cached_property
    def _source(self) -> Source:
        return Source(self.module)

    @functools.cached_property
    def _replica(self) -> Replica:
        own = SourceGradients(self._source.parameters)
        return Replica(self._source, _CPU, self.index, own)

    @functools.cached_property
    def _writer(self) -> SlotWriter:
        return SlotWriter(self.slots, self._replica.parameters)

    def _compute(self, message: MicrobatchMessage) -> Done:
        spec = self._follow(message.spec)
        start_s = now_s()
        context = MicrobatchContext(
            replica=self._replica,
            index=message.index,
            batch=message.rows,
            rng=spec.rng.microbatch(*message.seed, message.index),
        )
        self._writer.write_to(message.slot)
        with entered_modes(spec.modes, _CPU), self._replica:
            self._replica.begin()
            fail_point("before forward")
            result = spec.task(context)
            fail_point("after backward")
            return Done(
                result=result,
                statistics=self._replica.buffers.collect(message.weight),
                gradients=self._writer.finish(self._replica.pop_gradients()),
                assigned=self._replica.assigned() if spec.rng.watched else (),
                start_s=start_s,
                stop_s=now_s(),
            )

    def _follow(self, packed: bytes) -> RunSpec:
        """Bring the replica up to date with the spec of a microbatch, and return the spec."""
        if packed != self._packed_spec:
            self._spec = pickle.loads(packed)
            self._packed_spec = packed
            self.fingerprint.apply(self._spec.changes)
            self._replica.buffers.outdate()  # the program may have written to the buffers
        if not self._source.fingerprint.is_current():
            self._source.outdate_shells()
        return self._spec


def _forget_state(optimizer: Optimizer) -> None:
    """Drop the state: the program writes to its memory, and would copy each page for the fork."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                forget_memory(value)
    optimizer.state.clear()


# -- errors ----------------------------------------------------------


def _raised(error: BaseException) -> Raised:
    text = "".join(traceback.format_exception(error))
    name = type(error).__module__, type(error).__qualname__
    # Python's own reduction has what `args` lack, such as the name of an OSError's file.
    reduced: Any = _builtin_of(type(error)).__reduce__(error)  # Any: the class, args, and a state
    notes = {"__notes__": getattr(error, "__notes__", [])}
    for parts in (
        (name, reduced[1], reduced[2] if len(reduced) > 2 else {}),
        (name, (str(error),), notes),
    ):
        with contextlib.suppress(Exception):  # the user's exceptions may hold anything
            raised = Raised(pickle.dumps(parts), text)
            rebuilt(raised, "")
            return raised
    unsent = f"{'.'.join(name)}, which cannot be sent; see the notes."
    return Raised(pickle.dumps((("builtins", "RuntimeError"), (unsent,), {})), text)


def rebuilt(raised: Raised, note: str) -> BaseException:
    """Return the worker's exception as it was raised, with its traceback as a note."""
    name, args, attributes = pickle.loads(raised.parts)
    kind = _class_of(name)
    error: BaseException = kind.__new__(kind, *args)
    _builtin_of(kind).__init__(error, *args)  # the user's may want other arguments
    error.__setstate__(attributes)  # the notes are among them
    explain_error(error)
    error.add_note(f"{note} There:\n{raised.text.rstrip()}")
    return error


def _builtin_of(kind: type[BaseException]) -> type[BaseException]:
    """Return the class of Python's own that a class of exceptions derives from."""
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")


def _class_of(name: tuple[str, str]) -> type[BaseException]:
    """Return the class of an exception, also of one that a function has made."""
    waiting: list[type[BaseException]] = [BaseException]
    for kind in waiting:  # which grows
        if (kind.__module__, kind.__qualname__) == name:
            return kind
        waiting += kind.__subclasses__()
    return RuntimeError  # of a module that only the worker has imported

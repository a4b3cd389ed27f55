"""An executor of threads in this process that runs microbatches on replicas."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from phalanx.clock import now_s
from phalanx.execution.executor import Executor, addresses_of, annotate_error, parameters_of
from phalanx.execution.run import (
    Gradients,
    MicrobatchContext,
    PartialSum,
    RunResult,
    RunState,
    Span,
    add_gradients,
)
from phalanx.execution.thread_pool import CallerThread, ThreadPool
from phalanx.plan import Node
from phalanx.replicas import (
    CallerModes,
    CompileOnce,
    Replica,
    Source,
    SourceGradients,
    Statistics,
    entered_modes,
    has_compiled,
)

_NOTHING = contextlib.nullcontext()


class ThreadExecutor(Executor):
    """Replicas of one module, or of one module each, on threads of this process.

    Replicas on a module's own device share its parameter memory. A replica that is free takes
    the next microbatch.

    Args:
        module: The module that the user trains, or one for each device; parameters are read in
            place. Buffers of several modules go by their name after the module's index, such as
            ``"0.seen"``.
        devices, intra_op: As `Executor` takes them.
        averages: Whether floating-point buffers that replicas write are averaged.
        inline: Run the only replica in the caller's thread. One on an accelerator always runs
            there: its step waits for the host, which need not hand over to a thread then.

    Attributes:
        one_run: Held by the thread that runs forward passes, or writes what they have left.

    Determinism: with the same microbatches and `intra_op`, the operands' sum is bitwise the same
    for any number of replicas on the same kind of device and for any timing.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        devices: Sequence[torch.device],
        *,
        intra_op: int | None = None,
        averages: bool = True,
        inline: bool = False,
    ) -> None:
        if isinstance(module, nn.Module):
            sources = [Source(module, averages=averages)] * len(devices)
        else:
            sources = [
                Source(own, prefix=f"{i}.", averages=averages) for i, own in enumerate(module)
            ]
        super().__init__([each.module for each in sources], devices, intra_op)
        source_gradients = SourceGradients(self.parameters)
        self.replicas = [
            Replica(own, device, index, source_gradients)
            for index, (own, device) in enumerate(zip(sources, devices, strict=True))
        ]
        self._sources = list(dict.fromkeys(sources))
        self._copied = [each for each in self._sources if each.copies]
        self._is_outdated = False
        self.one_run = threading.RLock()
        compiled = any(map(has_compiled, dict.fromkeys(self.modules)))
        self._compile_once = CompileOnce(self.modules) if compiled else None
        self._threads = (
            CallerThread(devices, intra_op=self.intra_op)
            if inline or (len(devices) == 1 and devices[0].type != "cpu")
            else ThreadPool(len(devices), intra_op=self.intra_op)
        )

    def follow_attributes(self) -> bool:
        """Let the next runs see assigned attributes; False where the parameters are others."""
        if self._threads.closed:  # a second Ctrl-C leaves threads behind
            return False
        outdated, self._is_outdated = self._is_outdated, False
        changed = [each for each in self._sources if outdated or not each.fingerprint.is_current()]
        if changed and addresses_of(parameters_of(self.modules)) != self._addresses:
            return False
        for each in changed:
            each.outdate_shells()
        return True

    def refresh(self) -> None:
        """Let the next run see everything that the module holds by then."""
        self._is_outdated = True

    def sum_operands(self, result: RunResult) -> Gradients:
        """Make the last addition of a run, every thread for some of the parameters.

        Returns:
            By parameter, laid out as it; the caller alone holds their memory.
        """
        nothing: Gradients = [None] * len(self.parameters)
        left, *right = [each.gradients for each in result.operands] or [nothing]
        count = len(self)
        for other in right:
            add = lambda i: add_gradients(left[i::count], other[i::count])  # noqa: B023, E731
            for index, own in enumerate(self.each(add)):
                left[index::count] = own
        return left

    def close(self) -> None:
        """Dismiss the threads; closing twice does nothing."""
        self._threads.close()

    def _compute(self, state: RunState) -> None:
        modes = CallerModes.capture(self.devices)
        run_replica = partial(self._run_replica, state, modes)
        if state.task.is_backward:  # also after `close()`
            self.each(run_replica)
        else:
            with self.one_run:
                for each in self._copied:
                    each.update_copies()
                self._threads.each(run_replica)

    def _run_replica(self, state: RunState, modes: CallerModes, index: int) -> None:
        """Run microbatches on one replica, in its thread, until none is left."""
        replica = self.replicas[index]
        with entered_modes(modes, replica.device), replica:
            while (microbatch := state.next_microbatch(index)) is not None:
                try:
                    self._run_microbatch(replica, microbatch, state)
                except BaseException as error:
                    state.fail()
                    annotate_error(error, replica, microbatch)
                    raise
        if state.rng.watched:
            state.assigned.update(dict.fromkeys(replica.assigned()))

    def _run_microbatch(self, replica: Replica, index: int, state: RunState) -> None:
        start_s = now_s()
        context = MicrobatchContext(
            replica=replica,
            index=index,
            batch=state.pieces[index],
            rng=state.rng.microbatch(*state.seed, index),
            waiting=state.sums.waiting,
        )
        result, forward = state.result, not state.task.is_backward
        replica.begin(forward=forward)
        once, kind = self._compile_once, type(state.task).__qualname__
        with _NOTHING if once is None else once.running(kind, replica.device, context.batch):
            result.results[index] = state.task(context)
        if context.rng.used:  # only then: another thread may write it meanwhile
            result.drew = True
        written: Statistics = {}
        if forward and replica.buffers.are_there:
            written = replica.buffers.collect(state.weights[index])
        gradients = replica.pop_gradients()
        state.sums.put(Node(0, index), PartialSum(gradients, written))
        result.replica_of[index] = replica.index
        result.spans.append(
            Span(replica=replica.index, microbatch=index, start_s=start_s, stop_s=now_s())
        )

"""An executor of worker processes that runs microbatches and outlives each of its workers.

    this process                                 worker processes, forks of it
    module ──── parameters and buffers ────────► the same memory
    thread i ── next microbatch ──────────────►  forward, backward    (worker i)
             ◄─ loss, outputs, statistics ─────
             ◄─ gradients, in a slot in the pool

Each worker has a thread here, which sends it one microbatch after another, adds its gradients
along the tree, and notices at once when the worker is gone. All finished results lie here, so a
death costs only the microbatch that the worker was computing.

A worker has the program's objects as they were when it was forked. The workers are replaced by new
forks when a pass over data begins, and when an attribute was assigned that no message can carry
(see `AttributeFingerprint`): between two runs, when no thread of the executor computes. A worker
that was lost in a run is replaced when the others have computed what they can.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, PhalanxError, StateError, UnsupportedError
from phalanx.execution.executor import Executor, addresses_of, parameters_of
from phalanx.execution.failures import FailureLog, WorkerLost
from phalanx.execution.gradient_slots import GradientSlot, GradientSlots
from phalanx.execution.mailbox import Mailbox, pickled
from phalanx.execution.run import Gradients, PartialSum, RunState, Span
from phalanx.execution.thread_pool import ThreadPool
from phalanx.execution.worker import Done, MicrobatchMessage, Raised, RunSpec, Worker, rebuilt
from phalanx.execution.worker_process import Lost, WorkerProcess, dismiss_all
from phalanx.memory import SharedMemoryPool, has_memory, is_shared, return_freed_memory
from phalanx.plan import Node
from phalanx.replicas import AttributeFingerprint, CallerModes

_CPU = torch.device("cpu")
_Sent = tuple[int, GradientSlot | None]  # a microbatch, and what takes its gradients


class ProcessExecutor(Executor):
    """Replicas of one module in worker processes of this host, which are forks of this one.

    Args:
        module: The module that the user trains; all its parameters lie on the CPU.
        num_workers: Number of processes.
        timeout_s: How long a microbatch may take before its worker counts as hung.
        failures: Takes note of lost workers.
        shared, reads: As `ExecutorChoice.open` takes them.
        intra_op: As `Executor` takes it.

    Attributes:
        pool: Where the parameters and buffers of the module are moved to, and those of modules that
            ``reads`` hold.

    Raises:
        UnsupportedError: It has parameters or buffers that processes cannot share.

    Determinism: as `ThreadExecutor`, and bitwise the same whichever worker dies.
    """

    owns_generator = True
    _threads: ThreadPool

    def __init__(
        self,
        module: nn.Module,
        num_workers: int,
        *,
        timeout_s: float,
        failures: FailureLog,
        shared: Sequence[object],
        reads: Sequence[object],
        intra_op: int,
    ) -> None:
        super().__init__([module], [_CPU] * num_workers, intra_op)
        _check_shareable(module)
        self._module = module
        self.pool = SharedMemoryPool()
        self._slots = GradientSlots(self.parameters, self.pool)
        self._shared = list(shared)
        self._reads = list(reads)
        self._timeout_s = timeout_s
        self._failures = failures
        self._pid = os.getpid()
        self._runs = 0
        self._moved: dict[int, Tensor] = {}
        # A worker that replaces another takes over its mailboxes: the pool frees nothing.
        self._mail = [(Mailbox(self.pool), Mailbox(self.pool)) for _ in range(num_workers)]
        self._workers: list[WorkerProcess | None] = [None] * num_workers
        self._dismiss = weakref.finalize(self, dismiss_all, self._workers)
        self._threads = ThreadPool(num_workers, intra_op=self.intra_op, name="phalanx-executor")
        self._forks = ThreadPool(1, intra_op=1, name="phalanx-forks")  # OpenMP must never run in it
        try:
            _import_for_autograd()
            self._prepare_forks()
        except BaseException:
            self.close()
            raise

    # -- the contract of executors ---------------------------------------

    @property
    def worker_pids(self) -> tuple[int, ...]:  # type: ignore[override]
        """The worker processes' ids."""
        return tuple([worker.pid for worker in self._workers if worker is not None])

    def follow_attributes(self) -> bool:
        """Let the next runs see assigned attributes; False where the parameters are others.

        Workers are sent the numbers and strings that were assigned. After any other change, others
        are forked.
        """
        if self._threads.closed:
            return False
        changes = [] if self._fingerprint.is_current() else self._fingerprint.plain_changes()
        if changes is not None:
            self._assigned |= {(index, name): None for index, name, _ in changes}
            return True
        if addresses_of(parameters_of(self.modules)) != self._addresses:
            return False
        self.refresh()
        self._prepare_forks()
        return True

    def refresh(self) -> None:
        """Dismiss the workers; the next run forks others, which see all changes made until then."""
        self._report_dead()
        # In a thread: a Ctrl-C in between would leave dismissed workers here, to count as lost.
        self._forks.each(lambda _: dismiss_all(self._workers), uninterrupted=True)

    def close(self) -> None:
        """Dismiss threads and workers, and move tensors out of shared memory."""
        if self._threads.closed and os.getpid() == self._pid:
            for worker in self._workers:  # threads left by an interrupt may wait for them still
                if worker is not None:
                    worker.kill()
        self._threads.close()  # a call that is on in another thread ends first
        if not self._threads.closed:
            # From inside of a call: threads go after it, workers once nobody holds this object.
            # The tensors stay where they are.
            return
        self._dismiss()
        self._forks.close()  # only now: workers end with the thread that has forked them
        for tensor in self._moved.values():
            if self.pool.holds(tensor):
                tensor.data = tensor.data.clone()
        self._moved = {}

    # -- workers -----------------------------------------------------

    def _prepare_forks(self) -> None:
        """Share all tensors of module and loss, and note the attributes that forks will have."""
        tensors: list[Tensor] = []
        for each in AttributeFingerprint(self._module, *self._reads).modules:
            tensors += [*each.parameters(recurse=False), *each.buffers(recurse=False)]
        self._moved |= _move(tensors, self.pool)
        self._fingerprint = AttributeFingerprint(self._module, *self._reads)  # where all lies now
        self._assigned: dict[tuple[int, str], None] = {}  # by object and name, since the fork
        self._addresses = addresses_of(self.parameters)

    def _fork_missing(self) -> None:
        """Replace each worker that is gone by a new fork; no thread computes meanwhile."""
        self._report_dead()
        missing = [index for index, worker in enumerate(self._workers) if worker is None]
        if missing:
            self._forks.each(lambda _: self._fork(missing), uninterrupted=True)

    def _report_dead(self) -> None:
        """Forget the workers that have ended while they were idle, and report them."""
        for index, worker in enumerate(self._workers):
            try:
                if worker is not None:
                    worker.check_alive()
            except Lost as lost:
                self._lose(index, lost)

    def _fork(self, missing: Sequence[int]) -> None:
        for index in missing:
            inbox, outbox = self._mail[index]
            worker = Worker(
                index=index,
                module=self._module,
                shared=self._shared,
                fingerprint=self._fingerprint,
                slots=self._slots,
                intra_op=self.intra_op,
                optimizer=self.optimizer,
                inbox=inbox,
                outbox=outbox,
            )
            self._workers[index] = WorkerProcess(outbox, worker.serve)

    def _lose(self, index: int, lost: Lost, microbatch: int | None = None) -> None:
        """Forget a worker, so that another is forked in its place, and report it.

        Args:
            microbatch: The one that the worker was computing.

        Raises:
            PeerLost: It is one too many.
        """
        worker, self._workers[index] = self._workers[index], None
        assert worker is not None
        failure = WorkerLost(
            worker=index,
            pid=worker.pid,
            reason=lost.reason,
            microbatch=microbatch,
            dump=lost.dump,
        )
        self._failures.add(failure, lost.at_s)

    # -- a run -------------------------------------------------------

    def _compute(self, state: RunState) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "A process executor must be used by the process that made it, but this is a fork "
                "of it. Make a trainer in the child."
            )
        objects = self._fingerprint.objects  # all of them: one may be again what it was at the fork
        changes = [(index, name, vars(objects[index])[name]) for index, name in self._assigned]
        modes = CallerModes.capture(self.devices)
        self._runs += 1
        spec = pickled(RunSpec(self._runs, state.task, modes, state.rng, changes), self._shared)
        send_next = partial(self._send_next, state, spec, modes.grad)
        while not state.is_over:  # what lost workers have left is done in another round
            self._fork_missing()
            # Written here: threads that write at once would wait for each other.
            first = [send_next(index) for index in range(len(self))]
            run_worker = partial(self._run_worker, state, first, send_next)
            self._threads.each(run_worker, on_interrupt=state.fail)
        self._fork_missing()

    def _run_worker(
        self,
        state: RunState,
        first: Sequence[_Sent | None],
        send_next: Callable[[int], _Sent | None],
        index: int,
    ) -> None:
        """Let worker ``index`` compute microbatches until none is left, or it is lost."""
        sent = first[index]
        try:
            while sent is not None:
                microbatch, slot = sent
                try:
                    done = self._ask(index, microbatch)
                except Lost as lost:
                    state.give_back(microbatch, index)
                    self._lose(index, lost, microbatch)
                    return
                self._record(state, index, microbatch, slot, done)
                sent = send_next(index)
        except BaseException:
            state.fail()
            raise

    def _send_next(
        self, state: RunState, spec: bytes, wants_gradients: bool, index: int
    ) -> _Sent | None:
        """Put the next microbatch into the mailbox of worker ``index``."""
        microbatch = state.next_microbatch(index)
        if microbatch is None:
            return None
        slot = self._slots.allocate() if wants_gradients else None
        message = MicrobatchMessage(
            index=microbatch,
            spec=spec,
            rows=state.pieces[microbatch],
            weight=state.weights[microbatch],
            seed=state.seed,
            slot=None if slot is None else slot.start,
        )
        inbox, _ = self._mail[index]
        try:
            inbox.write(message)
        except PhalanxError:
            raise
        except Exception as error:  # whatever the user's objects raise when pickled
            raise ConfigError(
                "What a batch holds must be picklable to be sent to worker processes, but is "
                f"not: {error}. Give tensors and plain values, or use executor='threads'."
            ) from None
        return microbatch, slot

    def _ask(self, index: int, microbatch: int) -> Done:
        """Let worker ``index`` read its mailbox, and return the results.

        Raises:
            Lost: It is gone.
            BaseException: What it has raised.
        """
        worker = self._workers[index]
        assert worker is not None
        done = worker.ask(self._timeout_s)
        if isinstance(done, Raised):
            note = f"Raised by replica {index} in process {worker.pid}, microbatch {microbatch}."
            raise rebuilt(done, note)
        answer: Done = done
        return answer

    def _record(
        self, state: RunState, index: int, microbatch: int, slot: GradientSlot | None, done: Done
    ) -> None:
        """Add the results of a microbatch to those of the run."""
        gradients: Gradients = [None] * len(self.parameters)
        if slot is not None:
            gradients = slot.written(done.gradients)
        state.assigned.update(dict.fromkeys(done.assigned))
        state.result.results[microbatch] = done.result
        state.result.replica_of[microbatch] = index
        span = Span(replica=index, microbatch=microbatch, start_s=done.start_s, stop_s=done.stop_s)
        state.result.spans.append(span)
        own = PartialSum(gradients, done.statistics, kept_alive=(slot,))
        state.sums.put(Node(0, microbatch), own)


def _move(tensors: Iterable[Tensor], pool: SharedMemoryPool) -> dict[int, Tensor]:
    """Move tensors to memory that workers see, where they can be; return them by id."""
    found = {id(each): each for each in tensors if _can_be_shared(each) and not is_shared(each)}
    for tensor, place in zip(found.values(), pool.allocate_like([*found.values()]), strict=True):
        tensor.data = place.copy_(tensor.detach())
    if found:
        return_freed_memory()  # where they lay: forks would hold it, too
    return found


def _can_be_shared(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_inference()
    return plain and tensor.device.type == "cpu" and tensor.numel() > 0 and has_memory(tensor)


def _import_for_autograd() -> None:
    """Import here what a first backward pass imports in 2 seconds: else each fork would do so."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def _check_shareable(module: nn.Module) -> None:
    """Refuse a module whose tensors processes cannot share; nothing is done to it.

    Raises:
        UnsupportedError: A tensor lies on another device, or is not dense.
    """
    tensors = {"Parameter": module.named_parameters(), "Buffer": module.named_buffers()}
    for kind, named in tensors.items():
        for name, tensor in named:
            is_dense = tensor.layout is torch.strided and not tensor.is_quantized
            if tensor.device.type != "cpu" or not is_dense:
                raise UnsupportedError(
                    f"{kind} `{name}` must be dense and on the CPU for executor='processes', but "
                    f"is {tensor.type()} on {tensor.device}. Use executor='threads'."
                )

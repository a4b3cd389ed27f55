"""Train a module on replicas: the loop, its position, and everything a user says to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.callbacks import EpochDone, EventHandler, FitBegun, FitEnded, StepDone
from phalanx.clock import now_s
from phalanx.errors import ConfigError, StateError
from phalanx.execution import (
    ExecutorChoice,
    Processes,
    Ranks,
    describe_rank,
    repeat_on_new_ranks,
    signals_held,
)
from phalanx.metrics import Joining, Metrics
from phalanx.plan import Layout, read_layout
from phalanx.replicas import caller_intra_op, check_replicable
from phalanx.train.checkpoint import Content, read_checkpoint, to_bytes, write_checkpoint
from phalanx.train.dispatcher import EventDispatcher
from phalanx.train.evaluation import Evaluation, enter_training
from phalanx.train.objective import Objective
from phalanx.train.order import END, Reader, length_of
from phalanx.train.position import BatchLoss, Position, RunPosition
from phalanx.train.state import TrainerState, join_ranks
from phalanx.train.step import Engine
from phalanx.train.trainer_arguments import (
    check_between_steps,
    check_fit,
    check_options,
    make_optimizer,
    make_scheduler,
    read_intra_op,
    read_replicas,
)
from phalanx.types import Device, ForwardFn, LossFn, Nested, WeightFn
from phalanx.warning import warn_user


class Trainer:
    """Train ``module`` on several replicas as plain PyTorch trains it on one.

    Every batch is split into microbatches; their gradients, weighted by their rows, are summed
    along a fixed tree, and the optimizer steps once. The trained weights are bitwise
    identical for any number of replicas, in every executor, at any timing, and across a stop and a
    resume. With ``microbatches=None`` every replica computes one slice.

    Args:
        module: The model; trained in place, and available as ``trainer.module``. With worker
            processes its parameters are in shared memory until :meth:`close`.
        loss: (outputs, targets) -> a mean over the rows; not with ``forward``.
        optimizer: A torch optimizer, or a function that makes one from the list of the module's
            parameters.
        microbatches: Number of pieces of every batch. It fixes the order of all sums, so another
            number trains other weights; every operator on a CPU runs on one thread. None: one
            slice for each replica, with all cores.
        replicas: Their number, or a device for each; at most as many as there are microbatches.
            Default: "auto", one for each core up to the number of microbatches, or one on an
            accelerator or rank; without microbatches, 1.
        executor: "threads": replicas are threads of this process. "processes", or `Processes` with
            options: they are worker processes of this host; if one dies, the others complete the
            step. "inline": one replica runs in the caller's thread, for a debugger. "ranks": every
            process of a `torch.distributed` job has such a trainer, gets the same batches, and
            computes its share of them. `Ranks`: the same, and the other ranks continue if one is
            lost.
        seed: Seed of dropout and other random numbers; each microbatch of each step has its own.
        weight: A function from a microbatch to its weight in the batch's loss, such as its number
            of unmasked tokens. Default: its number of rows.
        forward: (module, microbatch) -> loss, (loss, outputs) or (loss, outputs, targets), for
            batches or models of another form; the latter two are for metrics.
        layout: The dim along which each leaf of (inputs, targets) is split; default 0.
        clip_norm: Largest 2-norm of all gradients together; `StepDone.grad_norm` has their norm.
        scheduler: A learning-rate scheduler, or a function that makes one from the optimizer.
        scheduler_interval: When it is stepped: after every "epoch" of :meth:`fit`, or every "step"
            of :meth:`fit` and :meth:`step`. An epoch steps `ReduceLROnPlateau` by the loss of its
            validation, or of its training without one.
        metrics: torchmetrics or functions by name, counted in :meth:`fit` and :meth:`evaluate`.
        callbacks: `Callback`s, or functions that are called with every event, in order.

    Raises:
        ConfigError: An argument cannot work.

    Determinism: bitwise identical for any replicas and executor on the same kind of device. With
    ``microbatches=None``, bitwise identical from run to run for the same replicas. The gradient is
    the whole batch's in both cases, within float rounding.

    Example:
        >>> data = [(torch.ones(6, 3), torch.zeros(6, 1))]
        >>> sgd = lambda params: torch.optim.SGD(params, lr=0.1)
        >>> with Trainer(nn.Linear(3, 1), nn.functional.mse_loss, sgd, replicas=2) as trainer:
        ...     epochs = trainer.fit(data, epochs=2)
        >>> [each.steps for each in epochs]
        [1, 2]
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFn | None = None,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
        *,
        microbatches: int | None = 4,
        replicas: int | str | Sequence[Device] | None = None,
        executor: str | Processes | Ranks = "threads",
        seed: int = 0,
        weight: WeightFn | None = None,
        forward: ForwardFn | None = None,
        layout: Layout | None = None,
        clip_norm: float | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        scheduler_interval: str = "epoch",
        metrics: Mapping[str, Any] | None = None,  # Any: a metric or a function
        callbacks: Sequence[EventHandler] = (),
    ) -> None:
        choice = ExecutorChoice.read(executor)
        check_replicable(module)
        check_options(microbatches, clip_norm, seed, weight, callbacks)
        layout = read_layout(layout)
        devices = read_replicas(replicas, microbatches, module, choice)
        self.module = module
        self.optimizer = make_optimizer(optimizer, module)
        self.scheduler = make_scheduler(scheduler, self.optimizer, scheduler_interval)
        self._scheduler_interval = scheduler_interval
        self._choice = choice
        self._engine = Engine(
            module=module,
            optimizer=self.optimizer,
            objective=Objective(loss, forward),
            weight=weight,
            layout=layout,
            microbatches=microbatches,
            clip_norm=clip_norm,
            seed=seed,
            choice=choice,
            devices=devices,
            intra_op=read_intra_op(devices, microbatches, choice),
        )
        self._metrics = Metrics(metrics or {}, Joining(layout))
        self._reader = Reader(seed)
        self._events = EventDispatcher(callbacks, choice)
        self._run_position = RunPosition(seed=seed, microbatches=microbatches)
        self._last_step: int | None = None  # at which the running `fit` ends, here or at peers
        self._in_step = self._closed = self._stopped = self._in_fit = False
        for callback in callbacks:
            if hasattr(callback, "attach"):
                callback.attach(self)
        self._state = TrainerState(
            module,
            self.optimizer,
            self.scheduler,
            callbacks=callbacks,
            metrics=self._metrics,
            run_position=self._run_position,
        )
        self._state.capture()  # what no checkpoint can hold is refused now

    # -- properties --------------------------------------------------

    @property
    def _position(self) -> Position:
        return self._run_position.position

    @property
    def steps(self) -> int:
        """Optimizer updates done since the beginning."""
        return self._position.steps

    @property
    def epochs(self) -> int:
        """Epochs finished since the beginning."""
        return self._position.epochs

    @property
    def stopped(self) -> bool:
        """True if :meth:`stop` ended the last :meth:`fit`."""
        return self._stopped

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each replica."""
        return self._engine.devices

    @property
    def intra_op(self) -> int:
        """Threads inside operators, per replica."""
        return self._engine.intra_op

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The worker processes' ids; empty without any, and before the first step."""
        return tuple(self._engine.executor.worker_pids) if self._engine.is_open else ()

    @property
    def is_first_rank(self) -> bool:
        """True if this process writes files for all: the first rank, or a process without ranks."""
        return self._choice.is_first

    def __repr__(self) -> str:
        count = self._engine.microbatches
        split = "" if count is None else f", {count} microbatches"
        where = "1 replica" if len(self.devices) == 1 else f"{len(self.devices)} replicas"
        return f"Trainer({type(self.module).__name__} on {where}{split}, step {self.steps})"

    # -- training ----------------------------------------------------

    def fit(
        self,
        loader: Iterable[Nested],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        validate: Iterable[Nested] | None = None,
        progress: bool | None = None,
    ) -> list[EpochDone]:
        """Train until ``epochs`` are done, or for ``steps`` updates, whichever ends first.

        The loader is read to its end, as a ``for`` loop reads it. ``set_epoch(epoch)``, from
        epoch 0 on, is called of the loader and its parts that have it. An unfinished epoch
        continues after its last batch, and counts as the first of this call; for the same loader
        its open iterator continues.

        Args:
            loader: Any iterable of batches that can be iterated once per epoch.
            epochs: Counted from the start of the run, across every `resume`. If so many are done
                already, nothing is trained, with a warning. Default: to the end of the running
                epoch, or as many as ``steps`` needs.
            steps: Updates that this call makes.
            validate: Evaluated after each epoch.
            progress: Show it on stderr, unless a callback does; default: on a terminal and in a
                notebook.

        Returns:
            One `EpochDone` for every epoch that this call finished.

        Raises:
            ConfigError: The loader yields nothing, or a batch cannot work.
        """
        check_fit(loader, validate, epochs, steps)
        check_between_steps(closed=self._closed)
        self.join()
        if epochs is not None and self.epochs >= epochs:
            warn_user(
                f"`epochs` must be more than the {self.epochs} that the run has finished, counted "
                f"from its start, but is {epochs}. Nothing was trained.",
            )
            return []
        last_epoch = self.epochs + 1 if epochs is None and steps is None else epochs
        last_step = self._last_step
        if last_step is None and steps is not None:
            last_step = self.steps + steps
        self._stopped, self._in_fit = False, True
        finished: list[EpochDone] = []
        kinds = ["train"] if validate is None else ["train", "validation"]
        means = ["loss", *self._metrics.names]
        begun = FitBegun(
            epochs=self.epochs,
            steps=self.steps,
            last_epoch=last_epoch,
            last_step=last_step,
            steps_per_epoch=length_of(loader),
            means=tuple(f"{kind}.{mean}" for kind in kinds for mean in means),
        )

        def ended() -> FitEnded:
            # One rank's Ctrl-C alone can save nothing that all ranks have.
            interrupted = isinstance(sys.exception(), KeyboardInterrupt)
            stopped = self._stopped or (interrupted and self._choice.kind != "ranks")
            return FitEnded(epochs=self.epochs, steps=self.steps, stopped=stopped)

        try:
            self._last_step = last_step
            # The caller's idle pool must not spin beside the replicas.
            with (
                caller_intra_op(1),
                self._events.dispatching_fit(begun, ended, progress=progress, trainer=self),
            ):
                while not self._shall_end(last_epoch):
                    done = self._run_epoch(loader, validate)
                    if done is None:
                        break
                    finished.append(done)
        finally:
            self._last_step = None
            self._reader.pause(self._position.batch)
        self._in_fit = False
        return finished

    def join(self) -> None:
        """Be one of the ranks of ``executor=Ranks(…)``; a late one is given the state by a peer.

        :meth:`fit` and :meth:`save` begin with it. Your own loop calls it before it reads
        ``steps``. It waits until all are here, or let this one in; elsewhere it does nothing.

        Raises:
            PeerTimeout: The other ranks did not come.
            StateError: They train something else, or have finished.
        """
        check_between_steps(closed=self._closed, in_step=self._in_step)
        elastic = self._choice.elastic
        if elastic is not None and not elastic.entered:
            about = lambda: describe_rank(self.module, len(self.devices))  # noqa: E731
            give = lambda: to_bytes(  # noqa: E731
                {"content": self._state.capture(), "last step": self._last_step}
            )
            self._last_step = join_ranks(elastic, about, give, self._restore)

    def step(self, batch: Nested) -> StepDone:
        """Do one optimizer update on ``batch``.

        Raises:
            ConfigError: The batch cannot work, or its loss is not finite; nothing has changed then.
            StateError: This rank must receive the other ranks' state first: call :meth:`join`.
            UnsupportedError: The first step made state that no checkpoint can hold; it is done.
            Exception: Any error of the module or the loss, with a note that names the replica.
        """
        if self._choice.elastic is not None:
            self._join_here()
        with caller_intra_op(1):
            if not self.module.training:
                enter_training(self.module)
            return self._step(batch, in_epoch=False)

    def stop(self) -> None:
        """Make the running :meth:`fit` return after its step. On ranks, all call it in that step.

        A signal's handler or another thread may call it.
        """
        self._stopped = True

    def refresh(self) -> None:
        """Fork worker processes before the next step, so that they see all changes up to then.

        They follow parameters, buffers, and attributes of module and loss that are assigned, and
        are forked at the start of each epoch, :meth:`evaluate` and :meth:`predict`. Call this after
        another change in between: inside a list or another object, or to a global variable.
        """
        check_between_steps(closed=self._closed, in_step=self._in_step)
        self._engine.refresh()

    def evaluate(self, loader: Iterable[Nested]) -> dict[str, float]:
        """Return the loss and the metrics over all of ``loader``, in eval mode, without gradients.

        The loss is the weighted mean over everything; metrics are exact however batches were cut.

        Raises:
            ConfigError: The loader yields nothing.
        """
        return self._evaluate(loader, "loader")

    def _evaluate(self, loader: Iterable[Nested], name: str) -> dict[str, float]:
        with self._evaluation() as evaluation:
            return evaluation.evaluate(loader, self._metrics, name)

    def predict(self, loader: Iterable[Nested]) -> Nested:
        """Return the module's outputs for all rows of ``loader``, in eval mode, without gradients.

        Batches are as in :meth:`fit`, or inputs alone. Of a pair (inputs, targets) the targets are
        ignored: for two inputs give ((first, second), None). With ``forward=`` the outputs are the
        second value that it returns.

        Returns:
            The module's outputs with the rows of all batches in order: tensors and arrays are
            concatenated, scalars stacked to a vector, other values are the first ones.

        Raises:
            ConfigError: As :meth:`evaluate`; or an output does not have a row for each input row.
        """
        with self._evaluation() as evaluation:
            return evaluation.predict(loader)

    @contextmanager
    def _evaluation(self) -> Iterator[Evaluation]:
        """Get ready for one pass over a loader, which the body makes."""
        self._join_here()
        self._engine.refresh()
        with caller_intra_op(1):
            yield Evaluation(self._engine, self.steps)
        self._events.dispatch_failures(self.steps)

    def _run_epoch(
        self, loader: Iterable[Nested], validate: Iterable[Nested] | None
    ) -> EpochDone | None:
        """Run what is left of the current epoch; None when it was left in the middle."""
        begin_s = now_s()
        enter_training(self.module)
        if self._position.batch == 0:
            self._engine.refresh()
        length = length_of(loader)
        self._reader.open(loader, self._position.batch, self.epochs)
        while True:
            # Where `fit` ends with what should be the last batch, the loader is still asked for
            # another: if there is none, the epoch is finished.
            ends = self._shall_end(None)
            if ends and not 0 < (length or 0) <= self._position.batch:
                return None
            if not self._reader.is_open:  # a callback has called `resume()`
                self._reader.open(loader, self._position.batch, self.epochs)
            batch = self._reader.batch_after(self._position.batch)
            if batch is END:
                break
            if ends:
                return None
            self._step(batch, in_epoch=True)
        if self._position.batch == 0:
            raise ConfigError(
                "`loader` must yield at least one batch, but yields none. A generator is used up "
                "after one pass: give something that can be iterated again."
            )
        return self._finish_epoch(now_s() - begin_s, validate)

    def _shall_end(self, last_epoch: int | None) -> bool:
        ends = [(self.epochs, last_epoch), (self.steps, self._last_step)]
        return self._stopped or any(end is not None and done >= end for done, end in ends)

    def _finish_epoch(self, seconds: float, validate: Iterable[Nested] | None) -> EpochDone:
        done = EpochDone(
            epoch=self.epochs + 1,
            steps=self.steps,
            samples=self._position.samples,
            seconds=seconds,
            train={"loss": self._position.mean_loss, **self._metrics.compute()},
            validation=None if validate is None else self._evaluate(validate, "validate"),
        )

        try:
            with signals_held():  # the scheduler must not be stepped twice for an epoch
                if isinstance(self.scheduler, ReduceLROnPlateau):
                    self.scheduler.step((done.validation or done.train)["loss"])
                elif self.scheduler is not None and self._scheduler_interval == "epoch":
                    self.scheduler.step()
                self._run_position.position = self._position.next_epoch()
                self._metrics.reset()
                self._reader.forget()
        finally:
            if self.epochs == done.epoch:  # also where a Ctrl-C came meanwhile
                self._events.dispatch(done)
        return done

    def _join_here(self) -> None:
        """Join; refuse if the other ranks are at another step than the one of this batch."""
        steps = self.steps
        self.join()
        if self.steps != steps:
            raise StateError(
                f"A rank that joins later must continue from the others' step, {self.steps}, "
                f"but is given a batch for step {steps}. Call `join()` first, and begin at `steps`."
            )

    def _step(self, batch: Nested, *, in_epoch: bool) -> StepDone:
        """Do one update, repeat it where ranks have changed meanwhile, and call the callbacks."""
        start_s = now_s()
        check_between_steps(closed=self._closed, in_step=self._in_step)
        self._engine.open()
        done: list[StepDone] = []
        update = partial(self._update, batch, start_s, done, in_epoch=in_epoch)
        try:
            if self._choice.elastic is None:
                update()
            else:
                self._choice.elastic.regroup(admits=True)
                repeat_on_new_ranks(update)
        finally:  # callbacks miss no step: a Ctrl-C or the scheduler may have raised after it
            for each in done:
                if each.step == 1:  # optimizers make their state in their first step
                    self._state.capture()
                self._events.dispatch(each)
        return done[0]

    def _update(
        self, batch: Nested, start_s: float, done: list[StepDone], *, in_epoch: bool
    ) -> None:
        """Do one update, and advance the position; outside of an epoch no metrics are counted.

        ``done`` gets the `StepDone` in the moment in which the position advances.
        """
        check_between_steps(closed=self._closed)  # by a signal's handler, or in the attempt before
        metrics = self._metrics if in_epoch and self._metrics else None
        counted = metrics.state_dict() if metrics is not None else {}
        run_position = self._run_position
        before = run_position.position  # no calls from here on: a signal's handler may step, too

        def commit(loss: BatchLoss, step_done: StepDone) -> None:
            if in_epoch:
                run_position.position = before.next_batch(loss)
            else:
                run_position.position = before._replace(steps=before.steps + 1)
            done.append(step_done)
            if self.scheduler is not None and self._scheduler_interval == "step":
                self.scheduler.step()

        self._in_step = True
        try:
            self._engine.update(batch, before, start_s=start_s, metrics=metrics, commit=commit)
        except Exception as error:
            before.note_on(error, in_epoch=in_epoch)
            raise
        finally:
            self._in_step = False  # before any call, in which an interrupt may arrive
            if metrics is not None and run_position.position is before:
                metrics.load_state_dict(counted)
            if self._closed:  # since it has begun
                self._close(failed=True)

    # -- state -------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write everything that :meth:`resume` needs to ``folder``, as a whole or not at all.

        With executor="ranks" all ranks must call it; rank 0 writes.

        Raises:
            CheckpointError: It cannot be written there; an older checkpoint is intact.
            StateError: Called during a step, by a signal's handler or another thread.
        """
        check_between_steps(closed=self._closed, in_step=self._in_step)
        path = Path(folder)
        self.join()
        self._engine.check_whole()
        self._choice.write_once(lambda: write_checkpoint(self._state.capture(), path))

    def resume(self, folder: str | Path) -> None:
        """Continue from a folder of :meth:`save`: weights, optimizer, data order and the rest.

        With the same `microbatches` and seed the run continues bitwise identical, on any number of
        replicas. The optimizer's options are the saved ones: set another `lr` afterwards.

        Raises:
            CheckpointError: It is missing, damaged, or of another model or optimizer; nothing has
                changed then.
            StateError: As with :meth:`save`.
        """
        check_between_steps(closed=self._closed, in_step=self._in_step)
        self._restore(read_checkpoint(Path(folder)), f"Checkpoint `{folder}`")

    def _restore(self, content: Content, source: str) -> None:
        with signals_held(second=False):  # a state that is taken in goes with its position
            self._state.restore(content, source)
            self._reader.forget()
            self._engine.mark_whole()
        # Last: where warnings are errors, all is in place.
        self._run_position.warn_of_settings(content["progress"])

    def close(self) -> None:
        """Dismiss the replicas, and move parameters out of shared memory; idempotent.

        Called in the middle of a step, by a signal's handler say, it lets the step end first.
        """
        self._close(failed=sys.exception() is not None)  # which may be why it is closed

    def _close(self, *, failed: bool) -> None:
        self._closed = True
        if not self._in_step:  # else the step does it at its end
            self._reader.forget()
            self._engine.close()
            self._choice.leave(finished=not failed and not self._in_fit)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._close(failed=kind is not None)

"""What one process does for a run: open everything, train, save, and write down."""

from __future__ import annotations

import contextlib
import platform
import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx import __version__
from phalanx.callbacks import (
    EpochDone,
    FitEnded,
    History,
    Progress,
    Record,
    StepDone,
    Trace,
    draw_training,
    record_of,
)
from phalanx.cli.data import Data, open_data
from phalanx.cli.losses import build_loss, import_forward
from phalanx.cli.models import build_model
from phalanx.cli.options import (
    Given,
    TrainOptions,
    as_words,
    complete,
    continue_with,
    parse_replicas,
    parse_workloads,
    read_options,
    untrusted,
)
from phalanx.cli.recipes import begin_anew, decay_linearly
from phalanx.cli.run_folder import RunFolder, name_run, read_metrics, refuse_existing
from phalanx.cli.summary import draw_summary
from phalanx.clock import now_s
from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.train import Trainer, length_of

if TYPE_CHECKING:
    from torchmetrics import Metric

_RUNS = Path("runs")
_CONFIG_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """What is to be done, decided before anything is.

    Args:
        options: All of them.
        out: The new run folder; None for the next free one under runs/.
        resumed: The run that goes on, or None for a new one.
        devices: Those that the replicas had, if the run is to keep them.
        trace: Whether a trace is written.
    """

    options: TrainOptions
    out: Path | None
    resumed: RunFolder | None
    devices: tuple[str, ...] | None
    trace: bool = False


def plan_new(given: Given, out: Path | None) -> TrainPlan:
    """Decide what a new run is to be.

    Raises:
        ConfigError: An option is out of its range, or ``out`` holds something already.
    """
    if out is not None:
        refuse_existing(out)
    return TrainPlan(options=complete(given), out=out, resumed=None, devices=None)


def plan_resumed(given: Given, path: Path, out: Path | None) -> TrainPlan:
    """Decide how a run goes on.

    It keeps the replicas that it had, unless others are given: without microbatches they decide the
    bits.

    Raises:
        ConfigError: There is no such run, an option was given that differs, one that names code
            was not given again, or ``out`` was given.
        CheckpointError: Its config.json is damaged.
    """
    if out is not None:
        raise ConfigError(
            f"`--out` must be left out with `--resume`, but is {str(out)!r}. "
            "A resumed run stays in its folder."
        )
    folder = RunFolder.open(path)
    stored, devices = read_config(folder.read_config(), source=str(folder.config_path))
    options = continue_with(stored, given, run=str(path))
    return TrainPlan(
        options=options,
        out=None,
        resumed=folder,
        devices=devices if "replicas" not in given else None,
    )


# Any, here and below: JSON.
def read_config(
    config: Mapping[str, Any], *, source: str
) -> tuple[TrainOptions, tuple[str, ...] | None]:
    """Check a config.json.

    Raises:
        CheckpointError: Something is missing or of another type.
        ConfigError: An option is out of its range.
    """
    try:
        if config["format"] != _CONFIG_FORMAT:
            raise CheckpointError(
                f"`format` in {source} must be {_CONFIG_FORMAT}, but is {config['format']!r}. "
                "Use the version of Phalanx that wrote it."
            )
        options, configuration = dict(config["options"]), config["configuration"]
        names = None if configuration is None else configuration["devices"]
        devices = None if names is None else tuple(str(name) for name in names)
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise CheckpointError(
            f"{source} must hold `format`, `options` and `configuration`, but does not: {exc!r}."
        ) from exc
    return read_options(options, source=source), devices


class Session:
    """A process's part in a run: everything that is open, from the data to the run folder.

    Entering opens the data, the model, the trainer and last the folder, so that options that cannot
    work leave nothing behind.

    Args:
        job: What is to be done.
        console: Where it is told.
    """

    def __init__(self, job: TrainPlan, console: Console) -> None:
        self.job = job
        self.options = job.options
        self.console = console
        self.history = History()
        self._unwritten: list[Record] = []
        self.trace: Trace | None = None
        self._stopping = False
        self._saved_steps = 0
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._exits as exits:
            options = self.options
            _seed_process(options.seed)
            self.data = open_data(options.data, batch_size=options.batch_size, seed=options.seed)
            self.module = build_model(options.model, self.data, seed=options.seed)
            self.progress = Progress(self.console)
            self.trainer = exits.enter_context(self._open_trainer())
            if self.job.resumed is None:
                self.folder = _create_folder(self.job)
                exits.enter_context(self.folder.held())
            else:
                self.folder = self.job.resumed
                exits.enter_context(self.folder.held())
                self._go_on()
            if self.job.trace:
                self.trace = Trace(self.folder.trace_path)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()

    def stop(self) -> None:
        """Finish the running step and then save; may be called from a signal's handler."""
        self._stopping = True
        self.trainer.stop()
        # The signal may have come in the middle of a write to the same stream, which then refuses,
        # or because the terminal is gone.
        with contextlib.suppress(RuntimeError, OSError):
            self.console.show_cursor(True)
            self.console.print("Finishing the step, then saving. Ctrl-C again stops at once.")

    def run(self) -> bool:
        """Train to the last epoch, or until stopped.

        Returns:
            Whether it came to its end.
        """
        self.console.print(self._describe_start())
        begun_s = now_s()
        try:
            self._train()
        finally:
            self._write_metrics()
            if not self.history.losses:
                self.folder.remove_config()  # nothing came of it, so the name is free again
            self._write_trace()
        return self._conclude(now_s() - begun_s)

    def _train(self) -> None:
        self._write_config()
        if self.trainer.epochs >= self.options.epochs or self._stopping:
            return
        try:
            epochs, validate = self.options.epochs, self.data.test
            self.trainer.fit(self.data.train, epochs=epochs, validate=validate)
            if self.trainer.steps > self._saved_steps:
                self._save()
        except Exception as error:  # it ends the run, but not the steps that were done
            self._save_before(error)
            raise

    def _save_epoch(self, event: object) -> None:
        if isinstance(event, EpochDone):
            self._save()

    def _save(self) -> None:
        # The metrics go first: lines beyond the checkpoint are dropped when the run goes on, while
        # lines that are missing could not be made again.
        self._write_metrics()
        self._write_config()
        self.trainer.save(self.folder.checkpoint_path)
        self._saved_steps = self.trainer.steps

    def _save_before(self, error: Exception) -> None:
        """Save what was done before a step that was refused, and add to ``error`` how to go on."""
        steps = self.trainer.steps
        if steps == self._saved_steps:
            return
        try:
            self._save()
        except Exception as failure:  # memory may be what is lacking both times; `error` was first
            told = f"{type(failure).__name__}: {failure}"
            error.add_note(f"What came after step {self._saved_steps} is not saved: {told}")
        else:
            command = self._resuming_command()
            error.add_note(f"Saved after step {steps}. Continue with:\n  {command}")

    def _conclude(self, seconds: float) -> bool:
        """Write what the run leaves behind, and say what it came to."""
        if not self.history.losses:
            self.console.print("Stopped before the first step: nothing was saved.")
            return False
        finished = self.trainer.epochs >= self.options.epochs
        if finished:
            self.folder.write_model(self.trainer.module)
        self._draw_training()
        if not finished:
            self.console.print(self._describe_interruption())
            return False
        self.console.print(self._draw_summary(seconds))
        self.console.print(f"Weights, metrics and training.png are in {self.folder.path}")
        return True

    def _draw_training(self) -> None:
        title = f"{self.options.model} on {self.options.data}, {self._name_configuration()}"
        try:
            draw_training(self.history, title=title, path=self.folder.figure_path)
        except OSError as error:  # the run is worth more than its picture
            self.console.print(f"training.png is not written: {error}")

    def _write_trace(self) -> None:
        if self.trace is None or not self.history.totals.samples:
            return
        try:
            self.trace.write()
        except PhalanxError as error:  # as above
            self.console.print(f"trace.json is not written: {error}")
        else:
            self.console.print(
                f"Open {self.folder.trace_path} in https://ui.perfetto.dev, which keeps it here."
            )

    def _open_trainer(self) -> Trainer:
        options, kept = self.options, self.job.devices
        own = None if options.forward is None else import_forward(options.forward)
        return Trainer(
            self.module,
            build_loss(options.loss, self.data) if own is None else None,
            partial(torch.optim.AdamW, lr=options.lr),
            replicas=parse_replicas(options.replicas) if kept is None else kept,
            workloads=parse_workloads(options.workloads),
            microbatches=options.microbatches or None,
            seed=options.seed,
            scheduler=_schedule_for(self.data, options.epochs),
            scheduler_interval="step",
            forward=own,
            metrics=_metrics_for(self.data) if self._counts_classes() else None,
            executor=options.executor,
            callbacks=(
                *(self.history, self._listen, self.progress),
                self._save_epoch,  # last: it saves what they have counted
            ),
        )

    def _counts_classes(self) -> bool:
        """Tell whether the loss is cross entropy, as accuracy and perplexity take for granted."""
        return self.options.forward is None and self.options.loss in (None, "cross_entropy")

    def _listen(self, event: object) -> None:
        record = record_of(event)
        if record is not None:
            self._unwritten.append(record)
        if self.trace is not None and not isinstance(event, FitEnded):  # it is written by `run()`
            self.trace(event)
        if isinstance(event, StepDone) and self._stopping and not self.trainer.stopped:
            # The request came before `fit`, which took no notice of it.
            self.trainer.stop()

    def _go_on(self) -> None:
        """Put the trainer and the history where the run was left."""
        self.trainer.resume(self.folder.checkpoint_path)
        begin_anew(self.trainer.optimizer, self.trainer.scheduler, lr=self.options.lr)
        self._saved_steps, done = self.trainer.steps, self.trainer.epochs
        if done >= self.options.epochs and self.folder.model_path.exists():
            raise ConfigError(
                f"`--epochs` must be more than the {done} that the run in {self.folder.path} has "
                f"finished, but is {self.options.epochs}. Give --epochs {2 * done}."
            )
        begun = self._count_begun_epochs()
        if begun > self.options.epochs:  # else its weights would be written as those of the end
            raise ConfigError(
                f"`--epochs` must be at least the {begun} that the run in {self.folder.path} has "
                f"begun, but is {self.options.epochs}. Give --epochs {begun}."
            )
        self.history.restore(
            self.folder.rewind_metrics(steps=self.trainer.steps, epochs=self.trainer.epochs)
        )

    def _count_begun_epochs(self) -> int:
        finished = self.trainer.epochs
        last_steps = [
            record["last_step"]
            for record in read_metrics(self.folder.metrics_path)
            if record["kind"] == "epoch" and record["epoch"] <= finished
        ]
        return finished + (self.trainer.steps > max(last_steps, default=0))

    def _write_metrics(self) -> None:
        records, self._unwritten = self._unwritten, []
        self.folder.append_metrics(records)

    def _write_config(self) -> None:
        self.folder.write_config(
            {
                "format": _CONFIG_FORMAT,
                "options": asdict(self.options),
                "configuration": self._describe_configuration(),
                "data": self.data.description,
                "parameters": _count_parameters(self.module),
                "versions": _versions(),
            }
        )

    def _describe_configuration(self) -> dict[str, Any]:
        devices = [str(device) for device in self.trainer.devices]
        return {"devices": devices, "intra_op": self.trainer.intra_op}

    def _name_configuration(self) -> str:
        count, pieces = len(self.trainer.devices), self.options.microbatches
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        return f"{replicas}, {pieces} microbatches" if pieces else replicas

    def _describe_start(self) -> str:
        options = self.options
        epochs = "1 epoch" if options.epochs == 1 else f"{options.epochs} epochs"
        going_on = f", continuing after step {self.trainer.steps}" if self.trainer.steps else ""
        going_on += self._describe_lost_bits()
        return (
            f"{self.data.description}\n"
            f"{options.model}, {_count_parameters(self.module):,} parameters; AdamW with learning "
            f"rate {options.lr:g}, batches of {options.batch_size}, {epochs}, seed {options.seed}\n"
            f"Run folder: {self.folder.path}{going_on}"
        )

    def _describe_lost_bits(self) -> str:
        """Say why a run that goes on does so with other bits, if it does."""
        if self.job.resumed is None or self.options.microbatches:
            return ""
        if self.job.devices is None:
            return "; not bit for bit, as without --microbatches the bits depend on replicas"
        return ""

    def _describe_interruption(self) -> str:
        return (
            f"Stopped after step {self.trainer.steps}, in epoch {self.trainer.epochs + 1} of "
            f"{self.options.epochs}. Continue with:\n  {self._resuming_command()}"
        )

    def _resuming_command(self) -> str:
        again = as_words(untrusted(self.options))
        return shlex.join(["phalanx", "train", "--resume", str(self.folder.path), *again])

    def _draw_summary(self, seconds: float) -> Any:
        return draw_summary(
            self.history.epochs[-1] if self.history.epochs else None,
            self.history.totals,
            seconds=seconds,
            devices=[str(device) for device in self.trainer.devices],
            is_text=self.data.kind == "tokens" and self._counts_classes(),
        )


def _seed_process(seed: int) -> None:
    """Seed the generators that a user's data set may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _create_folder(job: TrainPlan) -> RunFolder:
    if job.out is not None:
        return RunFolder.create(job.out)
    return RunFolder.create_next(_RUNS, name_run(job.options.data, job.options.model))


def _metrics_for(data: Data) -> dict[str, Metric] | None:
    if data.kind == "tokens" or data.num_classes is None:
        return None
    from torchmetrics.classification import MulticlassAccuracy  # slow to import

    # "micro": the fraction of samples that are right, where torchmetrics' default averages classes.
    return {"accuracy": MulticlassAccuracy(num_classes=data.num_classes, average="micro")}


def _schedule_for(data: Data, epochs: int) -> Callable[[Optimizer], LRScheduler] | None:
    """Let the learning rate fall to 0; keep it where the length of the data is not known."""
    num_batches = length_of(data.train)
    return decay_linearly(epochs * num_batches) if num_batches else None


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _versions() -> dict[str, str]:
    return {
        "phalanx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }

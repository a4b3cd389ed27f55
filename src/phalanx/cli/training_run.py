"""A run of ``phalanx train``: its options, its model, and what trains, evaluates and predicts."""

from __future__ import annotations

import math
import os
import platform
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from phalanx import __version__
from phalanx.callbacks import JSONL, Checkpoint, EarlyStopping, Progress, Trace
from phalanx.cli.console import stopped_by_signals
from phalanx.cli.data import digest_of, open_data, split
from phalanx.cli.models import Standardize, build_model, check_loss, choose_model, find_loss
from phalanx.cli.run_folder import RunFolder, name_run
from phalanx.cli.schema import Data, Schema
from phalanx.errors import CheckpointError, ConfigError
from phalanx.train import Trainer, length_of
from phalanx.warning import warn_user

if TYPE_CHECKING:
    from torchmetrics import Metric

_RUNS = Path("runs")
_SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,  # noqa: ARG005
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a training, as the command has them and config.json keeps them.

    One that is added needs a default here, with which runs before it are continued.
    """

    data: str
    model: str
    target: str | None
    task: str
    loss: str
    validation: str
    epochs: int
    batch_size: int
    lr: float
    schedule: str
    clip_norm: float | None
    early_stopping: int | None
    every_steps: int | None
    replicas: str
    executor: str
    microbatches: int
    seed: int

    def names_code(self) -> bool:
        """Tell whether an option is module:attribute."""
        return any(
            ":" in spec and not Path(spec).exists() for spec in (self.data, self.model, self.loss)
        )


class TrainingRun:
    """A run: its folder, options, model, and the form of its data.

    Args:
        folder: Where everything is written.
        options: Of the training.
        schema: Of the training data.
    """

    _digest: str | None = None  # of the data that the run began with; None for code
    _weights_step: int | None = None  # after which the weights were written

    def __init__(self, folder: RunFolder, options: Options, schema: Schema) -> None:
        self.folder, self.options, self.schema = folder, options, schema
        self.module = build_model(options.model, schema, seed=options.seed)

    @classmethod
    def begin(cls, options: Options, out: Path | None) -> tuple[Self, Data]:
        """Open the data, and make the folder of a new run.

        Raises:
            ConfigError: An option cannot work; no folder is left.
        """
        torch.manual_seed(options.seed)  # a user's data may draw numbers when it is opened
        data = open_data(options.data, target=options.target, task=options.task)
        model = choose_model(data.schema) if options.model == "auto" else options.model
        name = name_run(options.data, model)
        # A path is found from any folder if it is absolute.
        place, validation = (
            os.path.abspath(spec) if Path(spec).exists() else spec
            for spec in (options.data, options.validation)
        )
        options = replace(options, model=model, data=place, validation=validation)
        folder = RunFolder.create_next(_RUNS, name) if out is None else RunFolder.create(out)
        try:
            return cls(folder, options, data.schema), data
        except BaseException:
            folder.discard_if_unused()
            raise

    @classmethod
    def open(cls, path: Path, *, trust: bool, **changed: object) -> Self:
        """Open the run in a folder, with some options ``changed``.

        Raises:
            ConfigError: It is no run, or names code and others can write there.
            CheckpointError: Its config.json is damaged.
        """
        folder = RunFolder(path)
        config = folder.read_config()
        try:
            schema = Schema.from_json(config["schema"])
            options = replace(Options(**config["options"]), **changed)  # type: ignore[arg-type]
            unsafe = options.names_code() and not trust and not folder.may_name_code()
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder.config_path} must hold the options and the schema of a run, but does "
                f"not: {error!r:.80}."
            ) from error
        if unsafe:
            raise ConfigError(
                f"`RUN` must be a folder that only you can write if it names code, but others can "
                f"write {path}. Look at its config.json, and give --trust if you trust it."
            )
        run = cls(folder, options, schema)
        run._digest, run._weights_step = config.get("data_digest"), config.get("weights_step")
        return run

    # -- training ----------------------------------------------------

    def train(self, data: Data, console: Console, *, trace: bool) -> bool:
        """Train to the last epoch, from the last checkpoint if there is one.

        Returns:
            Whether it came to its end; False if a signal stopped it before.
        """
        checkpoint = Checkpoint(
            self.folder.checkpoints_path, every_epochs=1, every_steps=self.options.every_steps
        )
        before = checkpoint.last
        try:
            with self.folder.held():
                return self._train(data, console, checkpoint, trace=trace)
        except Exception as error:
            # A `ConfigError`, as for a loss of nan, would be raised again.
            if checkpoint.last != before and not isinstance(error, ConfigError):
                error.add_note(f"Continue from its last checkpoint: {self._continuation}")
            if before and isinstance(error, CheckpointError):
                error.add_note(f"Or remove {before} and begin again: {self._continuation}")
            raise
        finally:
            self.folder.discard_if_unused()

    @property
    def _continuation(self) -> str:
        return f"phalanx resume {shlex.quote(str(self.folder.path))}"

    def _train(self, data: Data, console: Console, checkpoint: Checkpoint, *, trace: bool) -> bool:
        options, folder = self.options, self.folder
        train, validation = self._split(data)
        if validation is not None:
            self._try(validation, "The validation set")
        loader = self._loader(train, shuffle=True)
        callbacks: list[Any] = [JSONL(folder.metrics_path), Progress(console)]
        best: Checkpoint | None = None
        if options.early_stopping is not None:
            monitor = "train.loss" if validation is None else "validation.loss"
            best = Checkpoint(folder.best_path, monitor=monitor)
            callbacks += [EarlyStopping(monitor, patience=options.early_stopping), best]
        if trace:
            callbacks.append(Trace(folder.trace_path))
        last = checkpoint.last
        layers = self.module.modules() if last is None else ()
        for layer in layers:
            if isinstance(layer, Standardize) and len(train):
                layer.fit(train)
        with self._open_trainer(data, [*callbacks, checkpoint], length_of(loader)) as trainer:
            if last is not None:
                trainer.resume(last)
                self._set_rates(trainer, length_of(loader))
            is_left = trainer.epochs < options.epochs
            # A run that was killed before its weights were written has no epoch left.
            if not is_left and options.epochs != folder.read_config()["options"]["epochs"]:
                raise ConfigError(
                    f"`--epochs` must be more than the {trainer.epochs} that the run has finished, "
                    f"but is {options.epochs}. Give --epochs {2 * trainer.epochs}."
                )
            digest, before = digest_of(options.data), self._digest
            self._write_config(digest)
            console.print(self._describe())
            if before is not None and digest != before:
                console.print("The data has changed since then: this is no longer one run.")
            if not is_left:
                console.print(
                    f"All {trainer.epochs} epochs are finished, so only the weights are written. "
                    f"To train longer, give --epochs {2 * trainer.epochs}."
                )
            check = None if validation is None else self._loader(validation)
            with stopped_by_signals(trainer.stop, console) as interruption:
                if is_left:
                    trainer.fit(loader, epochs=options.epochs, validate=check, progress=False)
            interrupted = interruption.is_set() and trainer.epochs < options.epochs
            if not interrupted:
                if best is not None and best.best is not None:
                    trainer.module.load_state_dict(load_file(best.best / "model.safetensors"))
                folder.write_model(trainer.module)
                self._weights_step = trainer.steps
                self._write_config(digest)
            console.print(self._conclude(trainer, interrupted=interrupted))
        return not interrupted

    def _split(self, data: Data) -> tuple[Any, Any]:
        text, seed = self.options.validation, self.options.seed
        if Path(text).exists():
            return data.train, open_data(text, schema=data.schema).train
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise ConfigError(
                "`--validation` must be a share of the rows from 0 to less than 1, or other data, "
                f"but is {text!r}."
            )
        return split(data, share, seed)

    def _loader(self, rows: Any, *, shuffle: bool = False) -> Any:
        """Return batches of a Dataset; a loader of the user's own is used unchanged."""
        is_stream = isinstance(rows, IterableDataset)
        if not is_stream and not hasattr(rows, "__getitem__"):
            return rows
        size = self.options.batch_size
        shuffle = shuffle and not is_stream and len(rows) > 0
        # The rest of an epoch is left out: it may be too small for batch norm.
        drops = shuffle and len(rows) >= size
        return DataLoader(rows, batch_size=size, shuffle=shuffle, drop_last=drops)

    def _open_trainer(
        self, data: Data, callbacks: list[Any], num_batches: int | None = None
    ) -> Trainer:
        options = self.options
        outputs, targets = self._try(data.train)
        if self.schema.task not in ("classify", "regress"):
            task = "regress" if targets.is_floating_point() else "classify"
            self.schema = replace(self.schema, task=task)
        name, loss = find_loss(options.loss, self.schema.task)
        check_loss(name, outputs, targets, len(self.schema.classes))
        return Trainer(
            self.module,
            loss,
            partial(torch.optim.AdamW, lr=options.lr),
            microbatches=options.microbatches or None,
            replicas=_read_replicas(options.replicas, options.microbatches),
            executor=options.executor,
            seed=options.seed,
            clip_norm=options.clip_norm,
            scheduler=self._schedule(num_batches),
            scheduler_interval="step",
            metrics=_metrics_for(self.schema.task, outputs),
            callbacks=callbacks,
        )

    def _try(self, rows: Any, name: str = "`DATA`") -> tuple[Tensor, Tensor]:
        """Return the model's outputs for the first rows, and their targets."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            batch = next(iter(self._loader(rows)), None)
            if batch is None:
                raise ConfigError(f"{name} must have rows, but has none.")
            if isinstance(batch, dict):
                raise ConfigError(f"{name} must have pairs (inputs, target), not dicts {[*batch]}.")
            if not isinstance(batch, (list, tuple)) or len(batch) < 2:
                raise ConfigError(f"{name} must have targets, but has rows of inputs alone.")
            inputs, targets = batch[:2]
            self.module.eval()
            try:
                return self._forward((inputs[:2],)), targets[:2]
            finally:
                self.module.train()

    def _schedule(self, num_batches: int | None) -> Callable[[Optimizer], LambdaLR] | None:
        """Return the learning rate's way to the last epoch; constant for data without a length."""
        if not num_batches:
            return None
        return lambda optimizer: LambdaLR(optimizer, lambda step: self._rate(step, num_batches))

    def _rate(self, step: int, num_batches: int) -> float:
        done = min(1.0, step / (self.options.epochs * num_batches))
        return _SCHEDULES[self.options.schedule](done)

    def _set_rates(self, trainer: Trainer, num_batches: int | None) -> None:
        """Give a run whose number of epochs has changed the rates of its place in the new one."""
        if num_batches:
            for group in trainer.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self._rate(trainer.steps, num_batches)

    def _write_config(self, digest: str | None) -> None:
        self.folder.write_config(
            {
                "options": asdict(self.options),
                "schema": asdict(self.schema),
                "data_digest": digest,
                "weights_step": self._weights_step,
                "versions": {
                    "phalanx": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            }
        )

    def _describe(self) -> str:
        options = self.options
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return (
            f"{options.model} on {options.data} to {self.schema.task}, {count:,} parameters; "
            f"batches of {options.batch_size}, seed {options.seed}\nRun folder: {self.folder.path}"
        )

    def _conclude(self, trainer: Trainer, *, interrupted: bool) -> str:
        path = shlex.quote(str(self.folder.path))
        if not interrupted:
            early = (
                f"Stopped early: {self.options.early_stopping} epochs without a better loss. The "
                "weights are those of the best epoch.\n"
                if trainer.epochs < self.options.epochs
                else ""
            )
            return (
                f"{early}Weights and metrics are in {path}. Draw its curves, or predict:"
                f"\n  phalanx report {path}\n  phalanx predict {path} DATA"
            )
        return (
            f"Stopped after step {trainer.steps}; {trainer.epochs} of {self.options.epochs} epochs "
            f"are finished. Continue with:\n  {self._continuation}"
        )

    # -- the trained model -------------------------------------------

    def evaluate(self, data: Data) -> dict[str, float]:
        """Return the loss and the metrics over ``data``; its validation part where it has one."""
        self._load_weights()
        rows = data.train if data.validation is None else data.validation
        with self._open_trainer(data, []) as trainer:
            return trainer.evaluate(self._loader(rows))

    def predict(self, data: Data) -> Tensor:
        """Return the outputs for all rows of ``data``, which may lack targets; [rows, outputs]."""
        self._load_weights()
        self.module.eval()
        with torch.inference_mode():
            outputs = [self._forward(batch) for batch in self._loader(data.train)]
        width = self.schema.num_outputs or len(self.schema.classes) or 1
        outputs = outputs or [torch.empty(0, width)]
        if not all(isinstance(each, Tensor) for each in outputs):
            raise ConfigError("The model must return a tensor to predict, but does not.")
        found = torch.cat(outputs)
        return found.reshape(len(found), math.prod(found.shape[1:]))

    def _forward(self, batch: Any) -> Any:  # Any: a user's
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        known, shape = self.schema.input_shape or (), tuple(getattr(inputs, "shape", ())[1:])
        if {"mlp": shape != known, "cnn": shape[:1] != known[:1]}.get(self.options.model):
            raise ConfigError(
                f"`DATA` and `--validation` must have rows of shape {known}, as in training, but "
                f"have rows of {shape}. Only --model cnn takes other heights and widths."
            )
        return self.module(inputs)

    def _load_weights(self) -> None:
        path = self.folder.model_path
        if not path.is_file():
            raise ConfigError(
                f"`RUN` must be finished, but {self.folder.path} has no model.safetensors. "
                f"Finish it: {self._continuation}"
            )
        try:
            self.module.load_state_dict(load_file(path))
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} must be whole, but is not: {error}. Write it again: {self._continuation}"
            ) from error
        step, last = self._weights_step, Checkpoint(self.folder.checkpoints_path).last
        if step is not None and last is not None and int(last.name[5:]) > step:
            warn_user(
                f"The weights are those after step {step}, but the run was continued to step "
                f"{int(last.name[5:])} and has not ended. Finish it: {self._continuation}"
            )


def _read_replicas(text: str, microbatches: int) -> int | str | list[str] | None:
    """Read ``--replicas``: a number, "auto", or a device for each; see `Trainer`."""
    if text == "auto":
        return text if microbatches else None
    return int(text) if text.isdecimal() else text.split(",")


def _metrics_for(task: str, outputs: Tensor) -> dict[str, Metric]:
    if task != "classify" or outputs.dim() < 2 or outputs.shape[1] < 2:
        return {}
    from torchmetrics.classification import MulticlassAccuracy  # slow to import

    # "micro": the fraction of rows that are right, where torchmetrics' default averages classes.
    return {"accuracy": MulticlassAccuracy(num_classes=outputs.shape[1], average="micro")}

"""What ``phalanx train`` was asked for: from words on the command line to checked values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from phalanx.cli.losses import LOSSES
from phalanx.cli.recipes import default_model, defaults_for
from phalanx.codecs import resolve_codec
from phalanx.errors import CheckpointError, ConfigError
from phalanx.train import EXECUTORS

Replicas = Literal["auto"] | int | tuple[str, ...]
Workloads = Literal["auto"] | tuple[float, ...] | None

# These may change when a run goes on; all others decide its numbers and must stay.
_CHANGEABLE = (
    "replicas",
    "workloads",
    "epochs",
    "lr",
    "executor",
    "timeout_s",
    "max_failures",
    "memory_dir",
)
_OF_WORKERS = {"executor": "threads", "timeout_s": 300.0, "max_failures": 20, "memory_dir": None}
_EXECUTORS = tuple(each for each in EXECUTORS if each != "ranks")  # the command is no rank of a job
_LARGEST_SEED = 2**63 - 1  # what torch's generators take


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of one training, complete.

    ``replicas`` and ``workloads`` stay as they were written, so that config.json reads like the
    command line; :func:`parse_replicas` and :func:`parse_workloads` say what they mean.

    Raises:
        ConfigError: A value is out of its range.
    """

    data: str
    model: str
    replicas: str
    workloads: str | None
    microbatches: int | None
    epochs: int
    batch_size: int
    lr: float
    seed: int
    loss: str | None = None
    forward: str | None = None
    codec: str | None = None
    executor: str = "threads"
    timeout_s: float = 300.0
    max_failures: int = 20
    memory_dir: str | None = None

    def __post_init__(self) -> None:
        _check_count("epochs", self.epochs)
        _check_count("batch-size", self.batch_size)
        if self.microbatches is not None:
            _check_count("microbatches", self.microbatches)
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ConfigError(f"`--lr` must be a number above 0, but is {self.lr!r}.")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigError(f"`--seed` must be from 0 to 2**63 - 1, but is {self.seed!r}.")
        _check_loss(self.loss, self.forward)
        if self.codec is not None:
            _check_codec(self.codec)
        if self.executor not in _EXECUTORS:
            raise ConfigError(
                f"`--executor` must be one of {', '.join(_EXECUTORS)}, but is {self.executor!r}. "
                "For ranks of a job write a script with a `Trainer`."
            )
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ConfigError(f"`--timeout-s` must be above 0 seconds, but is {self.timeout_s!r}.")
        if self.max_failures < 0:
            raise ConfigError(f"`--max-failures` must be 0 or more, but is {self.max_failures!r}.")
        check_formation(parse_replicas(self.replicas), parse_workloads(self.workloads))


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """The same as said on the command line: None for what was not said."""

    data: str | None = None
    model: str | None = None
    loss: str | None = None
    forward: str | None = None
    replicas: str | None = None
    workloads: str | None = None
    microbatches: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int | None = None
    codec: str | None = None
    executor: str | None = None
    timeout_s: float | None = None
    max_failures: int | None = None
    memory_dir: str | None = None


def _check_loss(loss: str | None, forward: str | None) -> None:
    if loss is not None and loss not in LOSSES and ":" not in loss:
        raise ConfigError(
            f"`--loss` must be {', '.join(LOSSES)} or module:attribute, but is {loss!r}."
        )
    if forward is not None and ":" not in forward:
        raise ConfigError(f"`--forward` must be module:attribute, but is {forward!r}.")
    if loss is not None and forward is not None:
        raise ConfigError(
            f"`--loss` must be left out with `--forward`, which returns the loss, but is {loss!r}."
        )


def _check_codec(name: str) -> None:
    try:
        resolve_codec(name)
    except ConfigError as exc:  # it also speaks of objects, which nobody can type
        raise ConfigError(
            f"`--codec` must be fp16, bf16, one_bit, top_k or 'top_k(fraction)', but is {name!r}."
        ) from exc


def parse_replicas(text: str) -> Replicas:
    """Read ``--replicas``: ``auto``, a number, or one device per replica.

    Whether a device exists is asked where it is used.

    Raises:
        ConfigError: It is none of these.

    Example:
        >>> parse_replicas("auto"), parse_replicas("3"), parse_replicas("cpu,cuda:0")
        ('auto', 3, ('cpu', 'cuda:0'))
    """
    words = tuple(word.strip() for word in text.split(","))
    if words == ("auto",):
        return "auto"
    if re.fullmatch(r"[0-9]{1,18}", words[0]) and len(words) == 1:
        count = int(words[0])
        if count < 1:
            raise ConfigError(
                "`--replicas` must be at least 1, but is 0. Give 1 for training without replicas."
            )
        return count
    for word in words:
        if not re.fullmatch(r"[a-z]+(:[0-9]+)?", word) or word == "auto":
            raise ConfigError(
                "`--replicas` must be `auto`, a number, or one device per replica such as "
                f"`cpu,cpu,cuda:0`, but is {text!r}."
            )
    return words


def parse_workloads(text: str | None) -> Workloads:
    """Read ``--workloads``: the relative shares of the replicas, as ``2,1``, or ``auto``.

    Raises:
        ConfigError: One is no number, is negative or is not finite, or all are 0.

    Example:
        >>> parse_workloads("2,1.5"), parse_workloads("auto")
        ((2.0, 1.5), 'auto')
    """
    if text is None:
        return None
    if text.strip() == "auto":
        return "auto"
    try:
        workloads = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            "`--workloads` must be `auto`, or numbers with commas between, as 2,1, but is "
            f"{text!r}."
        ) from None
    for workload in workloads:
        if not (workload >= 0 and math.isfinite(workload)):
            raise ConfigError(
                f"`--workloads` must hold finite numbers from 0 on, but holds {workload!r}."
            )
    if not any(workloads):
        raise ConfigError(f"`--workloads` must not all be 0, but is {text!r}.")
    return workloads


def check_formation(replicas: Replicas, workloads: Workloads) -> None:
    """Refuse workloads that do not match the replicas."""
    if workloads is None or workloads == "auto":
        return
    if replicas == "auto":
        raise ConfigError(
            "`--workloads` must come with a fixed number of replicas, but `--replicas` is auto. "
            f"Give --replicas {len(workloads)} too."
        )
    count = replicas if isinstance(replicas, int) else len(replicas)
    if len(workloads) != count:
        raise ConfigError(
            f"`--workloads` must hold one share per replica ({count}), but holds {len(workloads)}. "
            f"Give {','.join(['1'] * count)} for equal shares."
        )


def complete(given: GivenOptions) -> TrainOptions:
    """Fill in what was not said: digits, the model that suits the data, and their recipe.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> complete(GivenOptions(data="text:stdlib")).model
        'gpt'
    """
    data = "digits" if given.data is None else given.data
    model = default_model(data) if given.model is None else given.model
    recipe = defaults_for(data, model)
    defaults = {
        "data": data,
        "model": model,
        "replicas": "auto",
        "seed": 0,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr,
        **_OF_WORKERS,
    }
    return _served(TrainOptions(**{**_nothing_said(), **defaults, **_said(given)}), given)


def continue_with(stored: TrainOptions, given: GivenOptions, *, run: str) -> TrainOptions:
    """Take over the options of a run that goes on.

    ``replicas``, ``workloads``, ``epochs`` and ``lr`` may be given anew; new replicas without new
    workloads have equal ones.

    Args:
        run: The run folder, for the message.

    Raises:
        ConfigError: Another option was given and differs.
    """
    said = _said(given)
    for name, value in said.items():
        before = getattr(stored, name)
        if name not in _CHANGEABLE and value != before:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"`{flag}` must be what the run in {run} began with ({_word(before)}), but is "
                f"{_word(value)}. Leave it out, or start a run of its own with `--out`."
            )
    anew = {"workloads": None} if "replicas" in said else {}
    return _served(TrainOptions(**{**asdict(stored), **anew, **said}), given)


def _served(options: TrainOptions, given: GivenOptions) -> TrainOptions:
    """Return ``options``, unless the executor takes no notice of one that was given."""
    for name in sorted(_OF_WORKERS.keys() & _said(given).keys() - {"executor"}):
        if options.executor != "processes":
            raise ConfigError(
                f"`--{name.replace('_', '-')}` must come with worker processes, but the executor "
                f"is {options.executor!r}. Add --executor processes, or leave it out."
            )
    return options


def read_options(stored: Mapping[str, Any], *, source: str) -> TrainOptions:
    """Check the options of a config.json, which may have been edited by hand.

    Any: it is JSON, and this is where its types are found out.

    Raises:
        CheckpointError: One is missing, unknown or of another type.
        ConfigError: A value is out of its range.
    """
    types: dict[str, tuple[type, ...]] = {
        "data": (str,),
        "model": (str,),
        "replicas": (str,),
        "workloads": (str, type(None)),
        "microbatches": (int, type(None)),
        "epochs": (int,),
        "batch_size": (int,),
        "lr": (float, int),
        "seed": (int,),
        "loss": (str, type(None)),
        "forward": (str, type(None)),
        "codec": (str, type(None)),
        "executor": (str,),
        "timeout_s": (float, int),
        "max_failures": (int,),
        "memory_dir": (str, type(None)),
    }
    # Earlier runs had none of these, and another name for the executor.
    stored = {"executor" if name == "crew" else name: value for name, value in stored.items()}
    stored = {"loss": None, "forward": None, "codec": None, **_OF_WORKERS, **stored}
    if stored.keys() != types.keys():
        raise CheckpointError(
            f"`options` in {source} must be {', '.join(types)}, but are {', '.join(stored)}."
        )
    for name, value in stored.items():
        is_huge = isinstance(value, int) and abs(value) > _LARGEST_SEED
        if not isinstance(value, types[name]) or isinstance(value, bool) or is_huge:
            raise CheckpointError(
                f"`{name}` in {source} must be of type {types[name][0].__name__}, but is "
                f"{value!r:.80}."
            )
    return TrainOptions(**stored)


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise ConfigError(f"`--{name}` must be 1 or more, but is {count!r}.")


# Any, here and below: values of several options, by name.
def _said(given: GivenOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(given).items() if value is not None}


def _nothing_said() -> dict[str, Any]:
    return {field.name: None for field in fields(GivenOptions)}


def _word(value: object) -> str:
    return "not given" if value is None else str(value)

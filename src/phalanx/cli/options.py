"""What ``phalanx train`` was asked for: from words on the command line to checked values.

`TrainOptions` says it all: its fields are the command's options, and the `options` of config.json.
"""

from __future__ import annotations

import inspect
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import typer

from phalanx.cli.recipes import default_model, defaults_for
from phalanx.errors import CheckpointError, ConfigError

Replicas = Literal["auto"] | int | tuple[str, ...]
Workloads = tuple[float, ...] | None
Given = Mapping[str, Any]  # what was said on the command line, by name. Any: of several types

# These may change when a run goes on; all others decide its numbers and must stay.
_CHANGEABLE = ("replicas", "workloads", "epochs", "lr", "executor")
_OF_CODE = ("data", "model", "loss", "forward")  # they may be module:attribute
_EXECUTORS = ("threads", "processes", "inline")  # the command is no rank of a job
_LARGEST_RATE = (2 - 2**-23) * 2.0**127  # of float32
_LARGEST_SEED = 2**63 - 1  # what torch's generators take


def _option(metavar: str, help: str, default: str) -> Any:  # Any: as typer.Option
    return typer.Option(metavar=metavar, help=help, show_default=default)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of one training, complete.

    ``replicas`` and ``workloads`` stay as they were written, so that config.json reads like the
    command line; :func:`parse_replicas` and :func:`parse_workloads` say what they mean.

    Raises:
        ConfigError: A value is out of its range.
    """

    data: Annotated[
        str,
        _option(
            "DATA",
            "digits (ships with Phalanx), text:PATH (the bytes of a file or folder), or "
            "module:attribute (your own Dataset or loader).",
            "digits",
        ),
    ]
    model: Annotated[
        str,
        _option(
            "MODEL",
            "mlp, cnn, gpt, or module:attribute (your own nn.Module, or what makes it).",
            "cnn; gpt for text",
        ),
    ]
    loss: Annotated[
        str | None,
        _option(
            "LOSS",
            "cross_entropy (of logits and classes), mse, l1, bce (of logits and numbers from 0 to "
            "1), or module:attribute (your own, of outputs and targets).",
            "cross_entropy",
        ),
    ] = None
    forward: Annotated[
        str | None,
        _option(
            "MODULE:ATTRIBUTE",
            "Your own function of the model and a microbatch that returns the loss, in the place "
            "of --loss, for batches of any form.",
            "the loss of model(inputs)",
        ),
    ] = None
    replicas: Annotated[
        str,
        _option(
            "auto|N|DEVICES",
            "How many replicas, or one device for each, as cpu,cpu,cuda:0. With auto, one for "
            "each core, as far as there are microbatches.",
            "auto; 1 without microbatches",
        ),
    ] = "auto"
    workloads: Annotated[
        str | None,
        _option(
            "W,W,...",
            "Relative shares of the replicas: with 2,1 the first takes two thirds.",
            "equal",
        ),
    ] = None
    microbatches: Annotated[
        int,
        _option(
            "M",
            "Cut each batch into M pieces: the trained weights are then bitwise identical for any "
            "number of replicas. 0: one piece per replica, which is faster.",
            "4",
        ),
    ] = 4
    epochs: Annotated[int, _option("N", "Times through the data.", "suits data and model")]
    batch_size: Annotated[int, _option("N", "Samples per step.", "suits data and model")]
    lr: Annotated[
        float,
        _option(
            "RATE",
            "First learning rate of AdamW; it falls to 0 over all epochs. Given with "
            "--resume, the rate is what it would be if the run had begun with it.",
            "suits data and model",
        ),
    ]
    seed: Annotated[
        int,
        _option("N", "Decides initial weights, data order, dropout and what data sets draw.", "0"),
    ] = 0
    executor: Annotated[
        str,
        _option(
            "EXECUTOR",
            "threads of this process; processes, which may die without loss; or inline, one "
            "replica in the main thread.",
            "threads",
        ),
    ] = "threads"

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("microbatches", 0)):
            count = getattr(self, name)
            if count < least:
                raise ConfigError(f"`{_flag(name)}` must be {least} or more, but is {count!r}.")
        if not 0 < self.lr <= _LARGEST_RATE:
            raise ConfigError(
                f"`--lr` must be a number above 0 that float32 holds, but is {self.lr!r}."
            )
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigError(f"`--seed` must be from 0 to 2**63 - 1, but is {self.seed!r}.")
        _check_loss(self.loss, self.forward)
        if self.executor not in _EXECUTORS:
            raise ConfigError(
                f"`--executor` must be one of {', '.join(_EXECUTORS)}, but is {self.executor!r}. "
                "For ranks of a job write a script with a `Trainer`."
            )
        replicas, workloads = parse_replicas(self.replicas), parse_workloads(self.workloads)
        check_configuration(replicas, workloads)
        _check_microbatches(replicas, self.microbatches)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first parameter is a `Given`, an option for each of `TrainOptions`.

    None may be given, and one that was not is not in the `Given`. typer reads the signature.
    """
    names = [field.name for field in fields(TrainOptions)]

    def called(**values: Any) -> None:
        said = {name: values.pop(name) for name in names}
        command({name: value for name, value in said.items() if value is not None}, **values)

    hints = get_type_hints(TrainOptions, include_extras=True)
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[hints[name].__origin__ | None, hints[name].__metadata__[0]],
        )
        for name in names
    ]
    _, *others = inspect.signature(command, eval_str=True).parameters.values()
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature([*options, *others])  # type: ignore[attr-defined]
    return called


def _check_loss(loss: str | None, forward: str | None) -> None:
    from phalanx.cli.losses import LOSSES  # late: needs torch

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
    """Read ``--workloads``: the relative shares of the replicas, as ``2,1``.

    Raises:
        ConfigError: One is no number, is negative or is not finite, or all are 0.

    Example:
        >>> parse_workloads("2,1.5")
        (2.0, 1.5)
    """
    if text is None:
        return None
    try:
        workloads = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"`--workloads` must be numbers with commas between, as 2,1, but is {text!r}."
        ) from None
    for workload in workloads:
        if not (workload >= 0 and math.isfinite(workload)):
            raise ConfigError(
                f"`--workloads` must hold finite numbers from 0 on, but holds {workload!r}."
            )
    if not any(workloads):
        raise ConfigError(f"`--workloads` must not all be 0, but is {text!r}.")
    return workloads


def _check_microbatches(replicas: Replicas, microbatches: int) -> None:
    """Refuse replicas without microbatches of their own."""
    if replicas == "auto":
        if microbatches == 0:
            raise ConfigError(
                "`--replicas` must be a number or devices with --microbatches 0, where each "
                "replica computes one piece, but is auto."
            )
        return
    count = replicas if isinstance(replicas, int) else len(replicas)
    if microbatches and count > microbatches:
        raise ConfigError(
            f"`--replicas` must be at most as many as there are microbatches ({microbatches}), "
            f"but are {count}. Give --microbatches {count} or more."
        )


def check_configuration(replicas: Replicas, workloads: Workloads) -> None:
    """Refuse workloads that do not match the replicas."""
    if workloads is None:
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


def complete(given: Given) -> TrainOptions:
    """Fill in what was not said: digits, the model that suits the data, and their recipe.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> complete({"data": "text:book.txt"}).model
        'gpt'
    """
    data = given.get("data", "digits")
    model = given.get("model", default_model(data))
    recipe = asdict(defaults_for(data, model))
    if given.get("microbatches") == 0:
        recipe["replicas"] = "1"
    return TrainOptions(**{"data": data, "model": model, **recipe, **given})


def continue_with(stored: TrainOptions, given: Given, *, run: str) -> TrainOptions:
    """Take over the options of a run that goes on.

    ``replicas``, ``workloads``, ``epochs`` and ``lr`` may be changed; new replicas without new
    workloads have equal ones. What :func:`untrusted` names must be given again.

    Args:
        run: The run folder, for the message.

    Raises:
        ConfigError: Another option was given and differs, or one was not given again.
    """
    for name, value in given.items():
        before = getattr(stored, name)
        if name not in _CHANGEABLE and value != before:
            way_out = "Give it so" if name in untrusted(stored) else "Leave it out"
            raise ConfigError(
                f"`{_flag(name)}` must be what the run in {run} began with "
                f"({'not given' if before is None else before}), but is {value}. "
                f"{way_out}, or start a run of its own with `--out`."
            )
    anew = {"workloads": None} if "replicas" in given else {}
    options = TrainOptions(**{**asdict(stored), **anew, **given})
    left_out = {name: value for name, value in untrusted(options).items() if name not in given}
    if left_out:
        flags = " and ".join(f"`{_flag(name)}`" for name in left_out)
        raise ConfigError(
            f"{flags} must be given again with `--resume`, because a run folder is not trusted to "
            f"name code, but {'is' if len(left_out) == 1 else 'are'} left out. "
            f"If you trust what {run} names, add {shlex.join(as_words(left_out))}"
        )
    return options


def untrusted(options: TrainOptions) -> dict[str, str]:
    """Return, by name, the options that name code; a run folder may be anybody's."""
    found = {name: getattr(options, name) for name in _OF_CODE}
    return {name: value for name, value in found.items() if value and _names_code(name, value)}


def _names_code(name: str, value: str) -> bool:
    reader, separator, _ = value.partition(":")
    return bool(separator) and not (name == "data" and reader == "text")


def as_words(options: Mapping[str, str]) -> list[str]:
    """Return options as the command line has them.

    Example:
        >>> as_words({"data": "own:rows"})
        ['--data', 'own:rows']
    """
    return [word for name, value in options.items() for word in (_flag(name), value)]


def read_options(stored: Mapping[str, Any], *, source: str) -> TrainOptions:
    """Read the options of a config.json. Any: it is JSON.

    Raises:
        CheckpointError: One is missing, unknown or of another type.
        ConfigError: A value is out of its range.
    """
    try:
        return TrainOptions(**stored)
    except TypeError as error:
        raise CheckpointError(f"`options` in {source} must be those of a run: {error}.") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""The form of a run's data, and its targets as tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from phalanx.errors import ConfigError

_GAPS = ("", "na", "n/a", "nan", "null", "none", "?")  # cells of a table without a value
_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")
_FEW = 20  # whole numbers are classes if they have so few values, or repeat so often


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The form of the training data, by which later data is read; JSON holds it.

    Attributes:
        task: "classify", "regress", or "none" for rows without targets.
        input_shape: Of one row; None for data of the user's own.
        num_outputs: Classes, or numbers to predict; None for data of the user's own.
        classes: Names of the classes, in the order of their numbers; empty where they have none.
        columns: Of a table: the names of the inputs.
        target: Of a table: the name of the column to predict.
        categories: Of a table: the words of each column that is no column of numbers.
        size: Width and height of pictures.
        is_text: Whether the rows are pieces of one text.
    """

    task: str = "none"
    input_shape: tuple[int, ...] | None = None
    num_outputs: int | None = None
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    target: str | None = None
    categories: dict[str, list[str]] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    is_text: bool = False

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:  # Any: JSON
        """Read the JSON of what `asdict` returned.

        Raises:
            TypeError: It is something else.
        """
        lists = {name: tuple(each) for name, each in stored.items() if isinstance(each, list)}
        return cls(**{**stored, **lists})


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data that is open.

    Attributes:
        train: A Dataset of (input, target), or a loader of the user's own.
        validation: The same; None where it is cut from ``train``.
        schema: The form of both.
        names: Of the rows of ``train``: the files of pictures; else empty.
    """

    train: Any
    validation: Any = None
    schema: Schema
    names: tuple[str, ...] = ()


def encode_targets(
    values: Sequence[Any], task: str, schema: Schema | None
) -> tuple[Tensor, str, tuple[str, ...]]:
    """Return targets as a tensor, the task, and the names of the classes.

    Args:
        values: Words or numbers.
        task: As in :func:`open_data`.
        schema: Of a run: its task and classes are used.

    Raises:
        ConfigError: A word or number is unknown to ``schema``, or no number where one is needed.
    """
    numbers = [number_of(value) for value in values]
    gaps = [
        row for row, number in enumerate(numbers, 1) if number is not None and math.isnan(number)
    ]
    if gaps:
        raise ConfigError(
            f"The target must be in each row, but is missing in {len(gaps)} of {len(values)} "
            f"rows, first in row {gaps[0]}. Fill these rows, or leave them out."
        )
    if schema is not None and schema.task in ("classify", "regress"):
        task = schema.task
    elif task == "auto":
        task = _task_of(numbers)
    if task == "regress":
        words = sum(number is None for number in numbers)
        if words:
            raise ConfigError(
                "The target must be a number in each row to be regressed, but is a word in "
                f"{words} of {len(values)} rows. Give --task classify."
            )
        return torch.tensor(numbers)[:, None], task, ()
    known = schema.classes if schema is not None else ()
    has_words = any(number_of(each) is None for each in known or values)
    names = [
        str(each) if has_words else _name(each, x) for each, x in zip(values, numbers, strict=True)
    ]
    classes = known or _sorted(names)
    places = {name: place for place, name in enumerate(classes)}
    unknown = next((name for name in names if name not in places), None)
    if unknown is not None:
        raise ConfigError(
            f"The target must be one of the classes {', '.join(classes[:20])} that the run was "
            f"trained on, but is {unknown!r} in a row."
        )
    return torch.tensor([places[name] for name in names]), task, classes


def number_of(value: Any) -> float | None:
    """Return a number; nan for a gap, None for a word, as 1_000 and digits of other scripts."""
    if isinstance(value, str) and value.strip().lower() in _GAPS:
        return math.nan
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _task_of(numbers: Sequence[float | None]) -> str:
    if any(number is None for number in numbers):
        return "classify"
    is_whole = all(number.is_integer() for number in numbers if number is not None)
    few = max(_FEW, len(numbers) // _FEW)
    return "classify" if is_whole and len(set(numbers)) <= few else "regress"


def _name(value: Any, number: float | None) -> str:
    """Return one name for 7, "7", "7.0" and "007"; digits are read exactly: a float has 53 bits."""
    if whole := _WHOLE.fullmatch(str(value)):
        return str(int(whole[1]))
    return str(int(number)) if number is not None and number.is_integer() else str(value)


def _sorted(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names), key=lambda name: (number_of(name) or 0.0, name)))

"""Arguments of the kind that they must be, or refused by name before anything is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from numbers import Integral, Real
from types import FunctionType
from typing import Any

from torch import Tensor

from phalanx.errors import ConfigError


# Any, here and below: whatever the user wrote.
def check_argument(fits: bool, name: str, wanted: str, given: Any, way_out: str = "") -> None:
    """Say the sentence for ``name`` unless it ``fits``.

    Example:
        >>> check_argument(False, "dim", "be a whole number", 1.5, "Give 1.")
        Traceback (most recent call last):
        phalanx.errors.ConfigError: `dim` must be a whole number, but is 1.5. Give 1.
    """
    if not fits:
        told = f" {way_out}" if way_out else ""
        raise ConfigError(f"`{name}` must {wanted}, but is {_shown(given)}.{told}")


def check_microbatches(microbatches: Any) -> None:
    """Refuse a number of microbatches that is none."""
    if microbatches is not None:
        read_count("microbatches", microbatches, 1, way_out="Give None for one slice per replica.")


def check_mean_loss(name: str, loss: Any) -> None:
    """Refuse a loss that says by its ``reduction`` that it is no mean, as torch's do.

    A `functools.partial` says it by its keywords, else by what it calls; a method by its object; a
    function by the default of its parameter.
    """
    keywords: dict[str, Any] = {}
    while isinstance(loss, partial):
        keywords, loss = {**loss.keywords, **keywords}, loss.func
    reduction = getattr(getattr(loss, "__self__", loss), "reduction", None)
    if reduction is None and isinstance(loss, FunctionType):
        parameter = signature(loss).parameters.get("reduction")
        reduction = parameter.default if parameter else None
    reduction = keywords.get("reduction", reduction)
    if reduction in ("sum", "none"):
        raise ConfigError(
            f"`{name}` must have reduction='mean', but has {reduction!r}. A loss that divides by "
            "itself may be called in a function of your own."
        )


def read_whole(name: str, given: Any, way_out: str = "") -> int:
    """Return a whole number; a bool is refused."""
    fits = isinstance(given, Integral) and not isinstance(given, bool)
    check_argument(fits, name, "be a whole number", given, way_out)
    return int(given)


def read_count(name: str, given: Any, least: int, unit: str = "", way_out: str = "") -> int:
    """Read a whole number that is not too small."""
    count = read_whole(name, given, way_out)
    wanted = f"be at least {least}{unit and f' {unit}'}"
    check_argument(count >= least, name, wanted, given, way_out)
    return count


def read_number(name: str, given: Any, way_out: str = "") -> float:
    """Return a real number; a bool is refused."""
    fits = isinstance(given, Real) and not isinstance(given, bool)
    check_argument(fits, name, "be a number", given, way_out)
    return float(given)


def check_function(name: str, given: Any, wanted: str = "be a function", way_out: str = "") -> None:
    """Refuse what cannot be called, and a class, whose call would only make an object."""
    check_argument(callable(given), name, wanted, given, way_out)
    if isinstance(given, type):
        raise ConfigError(f"`{name}` must be an object, but is a class. Write {given.__name__}().")


def _shown(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"a tensor of shape {tuple(given.shape)}"
    return f"{given!r:.80}"


def say_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Say ``[0, 1, 2, 5]``, in ascending order and at least one, as "Workers 0–2 and 5".

    Example:
        >>> say_numbers("Worker", [3]), say_numbers("Worker", [0, 1, 2, 5])
        ('Worker 3', 'Workers 0–2 and 5')
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    words = [str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans]
    listed = ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}"

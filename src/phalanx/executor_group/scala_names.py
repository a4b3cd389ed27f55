"""Arguments by the names that Scala has for them: ``isTrain`` for ``is_train``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from phalanx.errors import ConfigError

__all__ = ["takes_scala_names"]

P = ParamSpec("P")
R = TypeVar("R")

# The two arguments that MXNet names differently in its two languages.
_IRREGULAR = {"workLoadList": "workload", "work_load_list": "workload", "monitor": "mon"}


def takes_scala_names(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` take keywords in Scala's spelling beside its own.

    Example:
        >>> @takes_scala_names
        ... def forward(data_batch, is_train=None):
        ...     return data_batch, is_train
        >>> forward("batch", isTrain=True)
        ('batch', True)

    Raises:
        ConfigError: By the function, if an argument is given under both names.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        known: dict[str, Any] = {}  # Any: the function's own arguments
        for name, value in kwargs.items():
            own = _IRREGULAR.get(name) or re.sub("[A-Z]", lambda found: f"_{found[0]}", name)
            if own.lower() in known:
                raise ConfigError(
                    f"`{own.lower()}` must be given once, but is given as `{name}`, too. Leave one "
                    "out."
                )
            known[own.lower()] = value
        return cast(Callable[..., R], function)(*args, **known)

    return call

"""Functions that `torch.compile` leaves as they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from phalanx.torch_internals import COMPILER

__all__ = ["uncompiled"]

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Run ``function``, and all that it calls, as it is written, also within `torch.compile`.

    Workers run in other threads, where the compiler cannot follow, and what draws their random
    numbers is called by operators, not by the model. Torch's own decorator would import the
    compiler, which takes a second or two, in every process that uses us.
    """
    left_alone: list[Callable[P, T]] = []

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        compiler = sys.modules.get(COMPILER)
        if compiler is None:
            return function(*args, **kwargs)
        if not left_alone:
            left_alone.append(compiler.disable(function))
            # Or it would compile this very function, once for each operator that is called by it.
            compiler.eval_frame.skip_code(run.__code__)
        return left_alone[0](*args, **kwargs)

    return functools.wraps(function)(run)

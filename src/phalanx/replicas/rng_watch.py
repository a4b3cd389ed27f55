"""Notice, in the first microbatches of a model, random numbers that no formation can repeat.

Python calls a thread's profile function before every call of a C function. That shows exactly which
thread calls the process's generators, and from which line; it is too slow to stay on.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
import torch

from phalanx.errors import UnsupportedError

__all__ = ["WRAPPERS", "RngWatch", "numpy_swap"]

_PYTHONS: Any = getattr(random.random, "__self__", None)  # the generator behind `random.random()`
_DRAWING = {"random", "getrandbits", "seed"}
_SEEDING = {"manual_seed", "seed", "set_state"}
_TORCH = os.path.dirname(torch.__file__) + os.sep
# What lies between a function that the compiler shall leave alone and who calls it.
WRAPPERS = {
    os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo", "eval_frame.py"),
}
# Who calls these is who calls the generator.
_FORWARDING = {
    *WRAPPERS,
    torch.random.__file__,
    torch.cuda.random.__file__,
    torch.cuda.__file__,
    contextlib.__file__,
}
_WAY_OUT = (
    "the same in every formation: draw with torch's functions and no `generator=`; for numbers "
    "that are the same in every call, give generator=torch.Generator().manual_seed(…), made where "
    "they are drawn."
)


class _Swaps:
    """Counts who puts NumPy's generator aside in this process for a while, at begin and end."""

    count = 0


@contextlib.contextmanager
def numpy_swap() -> Any:
    """Tell watches in other threads that the body moves NumPy's generator and puts it back."""
    _Swaps.count += 1
    try:
        yield
    finally:
        _Swaps.count += 1


class RngWatch:
    """Refuse, when the body is over, what it drew from elsewhere than its microbatch's generator.

    That is: torch's default generators when they are seeded, set or read (torch's own checkpointing
    does so without harm), a `torch.Generator` that was not seeded in the body, Python's `random`,
    and NumPy's. Where another profiler is at work in this thread, only NumPy's is seen.

    Args:
        alone: Whether no other thread of the program may draw from NumPy's generator meanwhile.
        reads: The body reads samples: their `random` and NumPy are seeded for each.

    Raises:
        UnsupportedError: On leaving, unless the body raised something itself.
    """

    def __init__(self, *, alone: bool, reads: bool = False) -> None:
        self._alone = alone and not reads
        self._reads = reads
        self._found: str | None = None
        self._seeded: list[torch.Generator] = []
        self._profiles = False
        self._numpy: Any = None  # Any: NumPy's own state
        self._swaps = 0

    def __enter__(self) -> Self:
        if self._alone:
            self._swaps, self._numpy = _Swaps.count, np.random.get_state()
        if sys.getprofile() is None:
            self._profiles = True
            sys.setprofile(self._on_event)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._profiles:
            sys.setprofile(None)
        if error is None:
            self._compare_numpy()
            if self._found is not None:
                whose = "sample" if self._reads else "microbatch"
                raise UnsupportedError(
                    f"{'A data set' if self._reads else 'A model'} must draw its random numbers "
                    f"from its {whose}'s generator, but {self._found}. Every {whose} has torch "
                    f"random numbers of its own, {_WAY_OUT}"
                )

    def check_generator(self, generator: torch.Generator) -> None:
        """Note a generator that is drawn from, if it was not seeded in the body."""
        if self._profiles and not any(generator is each for each in self._seeded):
            self._found = self._found or (
                "draws from a `torch.Generator` that was seeded before, which every replica would "
                "move on by itself"
            )

    # Any: what Python passes to profile functions.
    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(arg, "__self__", None)
        if owner is _PYTHONS:
            if arg.__name__ in _DRAWING and not self._reads:
                self._note("draws from Python's `random`", frame, {random.__file__})
        elif isinstance(owner, torch.Generator):
            if not _is_default(owner):
                if arg.__name__ in _SEEDING:
                    self._seeded.append(owner)
            else:
                self._note(f"calls `{arg.__name__}` of torch's default generator", frame, set())

    def _note(self, told: str, frame: FrameType | None, passed: set[str]) -> None:
        while frame is not None and frame.f_code.co_filename in _FORWARDING | passed:
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_TORCH):
            return  # torch's own: checkpointing keeps and puts back what nothing was drawn from
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        self._found = self._found or f"{told} ({place})"

    def _compare_numpy(self) -> None:
        if not self._alone:
            return
        before = self._numpy
        after: Any = np.random.get_state()
        if self._swaps % 2 or self._swaps != _Swaps.count:  # after the state: one may begin now
            return
        if before[2:] != after[2:] or not np.array_equal(before[1], after[1]):
            self._found = self._found or "draws from NumPy's global generator"


def _is_default(generator: torch.Generator) -> bool:
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    return any(generator is each for each in defaults)

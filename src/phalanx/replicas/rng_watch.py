"""Notice, in the first microbatches of a model, random numbers that no formation can repeat.

Python calls a thread's profile function before every call of a C function. That shows exactly which
thread calls the process's generators, and from which line; it is too slow to stay on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import types
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from phalanx.errors import UnsupportedError
from phalanx.replicas.default_generators import (
    accelerator_module,
    default_generators,
    default_states,
)
from phalanx.replicas.packing import pack

__all__ = ["WRAPPERS", "RngWatch"]

_PYTHONS: Any = getattr(random.random, "__self__", None)  # the generator behind `random.random()`
_DRAWING = {"random", "getrandbits", "seed"}
_SEEDING_PYTHONS = {"seed", "setstate"}
_LIBRARY = os.path.dirname(random.__file__) + os.sep
_SOBOL_MADE, _SOBOL_DRAWS = SobolEngine.__init__.__code__, SobolEngine.draw.__code__
_DEPTH = 5
_SEEDING = {"manual_seed", "seed", "set_state"}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LENDING = default_generators.__code__.co_filename
_SYMPY = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "sympy") + os.sep
# What lies between a function that the compiler shall leave alone and who calls it.
WRAPPERS = {
    os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo", "eval_frame.py"),
}
_WAY_OUT = (
    "the same in every formation: draw with torch's functions and no `generator=`; for numbers "
    "that are the same in every call, give generator=torch.Generator().manual_seed(…), made where "
    "they are drawn."
)


class RngWatch:
    """Refuse, when the body is over, what it drew from elsewhere than its microbatch's generator.

    That is: torch's default generators when they are seeded, set or read (torch's own checkpointing
    does so without harm), a generator of torch's, Python's or NumPy's that was made before, and the
    global ones of Python and NumPy. Where another profiler is at work in this thread, only NumPy's
    are seen, and torch's default one as another thread draws from it.

    Args:
        alone: Whether no other thread of the program may draw from global generators meanwhile.
        kept: Where generators of NumPy's may be kept: the module, the loss.

    Raises:
        UnsupportedError: On leaving, unless the body raised something itself.
    """

    def __init__(self, *, alone: bool, kept: Iterable[object] = ()) -> None:
        self._alone = alone
        self._found: str | None = None
        self._kept = tuple(kept)
        self._seeded: list[object] = []
        self._before: list[tuple[object, bytes]] = []
        self._torchs: list[Tensor] = []
        self._profiles = False
        self._numpy: Any = None  # Any: NumPy's own state

    def __enter__(self) -> Self:
        if self._alone:
            self._numpy = np.random.get_state()
            self._torchs = default_states()
        self._before = [(each, _state_of(each)) for each in _numpys_in(self._kept)]
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
            self._compare_kept()
            if self._found is not None:
                raise UnsupportedError(
                    "A model must draw its random numbers from its microbatch's generator, but "
                    f"{self._found}. Every microbatch has torch random numbers of its own, "
                    f"{_WAY_OUT}"
                )

    def check_generator(self, generator: torch.Generator) -> None:
        """Note a generator that is drawn from, if it was not seeded in the body."""
        if self._profiles and not self._was_seeded(generator):
            self._found = self._found or (
                "draws from a `torch.Generator` that was seeded before, which every replica would "
                "move on by itself"
            )

    # Any: what Python passes to profile functions.
    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call":
            if event == "call":
                self._on_call(frame)
            return
        owner = getattr(arg, "__self__", None)
        if owner is _PYTHONS:
            if arg.__name__ in _DRAWING:
                self._note("draws from Python's `random`", frame, {random.__file__})
        elif isinstance(owner, random.Random):
            self._on_pythons(owner, arg.__name__, frame)
        elif isinstance(owner, torch.Generator):
            if not _is_default(owner):
                if arg.__name__ in _SEEDING:
                    self._seeded.append(owner)
            elif frame.f_code.co_filename != _LENDING:
                self._note(f"calls `{arg.__name__}` of torch's default generator", frame, set())

    def _on_pythons(self, owner: random.Random, name: str, frame: FrameType | None) -> None:
        if name in _SEEDING_PYTHONS:
            self._seeded.append(owner)
        elif name in _DRAWING and not self._was_seeded(owner):
            while frame is not None and frame.f_code.co_filename == random.__file__:
                frame = frame.f_back
            if frame is not None and not _is_library(frame.f_code.co_filename):
                self._note("draws from a `random.Random` that was made before", frame, set())

    def _on_call(self, frame: FrameType) -> None:
        if frame.f_code is _SOBOL_MADE:
            self._seeded.append(frame.f_locals["self"])
        elif frame.f_code is _SOBOL_DRAWS and not self._was_seeded(frame.f_locals["self"]):
            passed = {frame.f_code.co_filename}
            self._note("draws from a `SobolEngine` that was made before", frame, passed)

    def _was_seeded(self, generator: object) -> bool:
        return any(generator is each for each in self._seeded)

    def _note(self, told: str, frame: FrameType | None, passed: set[str]) -> None:
        passed = passed | _forwarding()
        while frame is not None and frame.f_code.co_filename in passed:
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
        if before[2:] != after[2:] or not np.array_equal(before[1], after[1]):
            self._found = self._found or "draws from NumPy's global generator"

    def _compare_kept(self) -> None:
        for generator, before in self._before:
            if _state_of(generator) != before:
                kind = type(generator).__name__
                self._found = self._found or (
                    f"draws from a `{kind}` of NumPy's that was made before, which every replica "
                    "would move on by itself"
                )
        if self._torchs and not all(map(torch.equal, self._torchs, default_states())):
            self._found = self._found or (
                "draws from torch's default generator in a thread that it starts"
            )


def _is_library(file: str) -> bool:
    """Tell whether a file is Python's own, or SymPy's: torch's compiler shuffles by it."""
    return file.startswith(_SYMPY) or (file.startswith(_LIBRARY) and "site-packages" not in file)


# Any: generators of NumPy's, which have no common class.
def _state_of(generator: Any) -> bytes:
    if isinstance(generator, np.random.RandomState):
        return pack(generator.get_state(legacy=False))
    return pack(getattr(generator, "bit_generator", generator).state)


def _numpys_in(roots: Iterable[object]) -> list[object]:
    """Return NumPy's generators in attributes, containers, closures and bound arguments."""
    kinds = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
    found: list[object] = []
    waiting = [(root, _DEPTH) for root in roots]
    seen: dict[int, object] = {}
    while waiting:
        each, depth = waiting.pop()
        if id(each) in seen or isinstance(each, (Tensor, str, bytes, type, types.ModuleType)):
            continue
        seen[id(each)] = each
        if isinstance(each, kinds):
            found.append(each)
        elif isinstance(each, nn.Module):  # however deep it stands
            waiting += [(child, _DEPTH) for child in each._modules.values()]
            waiting += [(value, depth - 1) for value in vars(each).values() if depth]
        elif depth:
            waiting += [(value, depth - 1) for value in _members_of(each)]
    return found


def _members_of(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return list(found.values())
    if isinstance(found, (list, tuple, set)):
        return list(found)
    if isinstance(found, functools.partial):
        return [found.func, *found.args, *found.keywords.values()]
    if isinstance(found, types.MethodType):
        return [found.__self__, found.__func__]
    if isinstance(found, types.FunctionType):
        return [*(found.__closure__ or ()), *(found.__defaults__ or ()), *vars(found).values()]
    if isinstance(found, types.CellType):
        try:
            return [found.cell_contents]
        except ValueError:  # a name that was not assigned yet
            return []
    return list(vars(found).values()) if hasattr(found, "__dict__") else []


def _is_default(generator: torch.Generator) -> bool:
    return any(generator is each for each in default_generators())


@functools.cache
def _forwarding() -> frozenset[str]:
    """Return the files of functions of torch's that call a default generator for who calls them."""
    names = (accelerator_module(), getattr(accelerator_module(), "random", None))
    files = (getattr(each, "__file__", None) for each in names)
    known = {*WRAPPERS, torch.random.__file__, contextlib.__file__}
    return frozenset(known.union(file for file in files if file))

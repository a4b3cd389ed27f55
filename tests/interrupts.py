"""Ctrl-C, planted where CPython looks for signals: where a function begins or a call to C ends."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType


@contextmanager
def interrupt_at(number: int, *modules: ModuleType) -> Iterator[None]:
    """Raise KeyboardInterrupt at the given one, from 0, of these places in the modules' code.

    The block may be left by it or not; where there are fewer places it is not raised.
    """
    files = {module.__file__ for module in modules}
    passed = -1

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal passed
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            passed += 1
            if passed == number:
                raise KeyboardInterrupt  # which also ends the profiling

    gc.disable()  # else it may be raised in a finalizer of somebody else's, where it is lost
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()

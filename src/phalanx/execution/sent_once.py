"""Large things that a worker process gets once and then by name, as long as they live here."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.execution.worker_main import Worker

__all__ = ["OnceNames", "Save", "SentOnce"]


class SentOnce:
    """A base for what is large, such as a data set."""


class OnceNames:
    """The names under which the workers of an executor keep what they were sent once.

    A name is nobody else's afterwards, and holds nothing.

    Args:
        forget: Returns what is called with the name of a thing that is gone, as long as there is
            somebody to call.
    """

    def __init__(self, forget: Callable[[], Callable[[str], None] | None]) -> None:
        self._forget = forget
        self._names: weakref.WeakKeyDictionary[SentOnce, str] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # every worker's thread sends

    def of(self, thing: SentOnce) -> str:
        """Return the name of ``thing``."""
        with self._lock:
            if thing not in self._names:
                self._names[thing] = name = f"once {next(self._numbers)}"
                weakref.finalize(thing, _tell, self._forget, name).atexit = False
            return self._names[thing]


def _tell(forget: Callable[[], Callable[[str], None] | None], name: str) -> None:
    tell = forget()
    if tell is not None:
        tell(name)


@dataclass(frozen=True)
class Save:
    """Lets a worker keep a `SentOnce` under its name."""

    name: str
    value: object

    def __call__(self, worker: Worker) -> None:
        """Do it, in the worker."""
        worker.saved[self.name] = self.value

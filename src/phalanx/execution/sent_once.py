"""Large things that a worker process gets once and then by name, as long as they live here."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from phalanx.execution.worker_main import Worker

__all__ = ["Keep", "OnceNames", "SentOnce"]

_PREFIX = "once"


class SentOnce:
    """A base for what is large, such as a data set."""


class OnceNames:
    """The names under which the workers of an executor keep what they were sent once.

    A name is nobody else's afterwards, and holds nothing: what the executor's process has let go
    of, its workers forget with the next thing that they are sent.
    """

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[SentOnce, str] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # every worker's thread sends

    def of(self, thing: SentOnce) -> str:
        """Return the name of ``thing``."""
        with self._lock:
            if thing not in self._names:
                self._names[thing] = f"{_PREFIX} {next(self._numbers)}"
            return self._names[thing]

    def alive(self) -> frozenset[str]:
        """Return the names of all that is still held here."""
        with self._lock:
            return frozenset(self._names.values())


@dataclass(frozen=True)
class Keep:
    """An errand: keep a `SentOnce` under its name, and of the others only those alive."""

    name: str
    value: object
    alive: frozenset[str]

    def __call__(self, worker: Worker) -> None:
        """Do it, in the worker."""
        self.note(worker.kept)
        worker.kept[self.name] = self.value

    def note(self, kept: dict[str, Any]) -> None:
        """Note in ``kept``, of a worker here or there, what it has after this."""
        for name in [name for name in kept if name.startswith(_PREFIX) and name not in self.alive]:
            del kept[name]
        kept[self.name] = 1

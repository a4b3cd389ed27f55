"""The one thread that moves on, for all groups of this process, what nobody waits for."""

from __future__ import annotations

import threading
from typing import Protocol

from phalanx.memory import Waiting, forget_in_child

__all__ = ["pump"]

_IDLE_S = 5.0


class Pumped(Protocol):
    """What has operations under way."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""

    def advance(self) -> bool:
        """Move on what can be; tell whether something could."""

    def examine(self) -> None:
        """Fail what cannot go on."""


class Pump:
    """A thread that is started when there is work, and ends when there is none for a while."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pumped: list[Pumped] = []
        self._thread: threading.Thread | None = None
        forget_in_child(self)

    def add(self, pumped: Pumped) -> None:
        """Look after ``pumped`` until it is idle."""
        with self._changed:
            if pumped not in self._pumped:
                self._pumped.append(pumped)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="phalanx collectives", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def remove(self, pumped: Pumped) -> None:
        """Forget ``pumped``; the thread ends with the last one."""
        with self._changed:
            if pumped in self._pumped:
                self._pumped.remove(pumped)
            self._changed.notify()

    def forget(self) -> None:
        """Start anew in a forked child, where the thread is not."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        waiting = Waiting(_IDLE_S)
        while True:
            with self._changed:
                self._pumped = [pumped for pumped in self._pumped if not pumped.idle]
                if not self._pumped and not self._changed.wait_for(self._has_work, _IDLE_S):
                    self._thread = None
                    return
                pumped = list(self._pumped)
            if sum(one.advance() for one in pumped):
                waiting = Waiting(_IDLE_S)
            elif waiting.rest():
                for one in pumped:
                    one.examine()

    def _has_work(self) -> bool:
        return bool(self._pumped)


pump = Pump()

"""The one thread that moves on operations that no thread waits for, of all groups here."""

from __future__ import annotations

import atexit
import threading
from typing import Protocol

from phalanx.clock import now_s
from phalanx.ipc import Waiting, register_at_fork

__all__ = ["progress_thread"]

_IDLE_S = 5.0
_EXIT_S = 1.0


class Progressing(Protocol):
    """An engine, as far as the thread knows it."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""

    def advance(self) -> bool:
        """Move on operations that can go on; tell whether one could."""

    def examine(self) -> None:
        """Fail operations that cannot go on."""


class ProgressThread:
    """A thread that is started when there is work, and ends when there is none for a while."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._engines: list[Progressing] = []
        self._thread: threading.Thread | None = None
        self._threads: list[threading.Thread] = []  # it, and those that end after their callback
        register_at_fork(self.forget)

    def add(self, engine: Progressing) -> None:
        """Look after ``engine`` until it is idle."""
        with self._changed:
            if engine not in self._engines:
                self._engines.append(engine)
            if self._thread is None:
                self._start()
            self._hand_over()
            self._changed.notify_all()

    def hand_over(self) -> None:
        """Have another thread go on, where this is called in a future's callback in the thread.

        The callback is about to wait for an operation. Ranks may be in callbacks of different
        groups then, and none would move the group that another waits for.
        """
        if self._thread is threading.current_thread():
            with self._changed:
                self._hand_over()

    def _hand_over(self) -> None:
        if self._thread is threading.current_thread():
            self._start()  # that one ends after the callback

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="phalanx collectives", daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(self._thread)
        self._thread.start()

    def remove(self, engine: Progressing) -> None:
        """Forget ``engine``; the thread ends with the last one."""
        with self._changed:
            if engine in self._engines:
                self._engines.remove(engine)
            self._changed.notify_all()

    def end(self) -> None:
        """End the thread as the interpreter exits, unless a callback keeps it for too long.

        A thread that is in torch's C++ when the interpreter goes would abort the process.
        """
        with self._changed:
            self._thread = None
            self._changed.notify_all()
        deadline_s = now_s() + _EXIT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - now_s()))

    def forget(self) -> None:
        """Start anew in a forked child, where the thread is not."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        waiting = Waiting(_IDLE_S)
        me = threading.current_thread()
        while True:
            with self._changed:
                if self._thread is not me:
                    return
                self._engines = [engine for engine in self._engines if not engine.idle]
                if not self._engines and not self._changed.wait_for(
                    lambda: self._engines or self._thread is not me, _IDLE_S
                ):
                    self._thread = None
                    return
                if self._thread is not me:
                    return
                engines = list(self._engines)
            if sum(engine.advance() for engine in engines):
                waiting = Waiting(_IDLE_S)
            elif waiting.rest():
                for engine in engines:
                    engine.examine()


progress_thread = ProgressThread()
atexit.register(progress_thread.end)

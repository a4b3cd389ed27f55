"""The workers of a run: one shared page with a line per worker.

    words of 8 bytes, 8 to a line
    line 0       the number of workers expected, 0 if it was not announced | the time of the last
                 check for dead workers, in ns
    line 1 + w   worker w:  state | pid | start | ticks | barriers | incarnation
    then         the page's lock, and what those who wait sleep on: `changes`

The page's lock is held to write a worker's state. Its two clocks are its own to write: how many
rounds it has ended, and the last barrier that it has come to. Of those who wait, one checks every
10 to 20 ms whether another has died, and marks it dead. *Awaited* workers are here, or expected and
have never come.

# Note [Incarnations]
The number of a worker that has left, or died, is reused. The *incarnation* counts how often a
number was given. Whatever a worker writes under its number elsewhere (in a round) carries it, so
that it never counts for a later worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from phalanx.clock import now_s
from phalanx.errors import ConfigError
from phalanx.ipc import Changes, Mutex, ProcessIdentity, Region, late_peers
from phalanx.plan import check_argument

MAX_WORKERS = 256
_LINE = 8
_LOCK_AT = (1 + MAX_WORKERS) * _LINE * 8
_EXPECTED, _LOOKED_NS = range(2)
_STATE, _PID, _START, TICKS, BARRIERS, _INCARNATION = range(6)
_EMPTY, _HERE, _GONE = range(3)
_ELSEWHERE = 0  # in place of the pid of a process on another host
_LOOK_EVERY_NS = 10_000_000  # less than the time between two looks of one that waits


class Membership:
    """The page, as one process sees it.

    Args:
        region: Of :meth:`needed_bytes`, zeros at first; kept open.
        label: The run, as messages call it.

    Attributes:
        worker_of: Returns the worker that a process is, if it is exactly one.
        lock: Of the page.
        changes: What those who wait for a worker sleep on.
    """

    def __init__(self, region: Region, label: str) -> None:
        self._words = region.buffer[:_LOCK_AT].cast("q")
        # No method, which would hold the page.
        self.worker_of = partial(_worker_of, self._words)
        self.lock = Mutex(region.buffer[_LOCK_AT:], f"membership of {label}", self.worker_of)
        self.changes = Changes(region.buffer[_LOCK_AT + Mutex.NBYTES :])
        self._label = label

    @staticmethod
    def needed_bytes() -> int:
        """Return the size of the page."""
        return _LOCK_AT + Mutex.NBYTES + Changes.NBYTES

    @property
    def num_expected(self) -> int:
        """The number of workers that were announced, or 0."""
        return self._words[_EXPECTED]

    # --- coming and going -------------------------------------------------------------------------

    def enter(
        self, worker: int | None, num_expected: int | None, timeout_s: float, client: int = 0
    ) -> int:
        """Write a new worker down and return its number.

        Args:
            worker: Its number; None for the next one.
            num_expected: How many were announced to it.
            timeout_s: How long to wait for the page's lock.
            client: Of a process on another host: a number of its own, by which one that asks again
                is known.

        Raises:
            ConfigError: The number is somebody's, there is no free one, or another number of
                workers was announced before.
        """
        me = ProcessIdentity(_ELSEWHERE, client) if client else ProcessIdentity.current()
        with self.lock.held(timeout_s):
            self._mark_dead()
            self._announce(num_expected)
            worker = self._free_number() if worker is None else worker
            if client and worker in self.here() and self.is_elsewhere(worker):
                if self._process(worker) == me:
                    return worker
                self._mark_gone(worker)  # its own host has seen it end
            self._refuse_taken(worker)
            at = self._start_of(worker)
            if self._words[at + _STATE] != _EMPTY or worker >= self.num_expected:
                # A late worker starts with the slowest.
                for clock in (TICKS, BARRIERS):
                    own = self._words[at + clock]
                    self._words[at + clock] = min(self.clocks(clock).values(), default=own)
            self._words[at + _INCARNATION] += 1
            self._words[at + _PID] = me.pid
            self._words[at + _START] = me.start_ticks
            self._words[at + _STATE] = _HERE
        self.changes.tell()
        return worker

    def _announce(self, num_expected: int | None) -> None:
        if num_expected is None:
            return
        fits = type(num_expected) is int and 1 <= num_expected <= MAX_WORKERS
        check_argument(fits, "num_workers", f"be 1 to {MAX_WORKERS}", num_expected)
        wanted = f"be what the first worker of {self._label} said ({self.num_expected})"
        fits = self.num_expected in (0, num_expected)
        check_argument(fits, "num_workers", wanted, num_expected)
        self._words[_EXPECTED] = num_expected

    def _free_number(self) -> int:
        """Return a number that was never used, or one that is free again.

        Those expected come first, then those of workers that are gone.
        """
        states = self._states()
        fresh = states.index(_EMPTY) if _EMPTY in states else MAX_WORKERS
        return states.index(_GONE) if _GONE in states and fresh >= self.num_expected else fresh

    def _refuse_taken(self, worker: int) -> None:
        if not 0 <= worker < MAX_WORKERS:
            raise ConfigError(
                f"Workers of {self._label} must be numbered 0 to {MAX_WORKERS - 1}, but the next "
                f"is {worker}. Let some leave first."
            )
        if self._words[self._start_of(worker) + _STATE] == _HERE:
            raise ConfigError(
                f"Worker {worker} of {self._label} must be one process or thread, but process "
                f"{self._words[self._start_of(worker) + _PID]} is it already. For another thread, "
                "use its group's `thread_worker()`."
            )

    def leave(self, worker: int, incarnation: int, timeout_s: float) -> None:
        """Stop counting ``worker``, unless its number is another's by now."""
        with self.lock.held(timeout_s):
            if self.is_here(worker, incarnation):
                self._mark_gone(worker)

    def mark_dead(self, timeout_s: float) -> None:
        """Mark workers dead whose process is gone, so that no worker waits for them."""
        with self.lock.held(timeout_s):
            self._mark_dead()

    def look_for_dead(self, timeout_s: float) -> None:
        """Call :meth:`mark_dead` unless a process has just checked.

        For waiting workers: if each checked all others, many would keep the rest from working.
        """
        now_ns = round(1e9 * now_s())
        if not 0 <= now_ns - self._words[_LOOKED_NS] < _LOOK_EVERY_NS:
            self._words[_LOOKED_NS] = now_ns
            self.mark_dead(timeout_s)

    def _mark_dead(self) -> None:
        for worker in self.here():
            if not (self.is_elsewhere(worker) or self._process(worker).alive()):
                self._mark_gone(worker)

    def _mark_gone(self, worker: int) -> None:
        self._words[self._start_of(worker) + _STATE] = _GONE
        self.changes.tell()

    # --- looking ----------------------------------------------------------------------------------

    def _start_of(self, worker: int) -> int:
        return (1 + worker) * _LINE

    def _process(self, worker: int) -> ProcessIdentity:
        at = self._start_of(worker)
        return ProcessIdentity(self._words[at + _PID], self._words[at + _START])

    def _states(self) -> list[int]:
        return self._words[_LINE + _STATE :: _LINE].tolist()

    def here(self) -> list[int]:
        """Return the workers that have come and neither left nor were found dead."""
        return [worker for worker, state in enumerate(self._states()) if state == _HERE]

    def has_begun(self) -> bool:
        """Tell whether any worker has come, even if it has left."""
        return any(state != _EMPTY for state in self._states())

    def awaited(self) -> list[int]:
        """Return the workers that are here, and those expected that never came."""
        states, expected = self._states(), self.num_expected  # one look: one may come meanwhile
        return [
            worker
            for worker, state in enumerate(states)
            if state == _HERE or (state == _EMPTY and worker < expected)
        ]

    def master(self, worker: int, timeout_s: float) -> int:
        """Return the lowest awaited worker that lives, or ``worker`` if no other lives."""
        if min(self.awaited(), default=worker) != worker:
            self.mark_dead(timeout_s)
        return min(self.awaited(), default=worker)

    def is_elsewhere(self, worker: int) -> bool:
        """Tell whether the process of ``worker`` is on another host."""
        return self._process(worker).pid == _ELSEWHERE

    def incarnation(self, worker: int) -> int:
        """Return how many workers have had the number, the present one included."""
        return self._words[self._start_of(worker) + _INCARNATION]

    def is_here(self, worker: int, incarnation: int) -> bool:
        """Tell whether that incarnation of a worker counts."""
        at, words = self._start_of(worker), self._words
        return words[at + _STATE] == _HERE and words[at + _INCARNATION] == incarnation

    # --- clocks and waiting -----------------------------------------------------------------------

    def clock(self, worker: int, clock: int) -> int:
        """Return one of the clocks of ``worker``: TICKS or BARRIERS."""
        return self._words[self._start_of(worker) + clock]

    def clocks(self, clock: int) -> dict[int, int]:
        """Return one of the clocks of each awaited worker."""
        return {worker: self.clock(worker, clock) for worker in self.awaited()}

    def advance_to(self, worker: int, clock: int, number: int) -> None:
        """Say that ``worker`` has come so far."""
        at = self._start_of(worker) + clock
        self._words[at] = max(self._words[at], number)
        self.changes.tell()

    def wait_for_clocks(self, clock: int, number: int, timeout_s: float, event: str) -> None:
        """Wait until all awaited workers have come to ``number``; see :meth:`wait_until`."""

        def has_come(worker: int) -> bool:
            return self.clock(worker, clock) >= number

        self.wait_until(lambda: all(map(has_come, self.awaited())), timeout_s, event, has_come)

    def wait_until(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        event: str,
        has_come: Callable[[int], bool],
        more: str = "",
    ) -> None:
        """Wait until ``ready()``, which a change of others may make true, or their death.

        Args:
            ready: Asked whenever something has changed.
            timeout_s: How long to wait.
            event: What workers come to, as the error calls it.
            has_come: Tells whether a worker has.
            more: What else the error says.

        Raises:
            PeerTimeout: Somebody stayed away; ``.rank`` is the first.
        """
        look = partial(self.look_for_dead, timeout_s)
        if not self.changes.wait_until(ready, timeout_s, look):
            awaited = self.awaited()
            # All, where the last one came just now.
            late = [each for each in awaited if not has_come(each)] or awaited
            came = [each for each in awaited if each not in late]
            raise late_peers("Worker", late, len(awaited), event, timeout_s, came=came, more=more)


def _worker_of(words: memoryview, pid: int) -> int | None:
    pids, states = words[_LINE + _PID :: _LINE].tolist(), words[_LINE + _STATE :: _LINE].tolist()
    found = [w for w, each in enumerate(pids) if each == pid and states[w] == _HERE]
    return found[0] if len(found) == 1 else None

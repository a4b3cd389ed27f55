"""The workers of a run: one shared page with a line per worker.

    words of 8 bytes, 8 to a line
    line 0       the number of workers expected, 0 if it was not announced | the time of the last
                 check for dead workers, in ns | the number of barriers that are finished
    line 1 + w   worker w:  state | pid | start | clock | incarnation | the barrier that it has come
                 to | the last one that it has passed
    then         the page's lock, and what those who wait sleep on: `changes`

Each worker writes its own line, under the page's lock. Of those who wait, one checks every 10 to
20 ms whether another has died, and marks it dead. *Awaited* workers are here, or expected and have
never come.

# Note [Incarnations]
The number of a dead worker is reused, and, once no fresh number is left, that of one that has left.
The *incarnation* counts how often a number was given. Whatever a worker writes under its number
elsewhere (in a round) carries it, so that it never counts for a later worker.
"""

from __future__ import annotations

from functools import partial

from phalanx.clock import now_s
from phalanx.errors import ConfigError
from phalanx.ipc import Changes, Mutex, ProcessIdentity, Region, late_peers
from phalanx.plan import check_argument

MAX_WORKERS = 256
_LINE = 8
_LOCK_AT = (1 + MAX_WORKERS) * _LINE * 8
_EXPECTED, _LOOKED_NS, _BARRIERS = range(3)
_STATE, _PID, _START, _CLOCK, _INCARNATION, _BARRIER, _PASSED = range(7)
_EMPTY, _HERE, _LEFT, _DEAD = range(4)
_ELSEWHERE = 0  # in place of the pid of a process on another host
_LOOK_EVERY_NS = 10_000_000  # less than the time between two looks of one that waits


class Membership:
    """The page, as one process sees it.

    Args:
        region: Of :meth:`needed_bytes`, zeros at first; kept open.
        label: The run, as messages call it.
    """

    def __init__(self, region: Region, label: str) -> None:
        self._words = region.buffer[:_LOCK_AT].cast("q")
        rank_of = partial(_worker_of, self._words)  # no method, which would hold the page
        self.lock = Mutex(region.buffer[_LOCK_AT:], f"membership of {label}", rank_of)
        self.changes = Changes(region.buffer[_LOCK_AT + Mutex.NBYTES :])
        self._label = label

    @staticmethod
    def needed_bytes() -> int:
        """Return the size of the page."""
        return _LOCK_AT + Mutex.NBYTES + Changes.NBYTES

    @property
    def num_expected(self) -> int:
        """How many workers were announced, or 0."""
        return self._words[_EXPECTED]

    # --- coming and going -------------------------------------------------------------------------

    def enter(
        self,
        *,
        worker: int | None,
        num_expected: int | None,
        timeout_s: float,
        client: int = 0,
    ) -> int:
        """Write a new worker down and return its number.

        Args:
            worker: Its number; None for the next one.
            num_expected: How many were announced to it.
            timeout_s: How long to wait for the page's lock.
            client: Of a process on another host: a number of its own, by which one that asks again
                is known. It takes its number over from a worker that was there.

        Raises:
            ConfigError: The number is somebody's, there is no free one, or another number of
                workers was announced before.
        """
        me = ProcessIdentity(_ELSEWHERE, client) if client else ProcessIdentity.current()
        with self.lock.held(timeout_s):
            self._mark_dead()
            if client:
                for known in self.here():
                    if self._process(known) == me:
                        return known
                if worker is not None:
                    self._mark(worker, _DEAD)
            self._announce(num_expected)
            worker = self._free_number() if worker is None else worker
            self._refuse_taken(worker)
            at = self._start_of(worker)
            if self._words[at + _STATE] != _EMPTY or worker >= self.num_expected:
                # A late worker starts at the clock of the slowest.
                slowest = min(self.clocks().values(), default=self._words[at + _CLOCK])
                self._words[at + _CLOCK] = slowest
            self._words[at + _INCARNATION] += 1
            self._words[at + _BARRIER] = self._words[at + _PASSED] = self.num_barriers
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

        Those expected come first, then those of the dead; those of workers that left come last, so
        that numbers differ for as long as they can.
        """
        states = self._states()
        fresh = states.index(_EMPTY) if _EMPTY in states else MAX_WORKERS
        if fresh < self.num_expected:
            return fresh
        if _DEAD in states:
            return states.index(_DEAD)
        return states.index(_LEFT) if fresh == MAX_WORKERS and _LEFT in states else fresh

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
                self._words[self._start_of(worker) + _STATE] = _LEFT
                self.changes.tell()

    def mark_dead(self, timeout_s: float) -> None:
        """Mark workers dead whose process is gone, so that nobody waits for them."""
        with self.lock.held(timeout_s):
            self._mark_dead()

    def look_for_dead(self, timeout_s: float) -> bool:
        """As :meth:`mark_dead`, unless somebody has just checked; tell whether this call did.

        For waiting workers: if each checked all others, many would keep the rest from working.
        """
        now_ns = round(1e9 * now_s())
        if 0 <= now_ns - self._words[_LOOKED_NS] < _LOOK_EVERY_NS:
            return False
        self._words[_LOOKED_NS] = now_ns
        self.mark_dead(timeout_s)
        return True

    def _mark_dead(self) -> None:
        for worker in self.here():
            if not self._has_process(worker):
                self._mark(worker, _DEAD)

    def mark_lost(self, worker: int, incarnation: int, timeout_s: float) -> None:
        """Mark a worker of another host dead, unless its number is another's by now."""
        with self.lock.held(timeout_s):
            if self.is_here(worker, incarnation):
                self._mark(worker, _DEAD)

    def _mark(self, worker: int, state: int) -> None:
        at = self._start_of(worker) + _STATE
        if self._words[at] == _HERE:
            self._words[at] = state
            self.changes.tell()

    # --- looking ----------------------------------------------------------------------------------

    def _start_of(self, worker: int) -> int:
        return (1 + worker) * _LINE

    def _process(self, worker: int) -> ProcessIdentity:
        at = self._start_of(worker)
        return ProcessIdentity(self._words[at + _PID], self._words[at + _START])

    def _has_process(self, worker: int) -> bool:
        """Tell whether a worker's process lives, or is on another host."""
        process = self._process(worker)
        return process.pid == _ELSEWHERE or process.alive()

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
        expected = self.num_expected
        return [
            worker
            for worker, state in enumerate(self._states())
            if state == _HERE or (state == _EMPTY and worker < expected)
        ]

    def expected_missing(self) -> list[int]:
        """Return the workers that are expected and never came."""
        return [w for w, state in enumerate(self._states()[: self.num_expected]) if state == _EMPTY]

    def master(self, worker: int, timeout_s: float) -> int:
        """Return the lowest awaited worker that lives, or ``worker`` if there is none."""
        if min(self.awaited(), default=worker) != worker:
            self.mark_dead(timeout_s)
        return min(self.awaited(), default=worker)

    def num_workers(self) -> int:
        """Return how many workers count."""
        return len(self.awaited())

    def is_elsewhere(self, worker: int) -> bool:
        """Tell whether the process of ``worker`` is on another host."""
        return self._process(worker).pid == _ELSEWHERE

    def worker_of(self, pid: int) -> int | None:
        """Return the worker that a process is, if it is exactly one."""
        return _worker_of(self._words, pid)

    def incarnation(self, worker: int) -> int:
        """Return how many workers have had the number, the present one included."""
        return self._words[self._start_of(worker) + _INCARNATION]

    def is_here(self, worker: int, incarnation: int) -> bool:
        """Tell whether that incarnation of a worker counts."""
        at, words = self._start_of(worker), self._words
        return words[at + _STATE] == _HERE and words[at + _INCARNATION] == incarnation

    # --- clocks -----------------------------------------------------------------------------------

    def clock(self, worker: int) -> int:
        """Return how often ``worker`` has ticked; no table's rounds (rounds.py) count here."""
        return self._words[self._start_of(worker) + _CLOCK]

    def clocks(self) -> dict[int, int]:
        """Return the clock of each awaited worker."""
        return {worker: self.clock(worker) for worker in self.awaited()}

    def advance_to(self, worker: int, clock: int) -> None:
        """Say that ``worker`` has ticked ``clock`` times in all."""
        at = self._start_of(worker) + _CLOCK
        self._words[at] = max(self._words[at], clock)
        self.changes.tell()

    def advance(self, worker: int) -> int:
        """Count a tick of ``worker``, and return how many that makes."""
        at = self._start_of(worker) + _CLOCK
        self._words[at] += 1  # its own word: nobody else writes it
        self.changes.tell()
        return self._words[at]

    # --- barriers ---------------------------------------------------------------------------------

    @property
    def num_barriers(self) -> int:
        """How many barriers are finished."""
        return self._words[_BARRIERS]

    def wait_at_barrier(self, worker: int, timeout_s: float, passed: int | None = None) -> int:
        """Come to the worker's next barrier, wait for the others, and return its number, from 1.

        One that a call has given up, or not heard the end of, is the next call's as well.

        Args:
            worker: Who comes.
            timeout_s: How long to wait.
            passed: The last barrier that it has passed; None where its line says so.

        Raises:
            PeerTimeout: Somebody stayed away; ``.rank`` is the first of them.
        """
        at = self._start_of(worker)
        number = 1 + (self._words[at + _PASSED] if passed is None else passed)
        with self.lock.held(timeout_s):
            self._words[at + _BARRIER] = number
            self._finish_barrier(number)

        def look() -> None:
            if self.look_for_dead(timeout_s):
                with self.lock.held(timeout_s):
                    self._finish_barrier(number)

        if not self.changes.wait_until(lambda: self.num_barriers >= number, timeout_s, look):
            awaited, missing = self.awaited(), self._missing_at(number)
            late = missing or awaited  # where the last one came just now
            came = [each for each in awaited if each not in late]
            event = f"barrier {number}"
            raise late_peers("Worker", late, len(awaited), event, timeout_s, came=came)
        self._words[at + _PASSED] = number
        return number

    def _finish_barrier(self, number: int) -> None:
        if self.num_barriers < number and not self._missing_at(number):
            self._words[_BARRIERS] = number
            self.changes.tell()

    def _missing_at(self, number: int) -> list[int]:
        """Return the awaited workers that have not come to a barrier."""
        return [w for w in self.awaited() if self._words[self._start_of(w) + _BARRIER] < number]


def _worker_of(words: memoryview, pid: int) -> int | None:
    pids, states = words[_LINE + _PID :: _LINE].tolist(), words[_LINE + _STATE :: _LINE].tolist()
    found = [w for w, each in enumerate(pids) if each == pid and states[w] == _HERE]
    return found[0] if len(found) == 1 else None

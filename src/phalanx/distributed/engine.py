"""Moves the operations of a group forward: in a thread that waits for one, or in one of its own.

An operation stops wherever it would wait. It goes on when a thread looks again:

    all_reduce(t)                 the caller looks until it is done
    all_reduce(t, async_op=True)  the caller goes as far as it can at once; then the thread looks
    work.wait()                   the caller looks, too

Operations of one lane go one after the other; lanes are independent of each other. All collectives
of a group share a lane, because they share its buffers; messages have a lane per peer and tag.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress

import torch

from phalanx.clock import now_s
from phalanx.distributed.collective_buffers import NOBODY, Need, RemoteNeed
from phalanx.distributed.contention import Contention
from phalanx.distributed.peer_errors import (
    cause_state,
    is_missing,
    peer_error,
    remote_timeout_error,
    timeout_error,
)
from phalanx.distributed.progress_thread import progress_thread
from phalanx.distributed.status_pages import LEFT, StatusPages
from phalanx.distributed.wake_up_pipes import WakeUpPipes
from phalanx.distributed.work import PendingOperation
from phalanx.errors import ConfigError, GroupAborted, StateError
from phalanx.ipc import LivenessTimer, Waiting, register_at_fork

__all__ = ["COLLECTIVES", "REMOTE_GRACE_S", "CallEngine"]

COLLECTIVES = "collectives"
REMOTE_GRACE_S = 1.0
"""How much longer than asked a rank waits for another host, whose ranks miss each other first."""

_SPIN_S, _CROWDED_SPIN_S = 300e-6, 10e-6
_LOOKS_PER_CLOCK = 16
_FIRST_SLEEP_S = 1e-3
_LONGEST_SLEEP_S = 10e-3
_STUCK, _MOVED, _ENDED = range(3)


class CallEngine:
    """The operations of one group that have not ended.

    Args:
        pages: The group's.
        pipes: The group's.
        contention: The group's.
        name: What the group is called in messages.
        grace_s: How much longer than asked this rank waits for others of its host.
        report: Called with the error that breaks the group, to report it to other hosts.

    Attributes:
        forked: Whether this is a copy in a forked child, where the group is not to be touched.
    """

    def __init__(
        self,
        pages: StatusPages,
        pipes: WakeUpPipes,
        contention: Contention,
        name: Callable[[], str],
        grace_s: float,
        report: Callable[[BaseException], object],
    ) -> None:
        self._pages = pages
        self._grace_s = grace_s
        self._report = report
        self._pipes = pipes
        self._name = name
        self._lock = threading.RLock()  # a step may run a signal's handler, which may wait again
        self._lanes: dict[Hashable, deque[PendingOperation]] = {}
        self._ended: deque[PendingOperation] = deque()  # whose futures have not been told yet
        self._advancing = False
        self._broken: BaseException | None = None
        self._liveness = LivenessTimer()
        # One caller moves the operations at a time: two would take each other's wake-ups.
        self._mover = threading.RLock()
        self._contention = contention
        self.forked = False
        register_at_fork(self.forget)

    def forget(self) -> None:
        """Give the group up in a forked child, where it would speak in its parent's name."""
        self._lock, self._mover = threading.RLock(), threading.RLock()  # a thread may have had them
        self._broken = StateError(
            f"Group {self._name()!r} must be used by the process that made it, but this is a fork "
            "of that. Make a group of its own here."
        )
        self.forked = True
        self._ended.clear()
        self._advancing = False
        for operation in self._take_all():
            operation.end(self._broken)  # futures are the parent's

    def start(
        self, operation: PendingOperation, lane: Hashable, needs: Need, *, wait: bool
    ) -> None:
        """Begin ``operation``, and finish it if ``wait``; a failure under way is kept in it.

        Args:
            operation: The operation.
            lane: What it goes after.
            needs: Ranks that must be there for it to begin.
            wait: Whether to finish it.

        Raises:
            PhalanxError: The group has failed before, or a needed rank is gone.
        """
        try:
            with self._lock:
                self._refuse_if_broken(operation, needs)
                self._lanes.setdefault(lane, deque()).append(operation)
                self._advance()
        finally:
            if self._ended:
                self._settle()
        if operation.done:
            return
        if wait:
            self.drive(operation)
            return
        if self._contention.cores_per_rank < 2:  # one for the caller, one for the progress thread
            self._push(operation)
        if not operation.done:
            progress_thread.add(self)

    def _refuse_if_broken(self, operation: PendingOperation, needs: Need) -> None:
        if self._broken is None and self._liveness.due():
            gone = peer_error(self._pages, *needs, operation.title)
            if gone is not None:
                self._break(gone, operation)
        if self._broken is not None:
            operation.end(self._broken)
            operation.raise_error()

    def _push(self, operation: PendingOperation) -> None:
        """Go on with ``operation`` in the caller's thread while the others go on, too.

        Where every core has a rank that computes, the progress thread would run in turns with it,
        and ranks whose threads seldom run at the same time wait for each other at every piece.
        """
        if not self._mover.acquire(blocking=False):
            return
        try:
            while not operation.done:
                if not self.advance() and not self._spin(self._first_need()):
                    return
        finally:
            self._mover.release()

    def drive(self, operation: PendingOperation, timeout_s: float | None = None) -> None:
        """Look until ``operation`` has ended, or fails after ``timeout_s`` more seconds."""
        if timeout_s is not None and now_s() + timeout_s < operation.deadline_s:
            operation.timeout_s, operation.deadline_s = timeout_s, now_s() + timeout_s
        progress_thread.hand_over()
        waiting, rests = Waiting(operation.timeout_s), 0
        try:
            while not operation.done:
                if self._mover.acquire(blocking=False):
                    try:
                        need = _on_this_host(operation.need)
                        rests = 0 if self._move_or_sleep(need, rests) else rests + 1
                    finally:
                        self._mover.release()
                else:
                    waiting.rest()
        except BaseException as exc:
            with self._lock:
                self._break(self._interrupted(operation, exc), operation)
            self._settle()
            raise

    def _first_need(self) -> Need:
        with self._lock:
            needs = (operations[0].need for operations in self._lanes.values() if operations)
            return _on_this_host(next(needs, None))

    def _move_or_sleep(self, need: Need, rests: int) -> bool:
        """Move on, or look for a moment, or else sleep; tell whether it was not the last."""
        if self.advance():
            return True
        if not rests and self._spin(need):
            return True
        return self.rest(need, rests + 1)

    def _spin(self, need: Need) -> bool:
        self._contention.look()
        ranks, progress = need
        until_s = now_s() + self._contention.spin_s(_SPIN_S, _CROWDED_SPIN_S)
        while now_s() < until_s:
            for _ in range(_LOOKS_PER_CLOCK):
                if self._pages.reached(ranks, progress) if progress > 0 else self.advance():
                    return True
        return False

    def rest(self, need: Need, times: int) -> bool:
        """Sleep until a rank of ``need`` wakes this one; at most ``times`` milliseconds, or 10.

        Then fail operations that cannot go on. Tell whether any went on.
        """
        ranks, progress = need
        awaited = next((rank for rank in ranks if is_missing(self._pages, rank, progress)), None)
        if awaited is not None:
            self._pipes.fall_asleep(awaited, progress)
        # A rank that posted before this one said that it sleeps does not wake it.
        if ranks and self.advance():
            self._pages.wait_for(None)
            return True
        self._pipes.sleep(min(times * _FIRST_SLEEP_S, _LONGEST_SLEEP_S))
        if self.advance():
            return True
        self.examine()
        return False

    def advance(self) -> bool:
        """Move every operation that can go on; tell whether one could."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._advance()
        finally:
            self._lock.release()
            if self._ended:
                self._settle()

    def _settle(self) -> None:
        """Tell the futures of ended operations. Their callbacks may begin other operations.

        So it is called without the lock, and does nothing inside of a step, where a signal's
        handler may call: the caller that advances settles afterwards.
        """
        while self._ended and not self._advancing:
            with suppress(IndexError):  # another thread has taken the last one
                self._ended.popleft().settle()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._lanes

    def _advance(self) -> bool:
        outer, self._advancing = self._advancing, True
        moved = False
        try:
            for lane, operations in list(self._lanes.items()):
                step = _ENDED
                while operations and step == _ENDED:
                    step = self._step(operations[0])
                    moved |= step != _STUCK
                    if step == _ENDED and operations:  # none where the group has failed
                        ended = operations.popleft()
                        if ended.futures:  # one that is asked for from here on settles itself
                            self._ended.append(ended)
                if not operations:
                    self._lanes.pop(lane, None)
        finally:
            self._advancing = outer
        return moved

    def _step(self, operation: PendingOperation) -> int:
        if operation.done:
            return _ENDED
        try:
            if torch.is_inference_mode_enabled():
                # Tensors that a step makes and keeps are written to outside of that mode, too.
                with torch.inference_mode(False):
                    need = next(operation.steps)
            else:
                need = next(operation.steps)
        except StopIteration:
            operation.end()
        except ConfigError as exc:  # all ranks see it alike, or it concerns this message alone
            operation.end(exc)
        except Exception as exc:
            self._break(exc, operation)
        except BaseException as exc:
            self._break(self._interrupted(operation, exc), operation)
            raise
        else:
            before, operation.need = operation.need, need
            return _STUCK if need == before else _MOVED
        return _ENDED

    def _interrupted(self, operation: PendingOperation, by: BaseException) -> GroupAborted:
        me = self._pages.names[self._pages.rank]
        return GroupAborted(
            f"Rank {me} gave up {operation.title} ({type(by).__name__}). "
            "Destroy the group and make a new one.",
            me,
        )

    def examine(self) -> None:
        """Fail operations that wait for a rank that is gone, or have waited for too long."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            look_closely = self._liveness.due()
            for operations in list(self._lanes.values()):
                if operations:
                    self._examine(operations, look_closely)
        finally:
            self._lock.release()
            self._settle()

    def _examine(self, operations: Sequence[PendingOperation], look_closely: bool) -> None:
        """Fail a lane's first operation, because of itself or of a late one behind it."""
        first, need = operations[0], operations[0].need
        if need is None or first.done:
            return
        grace_s = REMOTE_GRACE_S if isinstance(need, RemoteNeed) else self._grace_s
        since_s = now_s() - grace_s
        late = next((each for each in operations if each.deadline_s <= since_s), None)
        error: BaseException | None = None
        if not isinstance(need, RemoteNeed):
            error = peer_error(self._pages, *need, first.title, closely=look_closely)
            if error is None and late is not None:
                error = timeout_error(self._pages, *need, late.title, late.timeout_s + grace_s)
        elif late is not None:
            size = self._pages.group_size
            error = remote_timeout_error(need.rank, size, late.title, late.timeout_s + grace_s)
        if error is None:
            return
        if self._advance() and _has_gone_on(first, need):
            return  # the rank gave its part before it went, or others are awaited now
        self._break(error, first)

    def _break(self, error: BaseException, operation: PendingOperation) -> None:
        """Fail everything under way, now and from now on; the others learn of it."""
        if self._broken is None:
            self._broken = error
            self._pages.stop(*cause_state(error, self._pages.names[self._pages.rank]))
            self._report(error)
        operation.end(error)
        self._ended.append(operation)
        for other in self._take_all():
            other.end(error)
            self._ended.append(other)

    def _take_all(self) -> list[PendingOperation]:
        """Empty the lanes; return what has not ended."""
        lanes, self._lanes = self._lanes, {}
        return [operation for lane in lanes.values() for operation in lane if not operation.done]

    def close(self) -> list[str]:
        """Leave the group. Operations under way fail; their titles are returned."""
        progress_thread.remove(self)
        with self._lock:
            if self._broken is None:
                self._broken = GroupAborted(f"Group {self._name()!r} is destroyed.")
                self._pages.stop(LEFT, self._pages.rank)
            left = self._take_all()
            for operation in left:
                operation.end(self._broken)
            self._ended.extend(left)
        self._settle()
        return [operation.title for operation in left]


def _on_this_host(need: Need | RemoteNeed | None) -> Need:
    """Return which ranks can wake this one, if it waits for some."""
    return need if isinstance(need, tuple) else NOBODY


def _has_gone_on(operation: PendingOperation, before: Need | RemoteNeed) -> bool:
    return operation.done or operation.need != before

"""The operations of a group, which run in the order of their calls.

    all_reduce(t)                 runs in its caller
    all_reduce(t, async_op=True)  runs in a thread of the lane; where each rank has no second core,
                                  in its caller while the others keep coming
    work.wait()                   runs in its caller what no thread runs
    work.get_future()             has a thread run it

A call in C returns after some milliseconds in which the others were late. Then this rank looks
whether they live, whether a deadline has passed, and Python runs the handlers of signals.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from phalanx.clock import now_s
from phalanx.distributed.status_pages import StatusPages
from phalanx.distributed.work import SharedWork
from phalanx.errors import GroupAborted, StateError
from phalanx.ipc import Waiting, register_at_fork
from phalanx.torch_internals import inference_mode

__all__ = ["FORKED", "Lane"]

FORKED = (
    "A group must be used by the process that made it, but this is a fork of that. Make another "
    "group here."
)
_PATIENCE_S = 10e-3
_GRACE_S = 10e-3  # for the caller of an operation to run it, before a thread does
_EXIT_S = 1.0


class Lane:
    """The operations of one group that have not ended.

    Where it ``pushes``, asynchronous ones run in their caller while the others keep coming; a
    thread runs those that a future waits for, and those that have waited for a moment. An error
    that breaks the group is handed to ``report``, which tells other hosts.
    """

    def __init__(
        self,
        pages: StatusPages,
        *,
        pushes: bool,
        report: Callable[[BaseException], object],
    ) -> None:
        self._pages = pages
        self._pushes = pushes
        self._report = report
        self._operations: deque[SharedWork] = deque()
        self._ended: deque[SharedWork] = deque()  # whose futures do not know it yet
        self._turn = threading.RLock()  # a signal's handler may destroy the group
        self._runner = 0  # the thread that runs an operation now
        self._broken: BaseException | None = None
        self._liveness = Waiting(0.0)
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._num_free_threads = 0  # the others are in the callback of a future
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self.is_forked = False
        register_at_fork(self._end_in_fork)
        _lanes.add(self)

    @property
    def is_idle(self) -> bool:
        """True if all operations have ended well."""
        return self._broken is None and not self._operations

    def start(self, operation: SharedWork, *, wait: bool) -> None:
        """Begin ``operation``, and finish it if ``wait``; it keeps a failure under way."""
        self._refuse_in_handler()
        if self._broken is None:
            self._operations.append(operation)
        if self._broken is not None:  # it may have failed meanwhile, in another thread
            operation.end(self._broken)
            operation.raise_error()
        if wait:
            self.drive(operation)
            return
        if self._pushes:
            self._push(operation)
        if not operation.done:
            self.wake_thread()

    def drive(self, operation: SharedWork, timeout_s: float | None = None) -> None:
        """Run operations until this one has ended; it fails after ``timeout_s`` more seconds."""
        self._refuse_in_handler()
        if timeout_s is not None and now_s() + timeout_s < operation.deadline_s:
            operation.timeout_s, operation.deadline_s = timeout_s, now_s() + timeout_s
        try:
            while not operation.done:
                with self._turn:
                    if not operation.done:
                        self._advance(_PATIENCE_S)
                self._notify()
        except BaseException as exc:
            self._give_up(operation, exc)
            raise

    def _refuse_in_handler(self) -> None:
        if self._runner == threading.get_ident():
            raise StateError(
                "A collective must end before the next begins, but a signal's handler calls in the "
                "middle of one. Set a flag there, and act on it after the call."
            )

    def _give_up(self, operation: SharedWork, why: BaseException) -> None:
        """Break the group: this rank was interrupted in ``operation``, which may be half done."""
        me, how = self._pages.group_rank, f"{operation.title} ({type(why).__name__})"
        again = "Destroy the group and make a new one."
        self.fail(GroupAborted(f"Rank {me} gave up {how}. {again}", me))

    def _push(self, operation: SharedWork) -> None:
        """Run operations in the caller's thread while the others keep coming.

        Where every core has a rank that computes, the lane's thread would take turns with it, and
        ranks whose threads seldom run at the same time would wait for each other at every piece.
        """
        if self._turn.acquire(blocking=False):
            try:
                while self._operations and self._advance(0.0):
                    pass
            except BaseException as exc:
                self._give_up(operation, exc)
                raise
            finally:
                self._turn.release()
            self._notify()

    def _advance(self, patience_s: float) -> bool:
        """Run the first operation; tell whether it has ended."""
        first = self._operations[0]
        self._runner = threading.get_ident()
        try:
            with inference_mode(True):  # outside of it, its tensors could not be written
                ended = first.advance(patience_s)
        except Exception as exc:
            self.fail(exc)
            return True
        finally:
            self._runner = 0
        if ended:
            if self._operations and self._operations[0] is first:
                self._operations.popleft()
            if first.futures:  # a future that is asked for from here on notifies itself
                self._ended.append(first)
            return True
        self._examine(first)
        return first.done

    def _examine(self, first: SharedWork) -> None:
        """Break the group where its first operation cannot end well, or one is over its time."""
        wait = first.current
        if wait is None:
            return
        since_s = now_s() - wait.grace_s
        late = next((each for each in self._operations if each.deadline_s <= since_s), None)
        if late is None and not self._liveness.time_to_look():
            return
        error = wait.find_error(first.title)
        if error is None and late is not None:
            error = wait.timeout_error(late.title, late.timeout_s + wait.grace_s)
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail everything under way, now and from now on; the other ranks learn of it."""
        with self._turn:
            if self._broken is None:
                self._broken = error
                self._pages.stop(None if self._closed else error)
                if not self._closed:
                    self._report(error)
            failed = list(self._operations)
            self._operations.clear()
            for operation in failed:
                operation.end(self._broken)
            self._ended.extend(failed)

    def _notify(self) -> None:
        """Tell the futures of ended operations; without a lock, because callbacks are a user's.

        A callback may wait for an operation that has not ended: another thread then runs it.
        """
        if self._ended and self._operations:
            self.wake_thread()
        while self._ended:
            with suppress(IndexError):  # another thread has taken the last one
                self._ended.popleft().notify()

    # --- the threads ------------------------------------------------------------------------------

    def wake_thread(self) -> None:
        """Let a thread look at the operations."""
        with self._changed:
            if not self._num_free_threads and not self._closed:
                self._num_free_threads = 1
                thread = threading.Thread(target=self._run, name="phalanx collectives", daemon=True)
                self._threads.add(thread)
                thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._operations)
                if self._pushes:  # the caller may run them soon: see _push
                    self._changed.wait_for(self._has_futures, _GRACE_S)
                if self._closed:
                    return
            with self._turn:
                if self._operations:
                    self._advance(_PATIENCE_S)
            if self._ended:
                with self._changed:
                    self._num_free_threads -= 1
                self._notify()
                with self._changed:
                    self._num_free_threads += 1

    def _has_futures(self) -> bool:
        return self._closed or any(each.futures for each in [*self._operations])

    def end_threads(self) -> None:
        """End the threads, unless a future's callback keeps one for too long.

        A thread that is in torch's C++ when the interpreter goes would abort the process.
        """
        with self._changed:
            self._closed = True
            threads = set(self._threads) - {threading.current_thread()}
            self._changed.notify_all()
        for thread in threads:
            thread.join(_EXIT_S)

    def close(self) -> None:
        """Leave the group; operations under way fail."""
        self.end_threads()
        self.fail(GroupAborted("The group is destroyed."))
        self._notify()

    def _end_in_fork(self) -> None:
        """Refuse all calls in a forked child, which must not touch the group."""
        self.is_forked, self._turn = True, threading.RLock()  # another thread may have held it
        self._broken = StateError(FORKED)
        for operation in self._operations:
            operation.end(self._broken)
        self._operations.clear()


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    for lane in list(_lanes):
        if not lane.is_forked:
            lane.end_threads()

"""Adds to another host's rows for which their worker does not wait: a thread sends them.

    add(wait=False) ──> kept, in order ──> a message of several ──> the other host's server
                                │
                                └── flush, get, barrier, tick, leave: wait until none is left

While a message is under way, what is added meanwhile is kept, and goes together in the next one. So
a burst of small adds needs few messages, and a single add is sent at once. One message is under way
at a time, because the other side knows an add that comes again by a number that only rises
(part.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import Waiting
from phalanx.tables.part import Entry

if TYPE_CHECKING:  # else runs on one host would import what speaks to others
    from phalanx.tables.remote_part import RemotePart

__all__ = ["DeferredAdds", "finish_all"]

_MOST_TOGETHER = 1024  # adds in one message
_MESSAGE_BYTES = 1 << 20
_KEPT_BYTES = 16 << 20  # beyond, an add waits for those before it
_LATER_S = 1.0  # the deadline of a message comes first, whose error says more


class _Kept(NamedTuple):
    part: RemotePart
    entry: Entry
    nbytes: int
    timeout_s: float


class DeferredAdds:
    """The adds of one worker to one other host that are kept or under way.

    Args:
        server: What errors call the server.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        # Entered in place of the condition, whose `__enter__` is Python code: a Ctrl-C in it leaves
        # the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._num_put = 0
        self._num_ended = 0  # of these, in their order: taken there, failed or dropped
        self._num_dropped = 0  # since the error
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._has_left = False
        self._is_closing = False

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait while too much is kept.

        Raises:
            PhalanxError: An earlier add failed, or the worker has left.
        """
        with self._lock:
            self._refuse_after_leave()
            self._wait(lambda: self._kept_bytes <= _KEPT_BYTES, timeout_s)
            if self._thread is None:
                thread = threading.Thread(target=self._send_all, name="phalanx adds", daemon=True)
                thread.start()
                self._thread = thread

    def put(self, part: RemotePart, entry: Entry, timeout_s: float) -> None:
        """Keep an add, whose memory must not change, after :meth:`wait_for_room`.

        Where an earlier add has failed since, and the error was not raised yet, this one is dropped
        like the others that were kept: it is too late to refuse it, as its part on this host is in.

        Raises:
            StateError: The worker has left.
        """
        nbytes = entry.delta.nbytes + (0 if entry.rows is None else entry.rows.nbytes)
        with self._lock:
            self._refuse_after_leave()
            if self._error is not None:
                self._num_dropped += 1
                return
            self._num_put += 1
            self._kept_bytes += nbytes
            self._kept.append(_Kept(part, entry, nbytes, timeout_s))
            self._changed.notify_all()

    def finish(self, timeout_s: float, *, last: bool = False) -> None:
        """Wait until all adds that were put before this call have been taken.

        Args:
            timeout_s: How long.
            last: Refuse further adds.

        Raises:
            PhalanxError: One failed; those that were kept behind it are dropped. Raised once.
        """
        self._has_left |= last
        # In this order: an error is set before its add counts as ended.
        if self._num_put == self._num_ended and self._error is None:
            return
        with self._lock:
            num_put = self._num_put
            self._wait(lambda: self._num_ended >= num_put, timeout_s)

    def _refuse_after_leave(self) -> None:
        if self._has_left:
            raise StateError(
                "An add must be made by a worker of the run, but this one has left. Add before "
                "`leave()`."
            )

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        in_time = self._changed.wait_for(
            lambda: self._error is not None or ready(), timeout_s + _LATER_S
        )
        error, self._error = self._error, None
        if error is not None:
            if self._num_dropped:
                error.add_note(
                    f"{self._num_dropped} later adds of this worker to that host, made with "
                    "`wait=False`, were not sent."
                )
            raise error
        if not in_time:
            raise PeerTimeout(
                f"{self._server} did not take {self._num_put - self._num_ended} adds that were "
                f"made with `wait=False` within {timeout_s:g} s. See whether that host and the "
                "network keep up."
            )

    def end(self) -> None:
        """Drop the adds that are kept, and end the thread after the message under way."""
        with self._lock:
            self._has_left = self._is_closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """As :meth:`end`, and wait until the thread has ended."""
        self.end()
        if self._thread is not None:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while together := self._next():
            error: Exception | None = None
            try:
                together[0].part.add([each.entry for each in together], together[0].timeout_s)
            except Exception as exc:  # of any kind: the worker's next call raises it
                error = exc
            with self._lock:
                if error is not None:  # a caller may want to make the rest otherwise
                    self._error = error
                    self._num_dropped = len(self._kept)
                    self._num_ended += len(self._kept)
                    self._kept.clear()
                    self._kept_bytes = 0
                self._num_ended += len(together)
                self._changed.notify_all()

    def _next(self) -> list[_Kept]:
        """Wait for adds, and take those that go into one message: of one table, from the oldest."""
        with self._lock:
            self._changed.wait_for(lambda: self._kept or self._is_closing)
            together: list[_Kept] = []
            nbytes = 0
            while self._kept and not self._is_closing and len(together) < _MOST_TOGETHER:
                first, kept = (together or self._kept)[0], self._kept[0]
                are_rows = first.entry.rows is not None and kept.entry.rows is not None
                fits = are_rows and nbytes + kept.nbytes <= _MESSAGE_BYTES
                if together and not (fits and kept.part is first.part):
                    break
                together.append(self._kept.popleft())
                nbytes += kept.nbytes
            self._kept_bytes -= nbytes
            self._changed.notify_all()
            return together


def finish_all(adds: Iterable[DeferredAdds], timeout_s: float, *, last: bool = False) -> None:
    """Wait for the adds to several hosts, as :meth:`DeferredAdds.finish` does.

    Raises:
        PhalanxError: Some failed, on the first host that did; notes say which did on others. Those
            to the hosts behind it have been waited for all the same.
    """
    waiting, errors = Waiting(timeout_s), []
    for each in adds:
        try:
            each.finish(waiting.remaining_s(), last=last)
        except Exception as exc:  # of any kind, as the thread has met it
            errors.append(exc)
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"Also failed: {type(other).__name__}: {other}")
        raise first

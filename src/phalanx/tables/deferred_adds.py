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
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import Waiting
from phalanx.tables.part import Entry

__all__ = ["MOST_TOGETHER", "DeferredAdds", "finish_all"]

MOST_TOGETHER = 1024  # adds in one message
_MESSAGE_BYTES = 1 << 20
_KEPT_BYTES = 16 << 20  # beyond, an add waits for those before it
_LATER_S = 1.0  # the deadline of a message comes first, whose error says more


class AddedTo(Protocol):
    """A table's part on another host."""

    def add(self, entries: Sequence[Entry], timeout_s: float) -> None:
        """Add, one after the other, and return when all have been taken."""


class _Kept(NamedTuple):
    part: AddedTo
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
        self._num_begun = 0  # adds that the thread has taken to send
        self._num_ended = 0  # of these, in their order: taken there, failed or dropped
        self._num_dropped = 0  # since the error
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._last_came = False
        self._closing = False

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait while too much is kept.

        Raises:
            PhalanxError: An earlier add failed, or the worker has left.
        """
        with self._lock:
            self._refuse_after_last()
            self._wait(lambda: self._kept_bytes <= _KEPT_BYTES, timeout_s)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._send_all, name="phalanx adds", daemon=True
                )
            if self._thread.ident is None:
                self._thread.start()

    def put(self, part: AddedTo, entry: Entry, timeout_s: float) -> None:
        """Keep an add, whose memory must not change, after :meth:`wait_for_room`.

        Where an earlier add has failed since, and the error was not raised yet, this one is dropped
        like the others that were kept: it is too late to refuse it, as its part on this host is in.

        Raises:
            StateError: The worker has left.
        """
        nbytes = entry.delta.nbytes + (0 if entry.rows is None else entry.rows.nbytes)
        with self._lock:
            self._refuse_after_last()
            if self._error is not None:
                self._num_dropped += 1
                return
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
        self._last_came |= last
        # In this order: an add counts as begun before it is no longer kept, and its error is set
        # before it counts as ended.
        if not (self._kept or self._num_begun != self._num_ended or self._error or last):
            return
        with self._lock:
            num_put = self._num_begun + len(self._kept)
            self._changed.notify_all()  # a Ctrl-C may have kept `put` from it
            self._wait(lambda: self._num_ended >= num_put, timeout_s)

    def _refuse_after_last(self) -> None:
        if self._last_came:
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
            then = "The worker leaves" if self._last_came else "They are still being sent"
            raise PeerTimeout(
                f"{self._server} did not take {self._num_left()} adds that were made with "
                f"`wait=False` within {timeout_s:g} s. {then}. See whether that host and the "
                "network keep up."
            )

    def end(self) -> None:
        """Drop the adds that are kept, and end the thread after the message under way."""
        with self._lock:
            self._last_came = self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """As :meth:`end`, and wait until the thread has ended."""
        self.end()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _num_left(self) -> int:
        return self._num_begun + len(self._kept) - self._num_ended

    # --- the thread -------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while together := self._next():
            first = together[0]
            error: Exception | None = None
            try:
                first.part.add([each.entry for each in together], first.timeout_s)
            except Exception as exc:  # of any kind: the worker's next call raises it
                error = exc
                if len(together) > 1 and not isinstance(exc, PeerTimeout):
                    exc.add_note(
                        f"It was one of {len(together)} adds in a message: those before it were "
                        "made, those behind it were not."
                    )
            with self._lock:
                if error is not None:
                    self._drop_kept(error)
                self._num_ended += len(together)
                self._changed.notify_all()

    def _next(self) -> list[_Kept]:
        """Wait for adds, and take those that go into one message: of one table, from the oldest."""
        with self._lock:
            self._changed.wait_for(lambda: self._kept or self._closing)
            together: list[_Kept] = []
            if self._closing:
                return together
            nbytes = 0
            while self._kept and len(together) < MOST_TOGETHER:
                kept = self._kept[0]
                if together and not _go_together(together[0], kept, nbytes + kept.nbytes):
                    break
                self._num_begun += 1
                together.append(self._kept.popleft())
                nbytes += kept.nbytes
            self._kept_bytes -= nbytes
            self._changed.notify_all()
            return together

    def _drop_kept(self, error: Exception) -> None:
        """Drop what came after an add that failed, which a caller may want to make otherwise."""
        self._error = error
        self._num_dropped = len(self._kept)
        self._num_begun += len(self._kept)
        self._num_ended += len(self._kept)
        self._kept.clear()
        self._kept_bytes = 0


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


def _go_together(first: _Kept, other: _Kept, nbytes: int) -> bool:
    of_rows = first.entry.rows is not None and other.entry.rows is not None
    return first.part is other.part and of_rows and nbytes <= _MESSAGE_BYTES

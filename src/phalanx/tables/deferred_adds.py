"""Adds to another host's rows for which their worker does not wait: a thread sends them.

    add(wait=False) ──> kept, in order ──> a message of several ──> the other host's server
                                │
                                └── flush, get, barrier, tick, leave: wait until none is left

While a message is under way, what is added meanwhile is kept, and goes together in the next one. So
a burst of small adds needs few messages, and a single add is sent at once. One message is under way
at a time, because the other side knows an add that comes again by a number that only rises
(Note [Exactly once] in applied_numbers.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from phalanx.errors import PeerTimeout
from phalanx.tables.shard import Entry

__all__ = ["MOST_TOGETHER", "DeferredAdds"]

MOST_TOGETHER = 1024  # adds in one message
_MESSAGE_BYTES = 1 << 20
_KEPT_BYTES = 16 << 20  # beyond, an add waits for those before it
_LATER_S = 1.0  # the deadline of a message comes first, whose error says more


class AddedTo(Protocol):
    """A table's part on another host."""

    def add_together(self, entries: Sequence[Entry], timeout_s: float) -> None:
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
        self._changed = threading.Condition()
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._num_left = 0  # kept or under way
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def put(self, part: AddedTo, entry: Entry, timeout_s: float) -> None:
        """Keep an add, which must stay as it is; wait where too much is kept.

        Raises:
            PhalanxError: An earlier add failed.
        """
        nbytes = entry.delta.nbytes + (0 if entry.rows is None else entry.rows.nbytes)
        with self._changed:
            self._wait(lambda: self._kept_bytes <= _KEPT_BYTES, timeout_s)
            self._kept.append(_Kept(part, entry, nbytes, timeout_s))
            self._kept_bytes += nbytes
            self._num_left += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._send_all, name="phalanx adds", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def finish(self, timeout_s: float) -> None:
        """Wait until every add has been taken.

        Raises:
            PhalanxError: One failed; those that were kept behind it are dropped. Said once.
        """
        if not self._num_left and self._error is None:
            return
        with self._changed:
            self._wait(lambda: not self._num_left, timeout_s)

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        in_time = self._changed.wait_for(
            lambda: self._error is not None or ready(), timeout_s + _LATER_S
        )
        error, self._error = self._error, None
        if error is not None:
            raise error
        if not in_time:
            raise PeerTimeout(
                f"{self._server} did not take {self._num_left} adds that were made with "
                f"`wait=False` within {timeout_s:g} s. They are still being sent. See whether that "
                "host and the network keep up."
            )

    def close(self) -> None:
        """End the thread when the message that is under way has ended; what is kept is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while together := self._next():
            first = together[0]
            error: Exception | None = None
            try:
                first.part.add_together([each.entry for each in together], first.timeout_s)
            except Exception as exc:  # of any kind: whoever asks next is told
                error = exc
            with self._changed:
                self._num_left -= len(together)
                if error is not None:
                    self._drop_kept(error)
                self._changed.notify_all()

    def _next(self) -> list[_Kept]:
        """Wait for adds, and take those that go into one message: of one table, from the oldest."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept or self._closing)
            together: list[_Kept] = []
            if self._closing:
                return together
            nbytes = 0
            while self._kept and len(together) < MOST_TOGETHER:
                kept = self._kept[0]
                if together and not _go_together(together[0], kept, nbytes + kept.nbytes):
                    break
                together.append(self._kept.popleft())
                nbytes += kept.nbytes
            self._kept_bytes -= nbytes
            self._changed.notify_all()
            return together

    def _drop_kept(self, error: Exception) -> None:
        """Drop what came after an add that failed, which a caller may want to make otherwise."""
        if self._kept:
            error.add_note(
                f"{len(self._kept)} later adds of this worker to that host, made with "
                "`wait=False`, were not sent."
            )
        self._num_left -= len(self._kept)
        self._kept.clear()
        self._kept_bytes = 0
        self._error = error


def _go_together(first: _Kept, other: _Kept, nbytes: int) -> bool:
    of_rows = first.entry.rows is not None and other.entry.rows is not None
    return first.part is other.part and of_rows and nbytes <= _MESSAGE_BYTES

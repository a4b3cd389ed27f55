"""Room that adds under way were promised in every shard of a keys table.

    line w   | … | PROMISED | TURN |      the last two words of worker w's line; its own to write

An add to several shards must not find the third one without memory when two have taken their part.
So it says first how many new keys it may bring to any shard, sees to it that each has room for all
that anybody has said, and takes its number back when all shards have their part:

    keys there + promised to all  ≤  capacity        looked at with the shard's lock held

As everybody counts everybody's, nobody brings keys into room that was promised to another. What a
worker had said when it died counts until it is buried.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.tables.membership import Membership

__all__ = ["Reservations"]

_PROMISED, _TURN = 6, 7  # the words before are those of rounds.py


class Reservations:
    """The promises to all workers, as one process sees them.

    Args:
        lines: The lines of all workers.
        membership: Whose promises count.
    """

    def __init__(self, lines: memoryview, membership: Membership) -> None:
        self._lines = lines
        self._membership = membership
        self._mutex = threading.Lock()  # threads may share a worker, and so its line

    @contextmanager
    def of(self, worker: int, num_keys: int) -> Iterator[None]:
        """Promise room for so many new keys in every shard, to be made by who is promised it."""
        self._change(worker, num_keys)
        try:
            yield
        finally:
            self._change(worker, -num_keys)

    def total(self) -> int:
        """Return for how many new keys a shard has to have room."""
        promised = self._lines[_PROMISED::8].tolist()
        return sum(n for worker, n in enumerate(promised) if n and self._counts(worker))

    def _counts(self, worker: int) -> bool:
        return self._membership.is_here(worker, self._lines[8 * worker + _TURN])

    def _change(self, worker: int, num_keys: int) -> None:
        at = 8 * worker
        with self._mutex:
            before = self._lines[at + _PROMISED] if self._counts(worker) else 0
            self._lines[at + _PROMISED] = before + num_keys
            self._lines[at + _TURN] = self._membership.turn(worker)

"""Which adds of other hosts a shard has taken, so that one that is asked again counts once.

    line of worker w, 16 bytes   | NUMBER | AFTER |
    the shard's header           | WORD | … | CLAIMANT |

# Note [Exactly once]
An add that comes over the network may come again: the answer was lost, or the server was killed
before it answered. It carries a number, larger with each add of its worker. Before the shard
changes anything it writes into the header whose add comes, and then the number, and the version
that WORD will have when the add has ended, into that worker's line. So the one store that ends the
add (Note [One store decides] in shard.py) also makes its number count:

    taken   ⇔   NUMBER ≥ the add's number   and   AFTER ≤ WORD's version

An add that was begun and not ended leaves AFTER ahead of WORD. Whoever comes next withdraws it
(CLAIMANT says whose) before WORD moves, whether it undoes that add or makes another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from phalanx.tables.membership import MAX_WORKERS

__all__ = ["AppliedNumbers"]

_LINE_WORDS = 2
_NUMBER, _AFTER = range(_LINE_WORDS)
_NEVER = (1 << 63) - 1


class AppliedNumbers:
    """The lines of one shard, opened when the first add of another host comes.

    Args:
        open_words: Returns the lines of all workers.
    """

    def __init__(self, open_words: Callable[[], memoryview]) -> None:
        self._open_words = open_words

    @staticmethod
    def needed_bytes(num_shards: int) -> int:
        """Return the size of the lines of all shards of a table."""
        return 8 * _LINE_WORDS * MAX_WORKERS * num_shards

    @staticmethod
    def of_shard(words: memoryview, index: int) -> memoryview:
        """Return the lines of one shard, of those of all."""
        length = _LINE_WORDS * MAX_WORKERS
        return words[index * length : (index + 1) * length]

    @cached_property
    def _words(self) -> memoryview:
        return self._open_words()

    def taken(self, worker: int, number: int, version: int) -> bool:
        """Tell whether a shard whose WORD has ``version`` has taken the add."""
        at = _LINE_WORDS * worker
        return self._words[at + _NUMBER] >= number and self._words[at + _AFTER] <= version

    def claim(self, worker: int, number: int, after: int) -> None:
        """Write an add down that will have ended when WORD's version is ``after``."""
        at = _LINE_WORDS * worker
        self._words[at + _AFTER] = _NEVER  # the two words never stand for different adds
        self._words[at + _NUMBER] = number
        self._words[at + _AFTER] = after

    def withdraw_unfinished(self, worker: int, version: int) -> None:
        """Let the worker's last add count only if it has ended; WORD has ``version`` now."""
        at = _LINE_WORDS * worker + _AFTER
        if self._words[at] > version:
            self._words[at] = _NEVER

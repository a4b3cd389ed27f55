"""Which adds of other hosts a shard has taken, so that one that is asked again counts once.

    line of worker w, 24 bytes   | NUMBER | AFTER | ENDED |
    the shard's header           | WORD | … | CLAIMANT |

# Note [Exactly once]
An add that comes over the network may come again: the answer was lost, or the server was killed
before it answered. It carries a number, larger with each add of its worker. Before the shard
changes anything it writes into the header whose add comes, and then the number, and the version
that WORD will have when the add has ended, into that worker's line. So the one store that ends the
add (Note [One store decides] in shard.py) also makes its number count:

    taken   ⇔   number ≤ ENDED   or   number ≤ NUMBER and AFTER ≤ WORD's version

An add that was begun and not ended leaves AFTER ahead of WORD. Whoever comes next withdraws it
(CLAIMANT says whose) before WORD moves, whether it undoes that add or makes another. The worker's
earlier adds stay taken, as ENDED, in which the last of them was written down before NUMBER became
another: they come again where they shared a message with the add that was withdrawn, and where a
request was repeated and its second copy is late.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from phalanx.tables.membership import MAX_WORKERS

__all__ = ["AppliedNumbers"]

_LINE_WORDS = 3
_NUMBER, _AFTER, _ENDED = range(_LINE_WORDS)
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
        return number <= self._last_taken(_LINE_WORDS * worker, version)

    def claim(self, worker: int, number: int, version: int) -> None:
        """Write an add down that will have ended when WORD's version, ``version`` now, is next."""
        words, at = self._words, _LINE_WORDS * worker
        words[at + _ENDED] = self._last_taken(at, version)  # before NUMBER is replaced
        words[at + _AFTER] = _NEVER  # the two words never stand for different adds
        words[at + _NUMBER] = number
        words[at + _AFTER] = version + 1

    def _last_taken(self, at: int, version: int) -> int:
        words = self._words
        return words[at + _NUMBER] if words[at + _AFTER] <= version else words[at + _ENDED]

    def withdraw_unfinished(self, worker: int, version: int) -> None:
        """Let the worker's last add count only if it has ended; WORD has ``version`` now."""
        at = _LINE_WORDS * worker + _AFTER
        if self._words[at] > version:
            self._words[at] = _NEVER

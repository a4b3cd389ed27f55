"""Where in a table each key's row lies: a hash index over two shared arrays.

    entries  | 0 | 3 | 0 | 1 | 2 | 0 | 0 | 0 |      0: empty, else the slot + 1
    keys     | k₀ | k₁ | k₂ |                       the key of each slot

A key's search begins at its hash and goes on, entry by entry, until its own or an empty one. Many
keys are sought at once, in rounds: each round looks at one entry of every key that is not found
yet. Entries are never removed, but those of slots that were never used (:meth:`HashIndex.drop`), so
a reader finds what was there before, while another process inserts.

The worker that makes a table draws its seed: an attacker's keys that all hash to one entry, and so
make searches long, do so under one seed only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENTRIES_PER_KEY", "HashIndex", "Int64s", "mix"]

ENTRIES_PER_KEY = 4  # at most a quarter is ever taken, so a search ends after a few rounds

Int64s = NDArray[np.int64]
_Words = NDArray[np.uint64]


def mix(numbers: NDArray[Any]) -> _Words:
    """Return 64 bits for each number, every one of which depends on all of the number's.

    Source: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); a bijection.
    """
    x: _Words = numbers.astype(np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class HashIndex:
    """The index, over memory that others share.

    Args:
        entries: Zeros at first; their number is a power of two.
        keys: The key of each slot, at most a quarter as many.
        seed: The same wherever the entries are seen; an int64.

    Example:
        >>> index = HashIndex(np.zeros(16, np.int32), np.zeros(4, np.int64))
        >>> index.insert(np.array([-5, 7]), 0)
        >>> index.find(np.array([7, 8, -5])).tolist()
        [1, -1, 0]
    """

    def __init__(self, entries: NDArray[np.int32], keys: Int64s, seed: int = 0) -> None:
        self._entries = entries
        self._keys = keys
        self._mask = len(entries) - 1
        self._seed = np.int64(seed)

    def find(self, keys: Int64s) -> Int64s:
        """Return each key's slot, or -1."""
        buckets = self._first_buckets(keys)
        slots = self._entries[buckets].astype(np.int64) - 1
        wrong = (slots >= 0) & (self._keys[slots] != keys)
        left = wrong.nonzero()[0]
        buckets = buckets[left]
        while len(left):
            buckets = (buckets + 1) & self._mask
            found = self._entries[buckets].astype(np.int64) - 1
            slots[left] = found
            wrong = (found >= 0) & (self._keys[found] != keys[left])
            buckets, left = buckets[wrong], left[wrong]
        return slots

    def insert(self, keys: Int64s, first_slot: int) -> None:
        """Give new keys, each once, the slots from ``first_slot`` on."""
        slots = np.arange(first_slot, first_slot + len(keys))
        self._keys[slots] = keys
        entries = (slots + 1).astype(np.int32)
        buckets = self._first_buckets(keys)
        while len(buckets):
            free = self._entries[buckets] == 0
            self._entries[buckets[free]] = entries[free]  # of two for one bucket, the last has it
            left = self._entries[buckets] != entries
            buckets, entries = (buckets[left] + 1) & self._mask, entries[left]

    def drop(self, first_slot: int) -> None:
        """Take back the newest keys, from ``first_slot`` on."""
        self._entries[self._entries > first_slot] = 0

    def _first_buckets(self, keys: Int64s) -> Int64s:
        buckets: Int64s = mix(keys ^ self._seed).view(np.int64) & self._mask
        return buckets

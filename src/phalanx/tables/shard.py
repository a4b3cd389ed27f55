"""A range of rows shared by processes; a killed process never leaves it half changed.

    header   | WORD | ARMED | COUNT | BLOCK | UNDONE | CLAIMANT |          8 bytes each
    WORD     version · 2^24  |  entries of the open round · 4  |  parity of rounds · 2  |  current

# Note [One store decides]
WORD says everything that has to change together: which of A and B is current, and how much of a
bulk-synchronous round is in. An add ends with one store of 8 bytes to it, which a kill comes before
or after, never within.

    add of rows          ids → record; per block: old rows → record, COUNT up, rows changed;
                         ARMED = WORD before the first is changed; WORD = next
    add of everything    the result → the other side; WORD = next, other side current

ARMED == WORD therefore means that an add was begun and not finished. The next holder of the lock
restores the recorded rows, the last block first (a row may be in two blocks), and ends with
WORD = next.

# Note [Reading without the lock]
A reader notes WORD, copies, and looks at WORD and ARMED again: if WORD is the same and ARMED is not
WORD, nothing that it copied was changed meanwhile, for every change ends with a WORD that was never
there before, and begins with ARMED = WORD (rows) or on the side that was not current (everything;
for that side to be one that a reader still copies, a WORD must lie between). Else it takes the
lock. This needs stores and loads to keep their order, as on x86; elsewhere it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.ipc import KEEPS_ORDER, Mutex, fail_point
from phalanx.memory import PAST_CACHE_BYTES, MatrixRows, all_finite, clamp_rows, copy_to, sum_to
from phalanx.tables.applied_numbers import AppliedNumbers
from phalanx.tables.updaters import Assign, Change, Updater

__all__ = ["POINTS", "Entry", "KeySlots", "NotFinite", "TableShard"]

POINTS = (
    "before lock",
    "lock held",
    "undo written",
    "half the rows written",
    "before unlock",
    "after unlock",
)
"""Fail points of an add, in order (:func:`phalanx.ipc.fail_point`)."""

_WORD, _ARMED, _COUNT, _BLOCK, _UNDONE, _CLAIMANT = range(6)
_CURRENT, _PARITY, _PROGRESS, _VERSION = 1, 2, 4, 1 << 24
_MAX_PROGRESS = _VERSION // _PROGRESS - 1
BLOCK_ROWS = 2048  # changed at once, so that what was saved is still in the cache
_BLOCK_ELEMENTS = 1 << 18  # the same for an add of everything
_ATTEMPTS = 3
_ASSIGN = Assign()

T = TypeVar("T")


class KeySlots(NamedTuple):
    """The slots of keys in one segment, -1 for absent keys; and the absent keys, each once.

    A slot stays its key's; absent keys may have come since.
    """

    serial: int
    numbers: NDArray[np.int64]
    new_keys: NDArray[np.int64]


class Entry(NamedTuple):
    """One add, checked.

    Attributes:
        rows: Of the shard, as the table numbers them; None for all.
        delta: What is added to them.
        worker: The one that adds.
        assigns: Whether the delta is the new value.
        unchecked: Whether the delta, of all rows, must be finite and has not been looked at yet.
        delta_rows: Which of the delta's rows, in the order of ``rows``; None for all of them.
        slots: Of its keys, if they were looked up.
        number: Of an add that may come again, among those of its worker, from 1; else 0.
    """

    rows: Tensor | None
    delta: Tensor
    worker: int
    assigns: bool = False
    unchecked: bool = False
    delta_rows: Tensor | None = None
    slots: KeySlots | None = None
    number: int = 0


class NotFinite(Exception):
    """A delta that had to be finite is not; the shard is as it was."""


class TableShard:
    """One shard, as one process sees it.

    Args:
        lock: Held alone to change anything.
        header: Its line of the page.
        values: Its rows of A and of B.
        states: For each state its rows of A and of B.
        ids: Where the undone rows' numbers go.
        backups: Its rows of each worker's copy.
        updater: How it takes a delta.
        first_row: Its first row's number in the table.
        applied: Which adds of other hosts it has taken.
    """

    def __init__(
        self,
        *,
        lock: Mutex,
        header: memoryview,
        values: tuple[Tensor, Tensor],
        states: Sequence[tuple[Tensor, Tensor]],
        ids: Tensor,
        backups: Sequence[Tensor],
        updater: Updater,
        first_row: int,
        applied: AppliedNumbers,
    ) -> None:
        self.lock = lock
        self.values = values
        self.first_row = first_row
        self.num_rows = len(values[0])
        self._header = header
        self._applied = applied
        self._sides = tuple((values[side], *(s[side] for s in states)) for side in range(2))
        self._ids = ids
        self._undo_rows = len(ids)
        self._rows = tuple([MatrixRows(part) for part in side] for side in self._sides)
        self._backups = backups
        self._updater = updater
        self._scale = updater.scale
        self._last_ids = ids

    def begin(self, init: Tensor) -> None:
        """Give a new shard its first values: one number, or all of its rows."""
        self.make_header()
        values, *states = self._sides[0]
        for state, first in zip(states, self._updater.first_states(), strict=True):
            state.fill_(first)
        values.copy_(init)

    def make_header(self) -> None:
        """Make the header of a new table."""
        self._header[_ARMED] = -1

    @property
    def num_undone(self) -> int:
        """How many interrupted adds were undone."""
        return self._header[_UNDONE]

    def close(self) -> None:
        """Do nothing: the last reference to the shard frees its memory."""

    def word(self) -> int:
        """Return WORD, which is another as soon as an add has ended."""
        return self._header[_WORD]

    def current(self) -> tuple[Tensor, ...]:
        """Return the values and each state where they lie now. The lock is held."""
        return self._sides[self._header[_WORD] & _CURRENT]

    # --- reading ----------------------------------------------------------------------------------

    def read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> None:
        """Copy rows (by the table's numbers, None for all) into ``out``; never half of an add."""
        header = self._header
        for _ in range(_ATTEMPTS if KEEPS_ORDER else 0):
            word = header[_WORD]
            if header[_ARMED] == word:
                break
            if rows is None:
                copy_to(self.values[word & _CURRENT], out)
            else:
                self._rows[word & _CURRENT][0].take(rows, out, self.first_row)
            if header[_WORD] == word and header[_ARMED] != word:
                return
        own = None if rows is None else self._counted(rows)
        self._call_settled(lambda: _copy_rows(self.current()[0], own, out), timeout_s)

    def _counted(self, rows: Tensor) -> Tensor:
        """Return rows counted from the shard's first one."""
        return rows - self.first_row if self.first_row else rows

    def _call_settled(self, call: Callable[[], T], timeout_s: float) -> T:
        """Call with the lock held, where no add of a dead process is unfinished."""
        with self.lock.held(timeout_s):
            fail_point("reader's lock held")
            self._settle()
            return call()

    def read_and_back_up(
        self, rows: Tensor | None, out: Tensor, worker: int, timeout_s: float
    ) -> None:
        """Copy rows into ``out``, and remember them as what ``worker`` has read."""
        backup, own = self._backups[worker], None if rows is None else self._counted(rows)
        with self.lock.held(timeout_s):  # nothing may come between value and copy
            fail_point("reader's lock held")
            self._settle()
            _copy_rows(self.current()[0], own, out)
            if own is None:
                backup.copy_(out)
            else:
                backup[own] = out

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state, of one moment."""
        copies = [torch.empty_like(part) for part in self._sides[0]]

        def copy() -> None:
            for part, to in zip(self.current(), copies, strict=True):
                copy_to(part, to)

        self._call_settled(copy, timeout_s)
        return copies

    # --- changing ---------------------------------------------------------------------------------

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all.

        Raises:
            NotFinite: The entry was unchecked, and is not. The values are as they were.
        """
        fail_point("before lock")
        with self.lock.held(timeout_s):
            fail_point("lock held")
            word = self._settle()
            if entry.number and not self._claim(entry, word):
                return
            try:
                self._change(entry, word, word + _VERSION)
            except BaseException:
                self._settle()
                raise
            fail_point("before unlock")
        fail_point("after unlock")

    def _claim(self, entry: Entry, word: int) -> bool:
        """Write down who adds; False if this add was taken before. See Note [Exactly once]."""
        version = word // _VERSION
        if self._applied.taken(entry.worker, entry.number, version):
            return False
        self._header[_CLAIMANT] = 1 + entry.worker  # first: a claim of nobody is never withdrawn
        self._applied.claim(entry.worker, entry.number, version)
        return True

    def _withdraw(self, word: int) -> None:
        """Let an add that was begun and has not ended count no more."""
        header = self._header
        self._applied.withdraw_unfinished(header[_CLAIMANT] - 1, word // _VERSION)
        header[_CLAIMANT] = 0

    def apply_round(self, number: int, entries: Sequence[Entry], timeout_s: float) -> None:
        """Take the adds of a round, in their order; go on where somebody was killed.

        Does nothing where the round is in already. Everybody must give the same entries.
        """
        with self.lock.held(timeout_s):
            word = self._settle()
            if bool(word & _PARITY) == bool(number & 1):
                return
            for entry in entries[word // _PROGRESS & _MAX_PROGRESS :]:
                fail_point("lock held")
                try:
                    self._change(entry, word, word + _VERSION + _PROGRESS)
                except BaseException:
                    self._settle()
                    raise
                word = self._header[_WORD]
            over = word & ~(_MAX_PROGRESS * _PROGRESS)
            self._header[_WORD] = (over + _VERSION) ^ _PARITY

    def replace_all(self, parts: Sequence[Tensor], timeout_s: float) -> None:
        """Replace the values, and as many states as are given."""
        with self.lock.held(timeout_s):
            word = self._settle()
            old, new = self._both(word)
            for index, target in enumerate(new):
                target.copy_(parts[index] if index < len(parts) else old[index])
            self._header[_WORD] = (word + _VERSION) ^ _CURRENT

    def begin_backup(self, worker: int, timeout_s: float) -> None:
        """Give a new worker its first copy of the rows."""
        if self._backups:
            with self.lock.held(timeout_s):
                self._settle()
                self._backups[worker].copy_(self.current()[0])

    def _both(self, word: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        side = word & _CURRENT
        return self._sides[side], self._sides[1 - side]

    def _settle(self) -> int:
        """Undo the unfinished add of a dead process and return WORD. The lock is held."""
        header = self._header
        word = header[_WORD]
        if header[_CLAIMANT]:
            self._withdraw(word)
        if header[_ARMED] != word:
            return word
        header[_UNDONE] += 1
        return self._undo(word)

    def _undo(self, word: int) -> int:
        header = self._header
        current, record = self._both(word)
        count, block = header[_COUNT], header[_BLOCK]
        for start in reversed(range(0, count, block)):
            stop = min(start + block, count)
            rows = self._ids[start:stop]
            for part, saved in zip(current, record, strict=True):
                part.index_copy_(0, rows, saved[start:stop])
        header[_WORD] = word + _VERSION
        return word + _VERSION

    def _change(self, entry: Entry, word: int, after: int) -> None:
        rows, delta, worker, assigns, unchecked, delta_rows, *_ = entry
        updater, scale = (_ASSIGN, None) if assigns else (self._updater, self._scale)
        if rows is None:
            self._change_all(word, delta, worker, updater, scale, unchecked)
        else:
            if scale is None or rows.numel() > self._undo_rows:
                if delta_rows is not None:
                    delta, delta_rows = torch.index_select(delta, 0, delta_rows), None
                rows, delta = _add_up_repeats(rows, delta)
            if rows.numel() <= self._undo_rows:
                self._change_rows(word, rows, delta, delta_rows, worker, updater, scale)
                self._header[_WORD] = after
                return
            self._change_many(word, rows, delta, worker, updater)
        self._header[_WORD] = after ^ _CURRENT

    # --- an add of rows: in place, with a record --------------------------------------------------

    def _change_rows(
        self,
        word: int,
        rows: Tensor,
        delta: Tensor,
        delta_rows: Tensor | None,
        worker: int,
        updater: Updater,
        scale: float | None,
    ) -> None:
        header = self._header
        num_rows = rows.numel()
        if num_rows == 0:
            return
        header[_COUNT], header[_BLOCK] = 0, BLOCK_ROWS
        if self._last_ids.numel() != num_rows:
            self._last_ids = self._ids[:num_rows]
        ids = self._last_ids
        # A copy, clamped to the shard: an undo can rely on it, whatever the caller does to `rows`.
        clamp_rows(rows, self.num_rows, ids, self.first_row)
        if num_rows <= BLOCK_ROWS:
            self._change_block(word, 0, ids, delta, delta_rows, worker, updater, scale)
            return
        for start in range(0, num_rows, BLOCK_ROWS):
            block = slice(start, min(start + BLOCK_ROWS, num_rows))
            piece, picked = (
                (delta[block], None) if delta_rows is None else (delta, delta_rows[block])
            )
            self._change_block(word, start, ids[block], piece, picked, worker, updater, scale)
            fail_point("half the rows written")

    def _change_block(
        self,
        word: int,
        start: int,
        ids: Tensor,
        delta: Tensor,
        delta_rows: Tensor | None,
        worker: int,
        updater: Updater,
        scale: float | None,
    ) -> None:
        header, side = self._header, word & _CURRENT
        stop = start + ids.numel()
        unread = scale is not None and self._last_ids.numel() > BLOCK_ROWS  # and it is long
        for part, record in zip(self._rows[side], self._rows[1 - side], strict=True):
            part.save(ids, record, start, past=unread)
        header[_COUNT] = stop
        header[_ARMED] = word
        fail_point("undo written")
        if scale is not None:
            self._rows[side][0].add(ids, delta, scale, delta_rows)
            return
        news = [record[start:stop].clone() for record in self._sides[1 - side]]
        backup = self._backups[worker][ids] if self._backups else None
        updater.apply(Change(news[0], delta, news[1:], backup))
        for target, new in zip(self._sides[side], news, strict=True):
            target.index_copy_(0, ids, new)

    # --- an add of everything: on the other side --------------------------------------------------

    def _change_all(
        self,
        word: int,
        delta: Tensor,
        worker: int,
        updater: Updater,
        scale: float | None,
        unchecked: bool,
    ) -> None:
        block = max(1, _BLOCK_ELEMENTS // delta.shape[1])
        old, new = self._both(word)
        fail_point("undo written")
        if scale is not None:
            looks_itself = scale == 1 and delta.nbytes >= PAST_CACHE_BYTES
            parts = (delta.split(block), old[0].split(block), new[0].split(block))
            for piece, source, target in zip(*parts, strict=True):
                if looks_itself:
                    finite = sum_to(source, piece, target)
                else:
                    finite = not unchecked or all_finite(piece)
                    torch.add(source, piece, alpha=scale, out=target)
                if unchecked and not finite:
                    raise NotFinite
                fail_point("half the rows written")
            return
        for start in range(0, self.num_rows, block):
            rows = slice(start, start + block)
            if unchecked and not all_finite(delta[rows]):
                raise NotFinite
            for source, target in zip(old, new, strict=True):
                target[rows].copy_(source[rows])
            backup = self._backups[worker][rows] if self._backups else None
            states = [state[rows] for state in new[1:]]
            updater.apply(Change(new[0][rows], delta[rows], states, backup))
            fail_point("half the rows written")

    def _change_many(
        self, word: int, rows: Tensor, delta: Tensor, worker: int, updater: Updater
    ) -> None:
        """Change more rows than the record holds, each of them once."""
        own = self._counted(rows)
        old, new = self._both(word)
        for source, target in zip(old, new, strict=True):
            target.copy_(source)
        fail_point("undo written")
        picked = [target[own] for target in new]
        backup = self._backups[worker][own] if self._backups else None
        updater.apply(Change(picked[0], delta, picked[1:], backup))
        for target, part in zip(new, picked, strict=True):
            target.index_copy_(0, own, part)
        fail_point("half the rows written")


def _copy_rows(values: Tensor, rows: Tensor | None, out: Tensor) -> None:
    if rows is None:
        copy_to(values, out)
    else:
        torch.index_select(values, 0, rows, out=out)


def _add_up_repeats(rows: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row once, and the sum of what was to be added to it, in the order given."""
    unique, inverse = torch.unique(rows, return_inverse=True)
    if len(unique) == rows.numel():
        return rows, delta
    summed = torch.zeros((len(unique), delta.shape[1]), dtype=delta.dtype, device="cpu")
    return unique, summed.index_add_(0, inverse, delta)

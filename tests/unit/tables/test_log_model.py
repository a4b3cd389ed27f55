"""A model of logs and parts: at every store a worker may die, or a reader look.

Checked in all schedules: each add is whole in every part, once; a reader that takes what it copied
has seen whole adds only. The rules are those of Note [An add, store by store] in tables/part.py;
and each rule that matters is broken once, to see that the model notices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

BLOCK = 2  # rows
ROWS = 6
WORKER, OTHER = 1, 2


class Killed(Exception):
    """The worker has died."""


@dataclass
class Part:
    """One part, in shared memory."""

    word: int = 0
    by: tuple[int, int] | None = None
    logged: bool = True
    at: int = 0
    record: list[tuple[int, int]] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    rows: list[int] = field(default_factory=lambda: [0] * ROWS)


@dataclass
class Shared:
    """What outlives a worker."""

    parts: list[Part]
    log: dict[tuple[int, int], tuple[list[int], int]] = field(default_factory=dict)
    tail: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)


class Process:
    """A process that makes so many stores, and dies.

    Args:
        shared: The table.
        stores: How many.
        bug: Which rule it breaks.
        look: Called before each store.
    """

    def __init__(
        self,
        shared: Shared,
        stores: int = 1 << 30,
        bug: str = "",
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.shared = shared
        self._left = stores
        self._bug = bug
        self._look = look

    def _store(self) -> None:
        self._look()
        if self._left == 0:
            raise Killed
        self._left -= 1

    def add(self, worker: int, number: int, rows: list[int], delta: int) -> None:
        """Log an add, make what counts, and say so; one that comes again does nothing."""
        shared = self.shared
        self.finish(worker)
        if number <= shared.finished.get(worker, 0):
            return
        if self._bug == "counts before it is written":
            self._store()
            shared.tail[worker] = number
        self._store()
        shared.log[worker, number] = (rows, delta)
        self._store()
        shared.tail[worker] = number
        self.finish(worker)

    def finish(self, worker: int) -> None:
        tail = self.shared.tail.get(worker, 0)
        if self.shared.finished.get(worker, 0) >= tail:
            return
        for part in self.shared.parts:
            self._settle(part)
            if part.done.get(worker, 0) < tail:
                self._begin(part, worker, tail, logged=True)
                self._make(part, *self.shared.log[worker, tail], 0)
        self._store()
        self.shared.finished[worker] = tail

    def add_at_once(
        self, part: Part, worker: int, number: int, rows: list[int], delta: int
    ) -> None:
        """Make an add of one block without the log."""
        self._settle(part)
        if not number or part.done.get(worker, 0) < number:
            self._begin(part, worker, number, logged=False)
            self._make(part, rows, delta, 0)

    def _begin(self, part: Part, worker: int, number: int, *, logged: bool) -> None:
        self._store()
        part.by = (worker, number)
        self._store()
        part.logged = logged
        self._store()
        part.at = 0
        self._store()
        part.word += 1

    def _make(self, part: Part, rows: list[int], delta: int, first: int) -> None:
        assert part.by is not None
        for start in range(first, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            self._store()
            part.at = 2 * start
            if self._bug != "no record":
                self._store()
                part.record = [(row, part.rows[row]) for row in block]
            if self._bug == "record counts too late":
                self._change(part, block, delta)
            self._store()
            part.at = 2 * start + 1
            if self._bug != "record counts too late":
                self._change(part, block, delta)
        if self._bug != "the end is not told apart":
            self._store()
            part.at = 2 * len(rows)
        self._end(part)

    def _change(self, part: Part, block: list[int], delta: int) -> None:
        for row in block:
            self._store()
            part.rows[row] += delta

    def _end(self, part: Part) -> None:
        assert part.by is not None
        worker, number = part.by
        if self._bug == "done after the end":
            self._store()
            part.word += 1
        if number:
            self._store()
            part.done[worker] = number
        if self._bug != "done after the end":
            self._store()
            part.word += 1

    def _settle(self, part: Part) -> None:
        if part.word % 2 == 0 or part.by is None:
            return
        at, (worker, number) = part.at, part.by
        if at % 2 and self._bug != "nothing is put back":
            for row, old in reversed(part.record):
                self._store()
                part.rows[row] = old
        if part.logged:
            first = 0 if self._bug == "begun again" else at // 2
            self._make(part, *self.shared.log[worker, number], first)
        elif at % 2 or at == 0:
            self._store()
            part.word += 1
        else:
            self._end(part)


LONG = [0, 1, 2, 0, 3]  # three blocks, and a row in two of them
BEFORE = [10, 0, 0, 0, 0, 10]
BETWEEN = [112, 1, 101, 1, 0, 110]


def lives_on(shared: Shared, deaths: tuple[int, ...], bug: str) -> None:
    """Let the second add of a worker be asked for again after each death, and look at the books."""
    Process(shared).add(WORKER, 1, [0, 5], 10)
    acknowledged = False
    for stores in deaths:
        try:
            Process(shared, stores, bug).add(WORKER, 2, LONG, 1)
        except Killed:
            continue
        acknowledged = True
        break
    other = Process(shared, bug=bug)
    other.add(OTHER, 1, [5, 2, 0], 100)
    other.finish(WORKER)
    counts = shared.tail[WORKER] == 2
    assert counts or not acknowledged
    expected = BETWEEN if counts else [110, 0, 100, 0, 0, 110]
    for part in shared.parts:
        assert part.rows == expected
        assert part.word % 2 == 0
    other.add(WORKER, 2, LONG, 1)
    for part in shared.parts:
        assert part.rows == BETWEEN, "asked for once more, it must be there once"


def all_deaths(bug: str, step: int = 1) -> None:
    for deaths in itertools.product(range(0, 60, step), range(0, 60, step), (0, 5, 14, 31)):
        lives_on(Shared([Part(), Part()]), deaths, bug)


def test_each_logged_add_is_whole_and_once_whoever_dies_and_asks_again():
    all_deaths("", 2)
    for deaths in itertools.product(range(60), (1, 8, 23)):
        lives_on(Shared([Part(), Part()]), deaths, "")


def at_once(deaths: tuple[int, ...], number: int, bug: str = "") -> None:
    """The same for an add of one block that is not logged, with a number or without."""
    shared = Shared([Part()])
    (part,) = shared.parts
    Process(shared).add_at_once(part, WORKER, 1, [0, 5], 10)
    times, acknowledged = 0, False
    for stores in deaths:
        before = list(part.rows)
        try:
            Process(shared, stores, bug).add_at_once(part, WORKER, number, [5, 3], 1)
            acknowledged = True
        except Killed:
            pass
        Process(shared)._settle(part)
        times += (not number or not times) * (part.rows != before)
        assert part.rows == [10, 0, 0, times, 0, 10 + times], "half an add, or one there twice"
        assert times or not acknowledged
    if number:
        Process(shared, bug=bug).add_at_once(part, WORKER, number, [5, 3], 1)
        assert part.rows == [10, 0, 0, 1, 0, 11]


@pytest.mark.parametrize("number", [0, 2])
def test_an_add_without_a_log_is_whole_or_absent_and_counts_once_if_it_has_a_number(number):
    all_at_once(number)


def all_at_once(number: int, bug: str = "") -> None:
    for deaths in itertools.product(range(16), repeat=3):
        at_once(deaths, number, bug)


# --- readers --------------------------------------------------------------------------------------


def read(part: Part, looks_odd: bool) -> Iterator[list[int] | None]:
    """Copy row by row, one for each step; yield what was read if it counts."""
    before = part.word
    copy = []
    for row in range(ROWS):
        yield None
        copy.append(part.rows[row])
    yield None
    whole = part.word == before and (not looks_odd or before % 2 == 0)
    yield copy if whole else []


def readers_meet(act: Callable[[Process, Part], None], *, looks_odd: bool = True) -> int:
    """Let a reader go in all ways beside an add and its settling; return how many reads counted."""
    allowed = ([0] * ROWS, [1, 1, 1, 1, 1, 1])
    counted = 0
    for begins, pauses, stores in itertools.product(range(24), range(5), (3, 9, 12, 15, 99)):
        shared = Shared([Part()])
        (part,) = shared.parts
        reader = read(part, looks_odd)
        seen: list[int] | None = None
        steps = itertools.count()

        def look(reader=reader, begins=begins, pauses=pauses, steps=steps) -> None:
            nonlocal seen
            step = next(steps)
            if step >= begins and (step - begins) % (pauses + 1) == 0 and seen is None:
                seen = next(reader)

        try:
            act(Process(shared, stores, look=look), part)
        except Killed:
            Process(shared, look=look)._settle(part)
        while seen is None:
            seen = next(reader)
        if seen:
            assert seen in allowed, "half of an add was read"
            counted += 1
    return counted


def long_add(process: Process, part: Part) -> None:
    process.add(WORKER, 1, list(range(ROWS)), 1)


def test_a_reader_without_the_lock_sees_no_half_of_an_add():
    assert readers_meet(long_add) > 100


def test_a_reader_that_takes_odd_words_would():
    with pytest.raises(AssertionError, match="half of an add was read"):
        readers_meet(long_add, looks_odd=False)


# --- each rule is needed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bug",
    [
        "counts before it is written",
        "no record",
        "record counts too late",
        "nothing is put back",
        "begun again",
        "done after the end",
    ],
)
def test_a_logged_add_needs_the_rule(bug):
    with pytest.raises((AssertionError, KeyError)):
        all_deaths(bug)


@pytest.mark.parametrize("bug", ["no record", "nothing is put back", "record counts too late"])
def test_an_add_without_a_log_needs_the_rule(bug):
    with pytest.raises(AssertionError):
        settle_with_bug(bug)


def settle_with_bug(bug: str) -> None:
    for deaths in itertools.product(range(16), repeat=2):
        shared = Shared([Part()])
        (part,) = shared.parts
        for stores in deaths:
            try:
                Process(shared, stores, bug).add_at_once(part, WORKER, 0, [5, 3], 1)
            except Killed:
                Process(shared, bug=bug)._settle(part)
            assert part.rows[5] == part.rows[3]


def test_without_its_own_mark_the_end_of_a_numbered_add_is_taken_for_its_middle():
    with pytest.raises(AssertionError):
        all_at_once(2, "the end is not told apart")

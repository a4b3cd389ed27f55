"""Workers of parameter tables, killed at random, and the books that they keep: ``make chaos``.

Each clerk adds, over and over, to the three books of `tests/chaos/books.py`.
A clerk says so when an add is acknowledged, and how long it took. It is killed at a random moment,
or at a random point of its way, and another goes on where the books say that it was.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from phalanx import tables
from phalanx.tables import part
from tests.chaos import command
from tests.chaos.books import Books
from tests.multiprocess.children import Child, Children, Parent
from tests.multiprocess.test_tables import KEY_POINTS, die_at, take_locks_to_read
from tests.multiprocess.test_tables import POINTS as ADD_POINTS
from tests.run_directories import wait_until_removed

CLERKS = 4
DEADLINE_S = 20.0  # far more than any wait; a clerk that waits longer raises
KILLS_PER_RUN = 25  # then the books are closed, and new ones begun: small tables grow more often
BOOKS = ("rows", "whole", "keys")
POINTS = (*ADD_POINTS, "reader's lock held", *KEY_POINTS)
MOST_PASSES = 12  # of a point, before the death
_MOMENT = "a moment"
_numbers = itertools.count()


def keep_books(
    parent: Parent,
    run: str,
    clerk: int,
    counts: dict[str, int],
    death: tuple[str, int] | None,
) -> None:
    """Be a clerk: add, read back, and say so, for ever."""
    torch.set_num_threads(1)
    if clerk % 2:
        part.BLOCK_ROWS = 2  # so that adds of a few rows have a middle
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        if death is not None and death[0] == "reader's lock held":
            # It is taken only where adds overtake a get.
            take_locks_to_read()
        books = Books(world, CLERKS)
        if death is not None:
            die_at(*death)
        while True:
            for book in BOOKS:
                counts[book] += 1
                began = time.perf_counter()
                books.add(book, clerk, counts[book])
                parent.tell((book, counts[book], time.perf_counter() - began))
                [read] = books.count(book, clerk)
                assert read == counts[book], f"{book}: {read} of its adds are there"


@dataclass
class Result:
    """What the books have shown.

    Attributes:
        adds: Acknowledged adds, by book.
        deaths: Kills, by where.
        undone: Adds that a death interrupted and the next worker undid.
        open_and_there: Adds that were there though nobody had heard of their end.
        longest_s: The longest add.
        runs: How often the books were closed and compared.
        seconds: How long it all took.
    """

    adds: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    undone: int = 0
    open_and_there: int = 0
    longest_s: float = 0.0
    runs: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        kills = ", ".join(f"{self.deaths[point]} at {point}" for point in (*POINTS, _MOMENT))
        adds = ", ".join(f"{self.adds[book]} {book}" for book in BOOKS)
        return (
            f"killed in {self.seconds:.0f} s, {self.runs} runs: {kills}\n"
            f"acknowledged adds: {adds}; every one is there once, and none is there by half\n"
            f"interrupted adds undone: {self.undone}; there, but not heard of: "
            f"{self.open_and_there}; longest add: {self.longest_s * 1e3:.0f} ms"
        )


class _Clerk:
    """One place at the desk, and who sits there now."""

    def __init__(self, number: int, start: Callable[..., Child], draw: random.Random) -> None:
        self.number = number
        self.counts = dict.fromkeys(BOOKS, 0)
        self._start = start
        self._draw = draw
        self.sit()

    def sit(self) -> None:
        """Let a new clerk go on."""
        self.death: tuple[str, int] | None = None
        if self._draw.random() < 0.5:
            point = self._draw.choice(POINTS)
            rare = point == "room made"  # passed seldom
            self.death = point, 1 if rare else self._draw.randint(1, MOST_PASSES)
        self.child = self._start(self.number, dict(self.counts), self.death)

    def hear(self, result: Result, until: int) -> bool:
        """Note acknowledged adds until there are so many; return False if it died before."""
        try:
            for _ in range(until):
                book, q, seconds = self.child.get()
                assert q == self.counts[book] + 1
                self.counts[book] = q
                result.adds[book] += 1
                result.longest_s = max(result.longest_s, seconds)
        except (EOFError, ConnectionResetError):
            return False
        return True

    def die(self, result: Result) -> None:
        """Kill the clerk, and note what it had said before."""
        with contextlib.suppress(ProcessLookupError):  # its own death was first
            self.child.kill()
        while self.hear(result, 1):
            pass


def run_books(
    name: str,
    kills: int,
    draw: random.Random,
    result: Result,
    progress: command.Progress = lambda _: None,
) -> None:
    """Keep books in run ``name`` until so many clerks are dead; fail where they are not right."""
    with Children() as children, tables.join(name, timeout_s=DEADLINE_S) as world:
        books = Books(world, CLERKS)

        def start(clerk: int, counts: dict[str, int], death: tuple[str, int] | None) -> Child:
            return children.start(keep_books, name, clerk, counts, death)

        clerks = [_Clerk(number, start, draw) for number in range(CLERKS)]
        for _ in range(kills - CLERKS):
            clerk = draw.choice(clerks)
            planned = clerk.death is not None
            most = len(BOOKS) * (1 + MOST_PASSES) if planned else draw.randint(1, 30)
            alive = clerk.hear(result, most)
            if alive:
                threading.Event().wait(draw.uniform(0.0, 2e-3))
            clerk.die(result)
            point = _MOMENT if alive or clerk.death is None else clerk.death[0]
            result.deaths[point] += 1
            _compare(books, clerk, result)
            assert len(world.workers) <= 1 + CLERKS
            clerk.sit()
            progress(sum(result.deaths.values()))
        for clerk in clerks:
            clerk.die(result)
            result.deaths[_MOMENT] += 1
            _compare(books, clerk, result)
        assert world.workers == [world.worker_id]
        books.check_own_keys([clerk.counts["keys"] for clerk in clerks])
        every = (books.rows, books.whole, books.keys)
        result.undone += sum(table._storage.here.part._header[part.UNDONE] for table in every)
    wait_until_removed(name)
    assert result.longest_s < DEADLINE_S
    result.runs += 1


def _compare(books: Books, clerk: _Clerk, result: Result) -> None:
    """See that every acknowledged add is there, and at most the open one besides."""
    for book, acked in clerk.counts.items():
        [n] = books.count(book, clerk.number)
        assert n >= acked, f"{book} of clerk {clerk.number}: {acked} acknowledged, {n} there"
        assert n <= acked + 1, f"{book} of clerk {clerk.number}: {acked} acknowledged, {n} there"
        result.open_and_there += n - acked
        clerk.counts[book] = n


def soak(kills: int, seed: int, progress: command.Progress = lambda _: None) -> Result:
    """Kill so many clerks, in runs of some; fail where the books are not right."""
    result, draw = Result(), random.Random(seed)
    began = time.perf_counter()
    while (left := kills - sum(result.deaths.values())) > 0:
        some = max(CLERKS, min(left, KILLS_PER_RUN))
        run_books(f"ledger{os.getpid()}-{next(_numbers)}", some, draw, result, progress=progress)
    result.seconds = time.perf_counter() - began
    return result


if __name__ == "__main__":
    command.run(soak, faults="kills", number=2000)

"""Parts of a table: adds are whole wherever their process dies, and no reader sees half of one."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch

from phalanx import tables
from phalanx.errors import ConfigError
from phalanx.native import FUNCTIONS
from phalanx.tables import part
from phalanx.tables.part import NUMBERED, Entry
from tests.products import some_by_day

ROWS = 8


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(part, "BLOCK_ROWS", 2)


# --- looking whether a delta is finite ------------------------------------------------------------


@pytest.fixture(params=[2, 1 << 18], ids=["small blocks", "one block"])
def looking_late(request, monkeypatch):
    monkeypatch.setattr(part, "BLOCK_ROWS", request.param)


def first_values(size):
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("updater", ["sum", "sgd", "adam"])
@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("rows", [None, [6, 0, 2, 2, 5, 1, 3], [0, 0, 0, 0, 1, 1, 1]])
def test_an_add_refused_in_a_late_block_leaves_every_bit(looking_late, updater, place, rows):
    delta = first_values(7)
    delta[place] = float("nan")
    with tables.join(timeout_s=20.0) as world:
        made = world.array(7, init=first_values(7), updater=updater)
        with pytest.raises(ConfigError, match="must be finite for table"):
            made.add(delta, rows=rows)
        assert torch.equal(made.get(), first_values(7))
        made.add(torch.ones(7))
        assert not torch.equal(made.get(), first_values(7))


def test_adds_to_all_rows_alternate_with_adds_of_more_rows_than_there_are():
    with tables.join(timeout_s=20.0) as world:
        made, expected = world.array(3), torch.zeros(3)
        for count in (4, 9, 20_000):
            rows = torch.arange(count) % 3
            made.add(torch.ones(3))
            made.add(torch.ones(count), rows=rows)
            expected += 1.0 + torch.bincount(rows)
            assert torch.equal(made.get(), expected)
            assert made._storage.here.memory.header[NUMBERED] >= count  # has memory, too


# --- death ----------------------------------------------------------------------------------------


class Dying:
    """A header at whose n-th store the process dies."""

    def __init__(self, words, stores):
        self._words = words
        self._left = stores

    def __getitem__(self, index):
        return self._words[index]

    def __setitem__(self, index, value):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._words[index] = value


def dies(act) -> bool:
    """Run in a forked process; tell whether it was killed."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # OpenMP's threads of the parent are not here
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def die_in_python(storage, stores, act):
    storage.here.part._header = Dying(storage.here.part._header, stores)
    act()


def die_in_c(storage, stores, act):
    FUNCTIONS["die_after"](stores)
    act()


@some_by_day("rows, number", [None, [3, 1, 3]], [0, 1 << 41])
def test_an_add_of_one_block_is_whole_or_absent_wherever_its_process_dies(rows, number):
    with tables.join(timeout_s=20.0) as world:
        made = world.matrix(4, 2, torch.int64)
        storage, count = made._storage, 4 if rows is None else 3
        delta = torch.ones(count, 2, dtype=torch.int64)
        index = None if rows is None else torch.tensor(rows)
        whole = [1] * 4 if rows is None else [0, 1, 0, 2]
        for stores in range(1, 30):
            entry = Entry(index, delta, 0, number=number and number + stores)
            before = made.get()
            add = partial(storage.add, entry, 20.0)
            if not dies(partial(die_in_c, storage, stores, add)):
                assert stores > 6
                return
            step = (made.get() - before)[:, 0].tolist()
            assert step in ([0] * 4, whole)
            if number:  # asked for again, it is there once
                storage.add(entry, 20.0)
                assert (made.get() - before)[:, 0].tolist() == whole
    raise AssertionError("the add never ended")


@some_by_day(
    "rows, dying",
    [None, [5, 1, 3, 1, 0]],
    [("sum", die_in_c), ("adagrad", die_in_python)],
)
def test_an_add_of_several_blocks_is_whole_or_absent_wherever_its_process_dies(
    small_blocks, rows, dying
):
    """Who reads next puts its rows back, unless it dies of that, too."""
    updater, die = dying
    cols = 1 << 16 if die is die_in_c else 2  # two rows are more than C changes at once, or few
    with tables.join(timeout_s=20.0) as world:
        made = world.matrix(6, cols, updater=updater)
        plain = world.matrix(6, cols, updater=updater)
        count = 6 if rows is None else len(rows)
        delta = torch.arange(count * cols, dtype=torch.float32).view(-1, cols)
        for each in (made, plain):
            each.add(delta, rows=rows)  # so that the record's memory is there, for both processes
        index = None if rows is None else torch.tensor(rows)
        for stores in range(1, 60):
            before = made.get()
            add = partial(made._storage.add, Entry(index, delta, 0), 20.0)
            killed = dies(partial(die, made._storage, stores, add))
            settle = partial(made._storage.here.part.copy_all, 20.0)
            dies(partial(die_in_python, made._storage, 1 + stores % 2, settle))
            if not torch.equal(made.get(), before):
                plain.add(delta, rows=rows)
            assert torch.equal(made.get(), plain.get())
            if not killed:
                assert stores > 8
                assert not torch.equal(made.get(), before)
                return
    raise AssertionError("the add never ended")

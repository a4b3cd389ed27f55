"""An add of another host whose server dies at any store: asked again, it counts once."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from phalanx import tables
from phalanx.tables.shard import Entry, TableShard

ROWS = 5


class Died(BaseException):
    """As a `kill -9` ends a process: nothing is put right."""


class Words:
    """Words of shared memory, of whose stores one never comes."""

    def __init__(self, words: memoryview, stores: count[int], dies_at: int) -> None:
        self._words = words
        self._stores = stores
        self._dies_at = dies_at

    def __getitem__(self, at: int) -> int:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        if next(self._stores) == self._dies_at:
            raise Died
        self._words[at] = value


def add(shard: TableShard, worker: int, number: int, value: float) -> None:
    """Add ``value`` to every row, as a server does for a worker of another host."""
    delta = torch.full((ROWS, 1), value)
    shard.add(Entry(torch.arange(ROWS), delta, worker, number=number), 5.0)


def dies(shard: TableShard, dies_at: int) -> bool:
    """Add 1 for worker 1, and die before a store; tell whether there were so many."""
    header, lines, stores = shard._header, shard._applied._words, count()
    shard._header = Words(header, stores, dies_at)  # type: ignore[assignment]
    shard._applied._words = Words(lines, stores, dies_at)  # type: ignore[assignment]
    try:
        add(shard, 1, 7, 1.0)
    except Died:
        return True
    finally:
        shard._header, shard._applied._words = header, lines
    return False


@pytest.mark.parametrize("between", [[], [(2, 3)], [(2, 3), (3, 9)], [(2, 0)]], ids=str)
def test_an_add_counts_once_whatever_store_its_server_died_before(between):
    """``between``: workers, and numbers, that add 10 before it is asked again."""
    num_stores = 0
    for dies_at in count():
        with tables.join(num_workers=4) as world:
            (shard,) = world.matrix(ROWS, 1, name="t")._storage.shards
            add(shard, 1, 6, 100.0)
            if not dies(shard, dies_at):
                break
            num_stores += 1
            for worker, number in between:
                add(shard, worker, number, 10.0)
            for _ in range(2):
                add(shard, 1, 6, 100.0)  # its request was repeated, too
                add(shard, 1, 7, 1.0)
            found = torch.empty(ROWS, 1)
            shard.read(None, found, 5.0)
            assert found.unique().tolist() == [101.0 + 10.0 * len(between)], f"store {dies_at}"
    assert num_stores >= 8

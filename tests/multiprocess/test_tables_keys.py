"""Keys tables that grow, and whose workers are killed while keys come."""

from __future__ import annotations

import pytest
import torch

from phalanx import tables
from phalanx.tables import keys as key_tables
from phalanx.tables import part
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.multiprocess.test_tables import die_at

pytestmark = pytest.mark.promise("acknowledged-adds-are-kept")

DEADLINE_S = 60.0
COLS = 3
OLD = [7, -(1 << 63), 0, 12, -3, 44]
SOME = [12, 5_000_000_000, -3, 12, -9, (1 << 63) - 1]  # of which three are new
MANY = [*range(100, 140), *OLD]  # more than there is room for
DELTAS = torch.arange(1.0, 1 + COLS * len(MANY)).view(-1, COLS)


def open_table(
    world: tables.TableGroup, updater: str = "sum", num_shards: int = 1
) -> tables.KeyTable:
    return world.keys(COLS, name="t", init=0.5, updater=updater, capacity=1, num_shards=num_shards)


def add(table: tables.KeyTable, keys: list[int]) -> None:
    table.add(DELTAS[: len(keys)], rows=keys)


def everything(table: tables.KeyTable) -> list[torch.Tensor]:
    """Return the keys, the values and the updater's states."""
    return table._storage.copy_all(DEADLINE_S)


def expected(updater: str, *adds: list[int]) -> list[torch.Tensor]:
    with tables.join() as world:
        table = open_table(world, updater)
        for keys in adds:
            add(table, keys)
        return everything(table)


def victim(
    parent: Parent, run: str, updater: str, keys: list[int], blocks: bool, point: str, times: int
) -> None:
    if blocks:
        part.BLOCK_ROWS = 2  # so that an add of six rows has a middle, and is logged
    key_tables._LEAST_ROOM = 1  # so that each add of new keys takes memory
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, updater)
        add(table, OLD)
        parent.tell("ready")
        die_at(point, times)
        add(table, keys)


TAKEN = ("before unlock", "after unlock")
PLACES = [
    *((SOME, point, 1) for point in (*part.POINTS, *key_tables.POINTS)),
    *((MANY, point, 1) for point in (*part.POINTS, *key_tables.POINTS)),
]


@pytest.mark.parametrize("blocks", [False, True], ids=["one block", "blocks"])
@pytest.mark.parametrize("updater", [pytest.param("sum", marks=pytest.mark.night), "adam"])
@pytest.mark.parametrize(
    ("keys", "point", "times"),
    [pytest.param(*p, id=f"{'grows' if p[0] is MANY else 'fits'}-{p[1]}-{p[2]}") for p in PLACES],
)
def test_an_add_of_new_keys_that_a_death_interrupts_is_there_whole_or_not_at_all(
    run,
    updater,
    keys,
    point,
    times,
    blocks,
):
    with Children() as children, tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, updater)
        child = children.start(victim, run, updater, keys, blocks, point, times)
        assert child.get() == "ready"
        wait_for_exit(child.pid)
        adds = [OLD, keys] if blocks or point in TAKEN else [OLD]
        wanted = expected(updater, *adds)
        assert table.keys().tolist() == wanted[0].tolist()
        assert torch.equal(table.get(table.keys()), wanted[1])
        for part, want in zip(everything(table), wanted, strict=True):
            assert torch.equal(part, want)
        for again in (SOME, MANY):  # whatever the dead one left is no obstacle
            add(table, again)
        for part, want in zip(everything(table), expected(updater, *adds, SOME, MANY), strict=True):
            assert torch.equal(part, want)


def sharded_victim(parent: Parent, run: str) -> None:
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, num_shards=3)
        parent.tell("ready")
        die_at("lock held", 1)
        table.add(torch.ones(500, COLS), rows=range(500))


def test_the_claim_of_a_dead_worker_ends_when_its_add_is_finished(run):
    with Children() as children, tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, num_shards=3)
        child = children.start(sharded_victim, run)
        assert child.get() == "ready"
        wait_for_exit(child.pid)
        claimed = table._storage.here.page.num_claimed
        assert 500 / 3 < claimed() < 500  # what it may have brought to one shard
        assert table.get(range(500)).unique().tolist() == [1.5]  # it was logged, and so is made
        assert claimed() == 0
        table.add(torch.ones(500, COLS), rows=range(500))
        assert table.get(range(500)).unique().tolist() == [2.5]
        assert claimed() == 0


def restoring_victim(parent: Parent, run: str, folder: str, point: str) -> None:
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, "adam")
        add(table, OLD)
        table.snapshot(folder)
        add(table, MANY)
        parent.tell(everything(table))
        parent.hear()  # until the other one has come
        die_at(point, 1)
        table.restore(folder)


@pytest.mark.parametrize("point", key_tables.POINTS)
def test_a_restore_that_a_death_interrupts_is_whole_or_not_at_all(run, tmp_path, point):
    with Children() as children:
        child = children.start(restoring_victim, run, str(tmp_path), point)
        before = child.get()
        with tables.join(run, timeout_s=DEADLINE_S) as world:
            table = open_table(world, "adam")
            child.put()
            wait_for_exit(child.pid)
            for part, want in zip(everything(table), before, strict=True):
                assert torch.equal(part, want)
            add(table, MANY)
            assert set(MANY) <= set(table.keys().tolist())
            table.restore(tmp_path)  # which it does now as the master
            for part, want in zip(everything(table), expected("adam", OLD), strict=True):
                assert torch.equal(part, want)


# --- growing, while others read and write ---------------------------------------------------------

NUM_KEYS = 1500


def pair_adder(parent: Parent, run: str, worker: int, num_shards: int) -> None:
    """Add to k and −k at once, so that whoever reads both sees the same row twice."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(worker)
    with tables.join(run, num_workers=3, timeout_s=DEADLINE_S) as world:
        table = world.keys(2, torch.int64, name="t", capacity=1, num_shards=num_shards)
        world.barrier("begin")
        keys = 1 + torch.randperm(NUM_KEYS, generator=draw)
        halves = 0
        for some in keys.split(7):
            pairs = torch.stack([some, -some], 1).view(-1)
            delta = torch.stack([some, torch.ones_like(some)], 1).repeat_interleave(2, 0)
            table.add(delta, rows=pairs)
            asked = 1 + torch.randint(NUM_KEYS, (5,), generator=draw)
            one, other = table.get(torch.cat([asked, -asked])).chunk(2)
            halves += int(not torch.equal(one, other))
            own, _ = table.get(pairs).view(-1, 2, 2).unbind(1)
            assert (own[:, 1] >= 1).all()
        world.barrier("end")
        parent.tell((halves, len(table), table.get(table.keys())[:, 1].sum().item()))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_while_it_grows_nobody_loses_an_add_or_sees_half_of_one(run, num_shards):
    with Children() as children:
        started = [children.start(pair_adder, run, worker, num_shards) for worker in range(3)]
        for halves, num_keys, adds in [child.get() for child in started]:
            assert halves == 0 or num_shards > 1  # whole per shard
            assert num_keys == 2 * NUM_KEYS
            assert adds == 3 * 2 * NUM_KEYS
        for child in started:
            child.process.join(DEADLINE_S)

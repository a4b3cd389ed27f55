"""Readers that meet a writer: never half of an add."""

from __future__ import annotations

import threading

import pytest
import torch

from phalanx import tables
from phalanx.errors import ConfigError, PeerTimeout
from phalanx.ipc import fail_points
from phalanx.tables import shard, table

ROWS = 8


@pytest.fixture
def two():
    with tables.join(num_workers=2, timeout_s=20.0) as one, one.thread_worker() as other:
        yield one.array(ROWS, name="t"), other.array(ROWS, name="t")


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "rows"])
@pytest.mark.parametrize("num_adds", [1, 2])
def test_a_reader_that_a_writer_overtakes_reads_again(two, monkeypatch, whole, num_adds):
    """Half of the rows are copied, then the adds come, then the other half is copied."""
    reader, writer = two
    take = shard.MatrixRows.take
    overtaken = []

    def slow_take(matrix, rows, out, first_row):
        if overtaken:
            take(matrix, rows, out, first_row)
            return
        overtaken.append(True)
        half = len(rows) // 2
        out[:half] = matrix.values[rows[:half]]
        for _ in range(num_adds):
            writer.add(torch.ones(ROWS), rows=None if whole else list(range(ROWS)))
        out[half:] = matrix.values[rows[half:]]

    monkeypatch.setattr(shard.MatrixRows, "take", slow_take)
    seen = reader.get(list(range(ROWS))).tolist()
    assert seen in ([0.0] * ROWS, [float(num_adds)] * ROWS)
    assert overtaken


def test_a_reader_waits_for_an_add_that_is_half_written(two, monkeypatch):
    reader, writer = two
    monkeypatch.setattr(shard, "BLOCK_ROWS", 2)
    half, go_on = threading.Event(), threading.Event()

    def fault(point, worker):
        if point == "half the rows written" and not half.is_set():
            half.set()
            assert go_on.wait(20)

    fail_points.inject(fault)
    thread = threading.Thread(
        target=writer.add, args=(torch.ones(ROWS),), kwargs={"rows": list(range(ROWS))}
    )
    try:
        thread.start()
        assert half.wait(20)
        reader._group.timeout_s = 0.05
        for rows in (None, [0, 7]):
            with pytest.raises(
                PeerTimeout, match=r"shard 0 of table t' did not become free within"
            ):
                reader.get(rows)
        reader._group.timeout_s = 20.0
        go_on.set()
        assert reader.get().tolist() == [1.0] * ROWS
    finally:
        go_on.set()
        thread.join()
        fail_points.inject(None)


def test_an_add_that_python_interrupts_is_undone(two, monkeypatch):
    reader, writer = two
    monkeypatch.setattr(shard, "BLOCK_ROWS", 2)

    def fault(point, worker):
        if point == "half the rows written":
            raise KeyboardInterrupt

    fail_points.inject(fault)
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.add(torch.ones(ROWS), rows=list(range(ROWS)))
    finally:
        fail_points.inject(None)
    assert reader.get().tolist() == [0.0] * ROWS
    writer.add(torch.ones(ROWS))
    assert reader.get().tolist() == [1.0] * ROWS


# --- looking whether a delta is finite, block by block --------------------------------------------


@pytest.fixture
def looking_late(monkeypatch):
    monkeypatch.setattr(table, "_LARGE", 0)
    monkeypatch.setattr(shard, "BLOCK_ROWS", 2)
    monkeypatch.setattr(shard, "_BLOCK_ELEMENTS", 2)


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
        assert (made.stats().rejected, made.stats().undone, made.stats().adds) == (1, 0, 0)
        made.add(torch.ones(7))
        assert not torch.equal(made.get(), first_values(7))


def test_no_shard_has_an_add_that_another_shard_would_refuse(looking_late):
    delta = torch.ones(7)
    delta[6] = float("inf")
    for rows in (None, list(range(7))):
        with tables.join(timeout_s=20.0) as world:
            made = world.array(7, num_shards=3)
            with pytest.raises(ConfigError, match="must be finite for table"):
                made.add(delta, rows=rows)
            assert made.get().tolist() == [0.0] * 7


# --- several shards -------------------------------------------------------------------------------


@pytest.mark.parametrize("updater", ["sum", "sgd", "adam"])
@pytest.mark.parametrize("block_rows", [2, 4096])
@pytest.mark.parametrize("num_shards", [2, 3, 5])
def test_rows_are_routed_to_shards_and_back_in_the_order_asked(
    num_shards, block_rows, updater, monkeypatch
):
    """Repeated rows add up in the order given, to the bit, whoever asks."""
    monkeypatch.setattr(shard, "BLOCK_ROWS", block_rows)
    rows = [26, 0, 13, 13, 40, 13, 39, 0]
    delta = first_values(8 * 3).view(8, 3)
    with tables.join(num_workers=2, timeout_s=20.0) as one, one.thread_worker() as other:
        many = [
            world.matrix(41, 3, name="many", num_shards=num_shards, updater=updater)
            for world in (one, other)
        ]
        single = one.matrix(41, 3, name="single", updater=updater)
        for made in (*many, single, single):
            made.add(delta, rows=rows)
        for made in many:
            assert torch.equal(made.get(), single.get())
            assert torch.equal(made.get(rows), single.get()[rows])
            assert made.get([]).shape == (0, 3)


@pytest.mark.parametrize("rows", [None, [0, 20, 40]])
def test_the_shards_of_an_add_or_a_get_share_one_deadline(rows, monkeypatch):
    """Else a wait could be as many times as long as there are shards."""
    given_s: list[float] = []

    def noting(take):
        def noted(self, *args):
            given_s.append(args[-1])
            return take(self, *args)

        return noted

    for name in ("add", "read"):
        monkeypatch.setattr(shard.TableShard, name, noting(getattr(shard.TableShard, name)))
    with tables.join(timeout_s=20.0) as world:
        table = world.matrix(41, 3, num_shards=3)
        table.add(torch.ones(41 if rows is None else 3, 3), rows=rows)
        adds_s = given_s.copy()
        given_s.clear()
        table.get(rows)
    for left_s in (adds_s, given_s):
        assert len(left_s) == 3
        assert 20.0 >= left_s[0] > left_s[1] > left_s[2] > 0.0

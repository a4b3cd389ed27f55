"""Readers that meet a writer: never half of an add."""

from __future__ import annotations

import threading

import pytest
import torch

from phalanx import tables
from phalanx.errors import PeerTimeout
from phalanx.memory import faults
from phalanx.tables import shard

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
    select = torch.index_select
    overtaken = []

    def slow_select(source, dim, rows, *, out):
        if overtaken:
            return select(source, dim, rows, out=out)
        overtaken.append(True)
        half = len(rows) // 2
        out[:half] = source[rows[:half]]
        for _ in range(num_adds):
            writer.add(torch.ones(ROWS), rows=None if whole else list(range(ROWS)))
        out[half:] = source[rows[half:]]
        return out

    monkeypatch.setattr(torch, "index_select", slow_select)
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

    faults.plant(fault)
    thread = threading.Thread(
        target=writer.add, args=(torch.ones(ROWS),), kwargs={"rows": list(range(ROWS))}
    )
    try:
        thread.start()
        assert half.wait(20)
        reader._world.timeout_s = 0.05
        for rows in (None, [0, 7]):
            with pytest.raises(PeerTimeout, match=r"shard 0 of table t' must become free of"):
                reader.get(rows)
        reader._world.timeout_s = 20.0
        go_on.set()
        assert reader.get().tolist() == [1.0] * ROWS
    finally:
        go_on.set()
        thread.join()
        faults.plant(None)


def test_an_add_that_python_interrupts_is_undone(two, monkeypatch):
    reader, writer = two
    monkeypatch.setattr(shard, "BLOCK_ROWS", 2)

    def fault(point, worker):
        if point == "half the rows written":
            raise KeyboardInterrupt

    faults.plant(fault)
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.add(torch.ones(ROWS), rows=list(range(ROWS)))
    finally:
        faults.plant(None)
    assert reader.get().tolist() == [0.0] * ROWS
    writer.add(torch.ones(ROWS))
    assert reader.get().tolist() == [1.0] * ROWS

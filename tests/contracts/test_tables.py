"""One contract of parameter tables: workers are one process, its threads, processes, or hosts.

The laws of Multiverso's own tests are in test_multiverso.py, under its names.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx import tables
from phalanx.errors import PeerTimeout
from phalanx.ipc import wait_until
from tests.worlds import DEADLINE_S, in_table_worlds

pytestmark = pytest.mark.promise("tables-one-contract")


# --- the first values -----------------------------------------------------------------------------


def master_init(world: tables.TableGroup) -> list[float]:
    init = [1.0, 2.0, 3.0] if world.is_master else [9, 9, 9]
    return world.array(3, init=init, updater={"name": "sgd", "lr": 1.0}).get().tolist()


@in_table_worlds()
def test_everybody_begins_with_the_masters_values_past_the_updater(world, n, run):
    assert world.run(master_init, n, run=run) == [[1.0, 2.0, 3.0]] * n


# --- modes ----------------------------------------------------------------------------------------


def bulk_rounds(world: tables.TableGroup) -> list[list]:
    table = world.matrix(29, 3, name="bulk", init=1.0)
    generator = torch.Generator().manual_seed(world.worker_id)
    seen = []
    for i in range(10):
        table.add(torch.randn(29, 3, generator=generator))
        for _ in range(world.worker_id):
            table.add(torch.randn(2, 3, generator=generator), rows=[i % 29, 3])
        seen.append(table.get().tolist())  # exact: every float32 is a Python float
    return seen


def bulk_rounds_by_one(n: int) -> list[list]:
    """The same, added up by plain torch in the order of workers."""
    table = torch.ones(29, 3)
    generators = [torch.Generator().manual_seed(worker) for worker in range(n)]
    seen = []
    for i in range(10):
        for worker, generator in enumerate(generators):
            table += torch.randn(29, 3, generator=generator)
            for _ in range(worker):
                part = torch.randn(2, 3, generator=generator)
                table.index_add_(0, torch.tensor([i % 29, 3]), part)
        seen.append(table.tolist())
    return seen


@in_table_worlds()
def test_in_bulk_synchronous_mode_every_get_is_equal_bit_for_bit(world, n, run):
    expected = bulk_rounds_by_one(n)
    for seen in world.run(bulk_rounds, n, run=run, sync=True):
        assert seen == expected


def unequal_lengths(world: tables.TableGroup) -> float:
    table = world.array(1, name="bulk")
    for _ in range(2 * (world.worker_id + 1)):
        table.add([1.0])
        value = table.get()
    world.close()
    return value.item()


@in_table_worlds()
def test_workers_of_unequal_length_finish_in_bulk_synchronous_mode(world, n, run):
    last = world.run(unequal_lengths, n, run=run, sync=True)
    # The i-th get holds everybody's adds up to the i-th of those who still take part.
    assert last == [sum(min(2 * (w + 1), 2 * (me + 1)) for w in range(n)) for me in range(n)]


def stale_rounds(world: tables.TableGroup, bound: int) -> list[tuple[int, list[float]]]:
    """Everybody writes its clock into its own column: a get shows how far behind the others are."""
    n = world.num_workers
    table = world.array(n, name="clocks")
    seen = []
    for clock in range(1, 20):
        table.add([1.0], rows=[world.worker_id])
        world.tick()
        seen.append((clock, table.get().tolist()))
    world.close()
    return seen


@in_table_worlds(bound=[1, 3])
def test_with_bounded_staleness_nobody_reads_from_further_ahead(world, n, bound, run):
    seen = world.run(partial(stale_rounds, bound=bound), n, run=run, staleness=bound)
    for worker, gets in enumerate(seen):
        for clock, columns in gets:
            assert columns[worker] == clock
            assert min(columns) >= clock - bound


def read_alone(world: tables.TableGroup) -> float:
    """In asynchronous mode nobody waits: worker 0 goes through all rounds while others stand."""
    table = world.array(1, name="async")
    world.barrier()
    if world.worker_id == 0:
        for _ in range(50):
            table.add([1.0])
            world.tick()
            table.get()
    world.barrier()
    return table.get().item()


@in_table_worlds()
def test_in_asynchronous_mode_nobody_waits(world, n, run):
    assert world.run(read_alone, n, run=run) == [50.0] * n


def stay_away(world: tables.TableGroup, how: str) -> tuple[str, int | None] | None:
    table = world.array(2, name="t", init=1.0)
    over = world.array(1, name="over", sync=False)
    world.barrier()
    if world.worker_id == world.num_workers - 1:
        others = world.num_workers - 1
        assert wait_until(lambda: over.get().item() == others, DEADLINE_S)
        world.barrier()
        return None
    world.timeout_s, kept = 0.2, world.timeout_s
    try:
        if how == "barrier":
            world.barrier()
        else:
            for _ in range(4):
                world.tick()
                table.get()
        raised = None
    except PeerTimeout as exc:
        raised = str(exc), exc.rank
    world.timeout_s = kept
    over.add([1.0])
    world.barrier()
    return raised


@in_table_worlds(at_least=2, how=["barrier", "sync", "staleness"])
def test_who_stays_away_makes_the_others_fail_at_the_deadline_with_its_id(world, n, how, run):
    mode = {"sync": {"sync": True}, "staleness": {"staleness": 1}}.get(how, {})
    *waiting, away = world.run(partial(stay_away, how=how), n, run=run, **mode)
    assert away is None
    for message, rank in waiting:
        # with three workers, who waits may name another one that has given up before
        assert rank == n - 1 or n == 3
        assert "within 0.2 s" in message


# --- edges ----------------------------------------------------------------------------------------


def edges(world: tables.TableGroup) -> None:
    n = world.num_workers
    nothing = world.matrix(0, 4, name="nothing")
    nothing.add(torch.empty(0, 4), rows=[])
    assert nothing.get().shape == (0, 4)
    one = world.array(1, name="one")
    one.add([1.0])
    world.barrier()
    assert one.get().tolist() == [float(n)]
    few = world.matrix(2, 3, name="few")
    few.add([[1, 1, 1], [2, 2, 2], [3, 3, 3]], rows=[1, 0, 1])
    few.add([], rows=[])
    world.barrier()
    assert few.get([1, 0, 1]).tolist() == [[4.0 * n] * 3, [2.0 * n] * 3, [4.0 * n] * 3]
    keyed = world.keys(2, name="keyed", init=[3.0, 4.0])
    keyed.add([], rows=[])
    keyed.add(torch.zeros(2, 2), rows=[8, 8])
    world.barrier()
    assert keyed.get([9, 8]).tolist() == [[3.0, 4.0]] * 2
    assert keyed.keys().tolist() == [8]  # an add brings a key, a get does not


@in_table_worlds()
def test_no_rows_one_element_and_fewer_rows_than_hosts(world, n, run):
    world.run(edges, n, run=run)


def every_second_row(world: tables.TableGroup) -> None:
    values = torch.arange(24, dtype=torch.float32).view(12, 2)
    table, numbers = world.matrix(12, 2, name="strided", init=values), torch.arange(12)
    world.barrier()
    for start in (0, 4, 8):  # of three hosts each has four rows
        rows = numbers[start : start + 4 : 2]
        assert torch.equal(table.get(rows), values[rows])
    world.barrier()
    for start in (0, 4, 8):
        table.add(torch.ones(2, 2), rows=numbers[start : start + 4 : 2])
    values[::2] += world.num_workers
    world.barrier()
    assert torch.equal(table.get(), values)


@in_table_worlds()
def test_rows_of_one_part_may_be_a_strided_tensor(world, n, run):
    world.run(every_second_row, n, run=run)


def add_to_a_round_by_threads(world: tables.TableGroup) -> list:
    table = world.array(9, torch.int64, name="t", sync=True)
    together = threading.Barrier(3)

    def add() -> None:
        together.wait(DEADLINE_S)
        for _ in range(40):
            table.add(torch.ones(9, dtype=torch.int64))

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return table.get().tolist()


@in_table_worlds()
def test_each_add_of_a_workers_threads_to_a_round_counts(world, n, run):
    assert world.run(add_to_a_round_by_threads, n, run=run) == [[120 * n] * 9] * n


def add_to_rounds_beside_gets(world: tables.TableGroup) -> list:
    table = world.array(9, torch.int64, name="t", sync=True)

    def add() -> None:
        for _ in range(100):
            table.add(torch.ones(9, dtype=torch.int64))

    thread = threading.Thread(target=add)
    thread.start()
    for _ in range(20):
        table.get()  # ends a round while the thread adds
    thread.join(DEADLINE_S)
    return table.get().tolist()


@in_table_worlds()
def test_an_add_beside_the_get_that_ends_its_round_counts(world, n, run):
    assert world.run(add_to_rounds_beside_gets, n, run=run) == [[100 * n] * 9] * n


MODES = {"default device": lambda: torch.device("meta"), "inference": torch.inference_mode}


def serve_in_mode(world: tables.TableGroup, mode: str, folder: Path) -> list:
    size = 3 * world.num_workers
    rows = list(range(size))[::-1]
    with MODES[mode]():
        matrix = world.matrix(size, 2, name="m", init=0.5)
        bulk = world.matrix(size, 2, name="b", sync=True)
        keys = world.keys(2, name="k")  # of few keys: some hosts have none
        for table in (matrix, bulk):
            for _ in range(2):
                table.add([[float(row)] * 2 for row in rows], rows=rows)
        keys.add([[1.0, 1.0]], rows=[7])
        world.barrier()
        found = [matrix.get(rows), matrix.get(), bulk.get(rows), keys.get([7, 8]), matrix.get([])]
        assert keys.keys().tolist() == [7]
        world.barrier()
        if world.is_master:
            keys.snapshot(folder)
            matrix.snapshot(folder)
        world.barrier()
        shared = tables.SharedModule(torch.nn.Linear(2, 3, device="cpu"), world)
        shared.sync()
        embedding = tables.TableEmbedding(world.matrix(2, 2, name="e", updater="sgd"))
    embedding(torch.tensor([1], device="cpu")).sum().backward()
    shared.sync()
    return [each[:, 0].tolist() for each in found]


@in_table_worlds(mode=list(MODES))
def test_tables_modules_and_embeddings_serve_in_every_mode_of_torchs(world, n, mode, run, tmp_path):
    twice = [2.0 * n * row for row in range(3 * n)]
    matrix = [0.5 + each for each in twice]
    found = [matrix[::-1], matrix, twice[::-1], [float(n), 0.0], []]
    body = partial(serve_in_mode, mode=mode, folder=tmp_path)
    assert world.run(body, n, run=run) == [found] * n


# --- rows found by key ----------------------------------------------------------------------------


def keys_law(world: tables.TableGroup) -> None:
    """The law of matrices, with keys that come in the second half too; the table grows."""
    n = world.num_workers  # before anybody leaves
    rows, cols, some = 11, 10, [0, 1, 5, 10]
    keys = torch.arange(rows) * 10**17 - 4 * 10**17
    table = world.keys(cols, name="law", init=0.5)
    delta = torch.arange(1, rows * cols + 1, dtype=torch.float32).view(rows, cols)
    expected = torch.full((rows, cols), 0.5)
    for i in range(20):
        table.add(delta, rows=keys + i // 10)
        table.add(delta[some], rows=keys[some])
        world.barrier()
        if i < 10:
            expected += delta * n
        expected[some] += delta[some] * n
        assert torch.equal(table.get(keys), expected)
        assert torch.equal(table.get(keys[some]), expected[some])
        assert len(table) == (rows if i < 10 else 2 * rows)
        world.barrier()
    added = 0.5 + delta * 10 * n
    assert torch.equal(table.get(keys + 1), added)
    assert torch.equal(table.keys(), torch.cat([keys, keys + 1]).sort().values)


@in_table_worlds()
def test_after_each_barrier_a_keys_table_holds_everybodys_rows(world, n, run):
    world.run(keys_law, n, run=run)


def drawn_rows(world: tables.TableGroup) -> tuple[list, list]:
    n = world.num_workers
    table = world.keys(3, name="first", init=tables.Uniform(0.0, 1.0, seed=5))
    before = table.get([-7, 10**18])
    world.barrier()
    table.add([[1, 1, 1]] * 2, rows=[-7, 10**18])
    world.barrier()
    return before.tolist(), (table.get([-7, 10**18]) - n).tolist()


@in_table_worlds()
def test_a_rule_makes_the_same_first_rows_for_everybody(world, n, run):
    expected = tables.Uniform(0.0, 1.0, seed=5).draw(np.array([-7, 10**18]), 3).float()
    for before, after in world.run(drawn_rows, n, run=run):
        assert before == expected.tolist()
        assert torch.allclose(torch.tensor(after), expected, atol=1e-6)  # 1 was added n times


def bulk_keys(world: tables.TableGroup) -> list[tuple[list, list]]:
    table = world.keys(3, name="bulk", init=1.0)
    generator = torch.Generator().manual_seed(world.worker_id)
    seen = []
    for i in range(12):
        keys = torch.randperm(60, generator=generator)[:7] - 30
        table.add(torch.randn(7, 3, generator=generator), rows=keys)
        for _ in range(world.worker_id):
            table.add(torch.randn(2, 3, generator=generator), rows=[i - 70, 3])
        values = table.get(torch.arange(-80, 80))
        world.barrier()  # else the next round may bring keys before they are counted
        seen.append((values.tolist(), table.keys().tolist()))
        world.barrier()
    return seen


def bulk_keys_by_one(n: int) -> list[tuple[list, list]]:
    """The same, added up by plain torch in the order of workers."""
    rows = torch.ones(400, 3)  # of keys -300 to 99
    there: set[int] = set()
    generators = [torch.Generator().manual_seed(worker) for worker in range(n)]
    seen = []
    for i in range(12):
        for worker, generator in enumerate(generators):
            keys = torch.randperm(60, generator=generator)[:7] - 30
            rows.index_add_(0, keys + 300, torch.randn(7, 3, generator=generator))
            there.update(keys.tolist())
            for _ in range(worker):
                delta = torch.randn(2, 3, generator=generator)
                rows.index_add_(0, torch.tensor([i - 70, 3]) + 300, delta)
                there.update([i - 70, 3])
        seen.append((rows[220:380].tolist(), sorted(there)))
    return seen


@in_table_worlds()
def test_in_bulk_synchronous_mode_keys_come_with_their_round(world, n, run):
    expected = bulk_keys_by_one(n)
    for seen in world.run(bulk_keys, n, run=run, sync=True):
        assert seen == expected

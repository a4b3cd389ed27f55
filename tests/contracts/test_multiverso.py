"""Multiverso's own laws under its own names, its bugs, and the page for those who come from it.

Workers are this process, or processes that torchrun's variables have told who they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from phalanx import tables
from phalanx.compat import multiverso
from phalanx.compat.multiverso import (
    ArrayTableHandler,
    MatrixTableHandler,
    barrier,
    init,
    is_master_worker,
    num_workers,
    shutdown,
    worker_id,
)
from phalanx.errors import ConfigError, PeerTimeout, StateError
from tests.multiprocess.children import Parent
from tests.multiprocess.hosts import become_worker, run_hosts

pytestmark = pytest.mark.promise("multiverso")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating_multiverso.md").read_text(encoding="utf-8")


@pytest.fixture
def alone() -> Iterator[None]:
    init()
    yield
    shutdown()


def in_this_process(run: str, n: int, body: Callable[[], Any], sync: bool = False) -> list[Any]:
    init(sync)
    try:
        return [body()]
    finally:
        shutdown()


def _worker(parent: Parent, given: dict[str, str], body: Callable, how: dict[str, Any]) -> None:
    become_worker(given)
    init(how["sync"])
    parent.tell((worker_id(), body()))
    shutdown()


def on_hosts(num_hosts: int, run: str, n: int, body: Callable, sync: bool = False) -> list[Any]:
    return run_hosts(num_hosts, run, n, body, worker=_worker, sync=sync)


in_every_configuration = pytest.mark.parametrize(
    ("workers", "n"),
    [
        pytest.param(in_this_process, 1, id="this process"),
        pytest.param(partial(on_hosts, 1), 3, id="3 processes"),
        pytest.param(partial(on_hosts, 3), 3, id="3 hosts", marks=pytest.mark.night),
    ],
)


# --- the bindings' own tests ----------------------------------------------------------------------


def array_law() -> None:
    """After each barrier: (j + 1) · (i + 1) · 2 · workers."""
    size = 10_000
    table = ArrayTableHandler(size)
    barrier()
    delta = np.arange(1, size + 1, dtype=np.float32)
    for i in range(100):
        table.add(delta)
        table.add(delta, sync=True)
        barrier()
        value = table.get()
        assert value.dtype == torch.float32
        assert np.array_equal(value, delta * (i + 1) * 2 * num_workers())
        barrier()


@in_every_configuration
def test_the_array_law(workers, n, run):
    workers(run, n, array_law)


def matrix_law() -> None:
    rows, cols, some = 11, 10, [0, 1, 5, 10]
    table = MatrixTableHandler(rows, cols)
    barrier()
    delta = np.arange(1, rows * cols + 1, dtype=np.float32).reshape(rows, cols)
    expected = np.zeros((rows, cols), np.float32)
    for _ in range(20):
        table.add(delta)
        table.add(delta[some], some)
        expected += delta * num_workers()
        expected[some] += delta[some] * num_workers()
        barrier()
        assert np.array_equal(table.get(), expected)
        assert np.array_equal(table.get(some), expected[some])
        barrier()


@in_every_configuration
def test_the_matrix_law(workers, n, run):
    workers(run, n, matrix_law)


def masters_values() -> tuple[list[float], list[float]]:
    mine = float(worker_id() + 1)
    array = ArrayTableHandler(3, init_value=[mine, mine, mine])
    matrix = MatrixTableHandler(2, 2, init_value=np.full((2, 2), mine))
    barrier()
    return array.get().tolist(), matrix.get().reshape(-1).tolist()


@in_every_configuration
@pytest.mark.parametrize("sync", [False, True])
def test_the_masters_initial_value_counts_and_no_other(workers, n, sync, run):
    assert workers(run, n, masters_values, sync) == [([1.0] * 3, [1.0] * 4)] * n


def synchronous_gets() -> list[list[float]]:
    table = ArrayTableHandler(2)
    seen = []
    for i in range(10 * (worker_id() + 1)):
        table.add([worker_id() + 0.1, i])
        seen.append(table.get().tolist())
    return seen


@in_every_configuration
def test_in_sync_mode_the_ith_get_is_the_same_for_all_and_lengths_may_differ(workers, n, run):
    found = workers(run, n, synchronous_gets, True)
    for seen, longer in pairwise(found):
        assert seen == longer[: len(seen)]
    assert [len(seen) for seen in found] == [10 * (worker + 1) for worker in range(n)]


def who_i_am() -> tuple[int, int, bool]:
    me = worker_id(), num_workers(), is_master_worker()
    barrier()
    return me


@in_every_configuration
def test_workers_of_one_run_have_numbers_of_their_own(workers, n, run):
    assert workers(run, n, who_i_am) == [(w, n, w == 0) for w in range(n)]


# --- arguments ------------------------------------------------------------------------------------


def test_data_may_be_of_any_kind_and_shape_of_the_right_size(alone):
    array, matrix = ArrayTableHandler(4), MatrixTableHandler(2, 2)
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    for data in ([1, 1, 1, 1], np.ones((2, 2), np.int64), parameter, torch.ones(4).bfloat16()):
        array.add(data)
        matrix.add(data)
    matrix.add([5, 5], row_ids=np.array([1]))
    matrix.add([5, 5], row_ids=torch.tensor([1]))
    assert array.get().tolist() == [4.0] * 4
    assert matrix.get().tolist() == [[4.0, 4.0], [14.0, 14.0]]
    one = ArrayTableHandler(1, init_value=3)
    one.add(4.5)
    assert one.get().tolist() == [7.5]


def test_what_get_returns_and_add_takes_is_the_callers_own(alone):
    table = ArrayTableHandler(2, init_value=(value := np.ones(2, np.float32)))
    value[:] = 7
    delta = np.ones(2, np.float32)
    table.add(delta)
    delta[:] = 9
    table.get()[:] = 8
    assert table.get().tolist() == [2.0, 2.0]


def test_the_order_of_calls_is_said():
    for call in (barrier, num_workers, worker_id, is_master_worker):
        with pytest.raises(StateError, match="`init` must be called first"):
            call()
    with pytest.raises(StateError, match="`init` must be called first"):
        ArrayTableHandler(3)
    shutdown()
    init()
    with pytest.raises(StateError, match="`init` must be called once"):
        init()
    shutdown()
    init()
    assert ArrayTableHandler(1).get().tolist() == [0.0]
    shutdown()


def test_the_names_are_those_of_the_bindings():
    torch_names = {"init", "barrier", "shutdown", "num_workers", "worker_id", "TableHandler"}
    python_names = {"is_master_worker", "ArrayTableHandler", "MatrixTableHandler"}
    assert set(multiverso.__all__) == torch_names | python_names


def test_calls_wait_for_as_long_as_init_was_told(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    init(timeout_s=0.2)
    with pytest.raises(PeerTimeout, match=r"within 0\.2 s") as caught:
        barrier()
    assert caught.value.rank == 0
    with pytest.warns(UserWarning, match=r"Worker 0 .* did not come within 0\.2 s"):
        shutdown()


# --- bugs of the original -------------------------------------------------------------------------


def test_other_sizes_are_refused(alone):
    array, matrix = ArrayTableHandler(3), MatrixTableHandler(3, 2)
    for call, message in (
        (lambda: array.add([1, 2]), r"`data` must hold 3 numbers, for shape \(3,\), but holds 2"),
        (lambda: array.add(np.ones(4)), "`data` must hold 3 numbers"),
        (lambda: array.add("a"), "`data` must hold numbers, but does not"),
        (lambda: array.add([[1, 2], [3]]), "`data` must hold numbers, but does not"),
        (lambda: matrix.add(np.ones(5)), r"`data` must hold 6 numbers, for shape \(3, 2\)"),
        (lambda: matrix.add(np.ones(6), [0]), r"`data` must hold 2 numbers, for shape \(1, 2\)"),
        (lambda: ArrayTableHandler(3, [1, 2]), "`init_value` must hold 3 numbers"),
        (lambda: ArrayTableHandler(-1), "`size` must be an integer from 0 on, but is -1"),
        (lambda: MatrixTableHandler(2, 0), "`cols` must be an integer from 1 on, but is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    assert array.get().tolist() == [0.0] * 3
    assert matrix.get().tolist() == [[0.0, 0.0]] * 3


def test_rows_outside_the_table_are_refused(alone):
    table = MatrixTableHandler(3, 2)
    for rows in ([3], [-1], [0, 9000]):
        with pytest.raises(ConfigError, match=r"Row -?\d+ is outside table"):
            table.add(np.ones((len(rows), 2)), rows)
        with pytest.raises(ConfigError, match=r"Row -?\d+ is outside table"):
            table.get(rows)
    for rows in (5, "a", [0.5]):
        with pytest.raises((ConfigError, TypeError)):
            table.get(rows)
    assert not table.get().any()


def rounds_apart() -> list[float]:
    first, second = ArrayTableHandler(1), ArrayTableHandler(1)
    seen = []
    for turn in range(4):
        first.add([1.0])
        if turn == worker_id():
            for _ in range(turn):  # adds without gets; to one of the two only
                second.add([1.0])
        seen.append(first.get().item())
    seen.append(second.get().item())
    return seen


@in_every_configuration
def test_synchronous_tables_count_their_rounds_apart(workers, n, run):
    wanted = [float(n * turn) for turn in (1, 2, 3, 4)] + [float(sum(range(n)))]
    assert workers(run, n, rounds_apart, True) == [wanted] * n


def test_adds_leave_nothing_behind(alone):
    table = ArrayTableHandler(4)
    table.add([1, 1, 1, 1])
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        table.add([1, 1, 1, 1], sync=False)
    assert len(os.listdir("/proc/self/fd")) == files


def test_tables_have_dtypes_and_updaters_of_their_own():
    with tables.join() as world:
        counts = world.array(2, "int64")
        weights = world.array(2, "float64", updater={"name": "sgd", "lr": 1.0})
        counts.add([2**60, 1])
        weights.add([1e-12, 1.0])
        assert counts.get().tolist() == [2**60, 1]
        assert weights.get().tolist() == [-1e-12, -1.0]


# --- docs/migrating_multiverso.md -----------------------------------------------------------------


def test_the_examples_of_the_page_say_what_they_promise(capsys):
    place: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, place)
    promised = re.findall(r"print\(.*\)  # (.*)", PAGE)
    assert capsys.readouterr().out.splitlines() == promised == ["[1.0, 2.0, 3.0]", "2.0"]


def test_the_names_of_the_page_exist():
    rows = re.findall(r"^\| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE)[1:]
    old = set(re.findall(r"`(\w+)\(", "".join(row[2] for row in rows)))
    assert old - {"add", "get"} == set(multiverso.__all__)
    for name in ("add", "get"):
        assert hasattr(ArrayTableHandler, name)
        assert hasattr(MatrixTableHandler, name)
    plain = set(re.findall(r"`tables\.(\w+)", "".join(row[1] for row in rows)))
    assert plain == {"join", "SharedModule"}
    assert plain <= set(tables.__all__)
    of_world = set(re.findall(r"`world\.(\w+)", "".join(row[1] for row in rows)))
    with tables.join() as world:
        assert all(hasattr(world, name) for name in of_world)

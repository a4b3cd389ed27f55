"""Tensors and numbers of odd kinds: refused in our sentence, and with every bit as it was."""

from __future__ import annotations

import itertools
import os
import resource
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from phalanx import tables
from phalanx.errors import ConfigError, OutOfSpace
from phalanx.tables.joining import read_join_request

NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
LAZY = torch.nn.parameter.UninitializedParameter()


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(1, dtype=torch.int64, device="meta"), NESTED, LAZY],
    ids=["meta", "ne", "la"],
)
def test_rows_without_numbers_of_their_own_are_refused(rows):
    with tables.join() as world:
        for table in (world.matrix(2, 3), world.keys(3)):
            with pytest.raises(ConfigError, match="`rows` must be a tensor of plain numbers"):
                table.add(torch.ones(1, 3), rows=rows)
            with pytest.raises(ConfigError, match="`rows` must be a tensor of plain numbers"):
                table.get(rows)
            assert table.get([0, 1]).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("delta", [torch.ones(2, 3, device="meta"), NESTED, LAZY])
def test_deltas_without_numbers_of_their_own_are_refused(delta):
    with tables.join() as world:
        table = world.matrix(2, 3)
        for call in (table.add, table.assign, lambda init: world.matrix(2, 3, init=init)):
            with pytest.raises(ConfigError, match="must be a tensor of plain numbers"):
                call(delta)
        with pytest.raises(ConfigError, match="`out` must be"):
            table.get(out=delta)
        assert table.get().tolist() == [[0.0] * 3] * 2


def a_wrapper(numbers: torch.Tensor) -> torch.Tensor:
    """Return a tensor that stands for two others, as a DTensor stands for one."""
    return TwoTensor(numbers, numbers)


def a_fake(numbers: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(numbers.shape, dtype=numbers.dtype)


def a_tensor_whose_storage_was_let_go(numbers: torch.Tensor) -> torch.Tensor:
    gone = numbers.clone()
    gone.untyped_storage().resize_(0)  # as FSDP does with what it has not gathered
    return gone


def a_zero_tensor(numbers: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(numbers.shape, dtype=numbers.dtype)


@pytest.mark.parametrize(
    "empty", [a_wrapper, a_fake, a_tensor_whose_storage_was_let_go, a_zero_tensor]
)
@pytest.mark.parametrize("num_shards", [1, 2])
def test_tensors_without_memory_are_refused_before_anybody_reads_there(empty, num_shards):
    rows, delta = torch.tensor([1, 6]), torch.ones(2, 3)
    with tables.join() as world:
        matrix, keys = world.matrix(8, 3, num_shards=num_shards), world.keys(3)
        for table in (matrix, keys):
            for call in (
                partial(table.add, empty(delta), rows),
                partial(table.add, delta, empty(rows)),
                partial(table.get, empty(rows)),
                partial(table.get, rows, out=empty(delta)),
            ):
                with pytest.raises(ConfigError, match=r"must be a tensor of .*without data\. Give"):
                    call()
        for call in (matrix.add, matrix.assign, lambda out: matrix.get(out=out)):
            with pytest.raises(ConfigError, match=r"must be a tensor of .*without data\. Give"):
                call(empty(torch.ones(8, 3)))
        assert not matrix.get().any()
        assert len(keys) == 0


def test_what_torch_func_follows_is_refused():
    with tables.join() as world:
        table = world.matrix(2, 3)

        def push(delta: torch.Tensor) -> torch.Tensor:
            table.add(delta)
            return delta.sum()

        for call in (torch.vmap(push), torch.func.grad(lambda deltas: push(deltas[0]))):
            with pytest.raises(ConfigError, match="`delta` must be a tensor of plain numbers"):
                call(torch.ones(4, 2, 3))
        assert not table.get().any()


def test_a_get_where_torch_makes_fake_tensors_is_refused():
    with tables.join() as world:
        table, rows = world.matrix(2, 3, init=1.0), torch.tensor([1])
        with FakeTensorMode(), pytest.raises(ConfigError, match="`get` must be called where"):
            table.get(rows)
        assert table.get([1]).tolist() == [[1.0] * 3]


@pytest.mark.parametrize("num_shards", [1, 2])
def test_negative_views_are_taken_as_what_they_show(num_shards):
    delta = torch.full((1, 1), 2j).conj().imag
    assert delta.is_neg()
    assert delta.is_contiguous()
    with tables.join() as world:
        table = world.matrix(3, 1, num_shards=num_shards)
        table.add(delta, rows=[2])
        table.add(torch.ones(1, 1), rows=torch._neg_view(torch.tensor([-1])))
        assert table.get().tolist() == [[0.0], [1.0], [-2.0]]
        with pytest.raises(ConfigError, match="`out` must be a contiguous tensor"):
            table.get([2], out=torch._neg_view(torch.zeros(1, 1)))


def test_sparse_rows_are_taken_as_what_they_stand_for():
    with tables.join() as world:
        table = world.array(3)
        table.add([1.0, 2.0], rows=torch.tensor([0, 2]).to_sparse())
        assert table.get().tolist() == [1.0, 0.0, 2.0]


def test_an_out_of_inference_mode_is_refused_before_it_is_written():
    with torch.inference_mode():
        out = torch.zeros(2)
    with tables.join() as world:
        table = world.array(2, init=1.0)
        with pytest.raises(ConfigError, match="`out` must be"):
            table.get(out=out)
        assert out.tolist() == [0.0, 0.0]
        with torch.inference_mode():
            assert table.get(out=out).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "init"),
    [("float32", 1e300), ("float32", 10**400), ("int32", 1 << 40), ("int64", 1 << 70)],
)
def test_an_init_that_the_dtype_does_not_hold_leaves_the_name_free(dtype, init):
    with tables.join() as world:
        for make in (
            lambda: world.matrix(3, 2, dtype, init=init),
            lambda: world.keys(2, init=1e300),
        ):
            with pytest.raises(ConfigError, match="`init` must be a number that torch"):
                make()
        assert world.array(2, init=1.0).get().tolist() == [1.0, 1.0]


def test_more_workers_than_have_a_backup_are_refused():
    with tables.join(num_workers=1) as world, world.thread_worker() as other:
        world.array(2, name="x", updater="dc_asgd")
        with pytest.raises(ConfigError, match=r"at most the `num_workers` .* this is worker 1"):
            other.array(2, name="x", updater="dc_asgd")


@pytest.mark.parametrize("num_workers", ["2", 1.0, [1], True])
def test_a_number_of_workers_that_is_no_integer_is_refused(num_workers):
    with pytest.raises(ConfigError, match="`num_workers` must be 1 to"):
        tables.join(num_workers=num_workers)


def test_names_of_another_kind_are_refused():
    with tables.join() as world:
        with pytest.raises(ConfigError, match="`updater` must be one of"):
            world.array(2, updater={"name": ["sgd"]})
        for name in (3, None, b"a"):
            with pytest.raises(ConfigError, match="`name` must be a string"):
                world.barrier(name)
    with pytest.raises(ConfigError, match="`LOCAL_WORLD_SIZE` must be a number"):
        read_join_request(None, None, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "x"})


@pytest.mark.parametrize("left", range(4))
def test_a_run_for_which_no_descriptors_are_left_is_told_and_can_be_joined_later(left: int) -> None:
    name = f"few-{os.getpid()}-{left}"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir("/proc/self/fd")}
    unused = (fd for fd in itertools.count() if fd not in used)
    most = next(itertools.islice(unused, left, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with pytest.raises(OutOfSpace, match=r"file descriptors are left for .*`ulimit -n`"):
            tables.join(name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with tables.join(name) as world:
        assert world.num_workers == 1

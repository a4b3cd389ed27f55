"""What a table refuses: in our sentence, and with every bit as it was."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from phalanx import tables
from phalanx.errors import CheckpointError, ConfigError, OutOfSpace, StateError
from phalanx.tables.host_operations import part_of
from phalanx.tables.spec import TableSpec

pytestmark = pytest.mark.promise("refused-calls-change-nothing")

NAN = float("nan")
DELTA = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("delta", "rows", "message"),
    [
        (DELTA, [0, 5], "Row 5 is outside table 'embed', which has 5 rows, counted from 0. Make"),
        (DELTA, [-1, 0], "Row -1 is outside table 'embed'"),
        (DELTA, torch.tensor([9000] + 40 * [1]), "Row 9000 is outside table 'embed'"),
        (DELTA, [0.0, 1.0], "`rows` must hold integers, but holds torch.float32"),
        (DELTA, [True, False], "`rows` must hold integers, but holds torch.bool"),
        (DELTA, "ab", "`rows` must be a list of integers, but is 'ab'"),
        (DELTA, 3, "`rows` must be a list of integers, but is 3"),
        (DELTA, ["a"], "`rows` must be a list of integers"),
        (DELTA, [[0, 1]], r"`rows` must be a list of row numbers, but has shape \(1, 2\)"),
        (DELTA, [0, 1, 2], r"`delta` must have shape \(3, 3\) for table 'embed', but has \(2, 3\)"),
        (torch.ones(2, 2), [0, 1], r"`delta` must have shape \(2, 3\)"),
        (DELTA, None, r"`delta` must have shape \(5, 3\)"),
        (DELTA.double(), [0, 1], "`delta` must be of torch.float32 like table 'embed', but is of"),
        (np.ones((2, 3)), [0, 1], "`delta` must be of torch.float32"),
        ([[1, 2], [3]], [0, 1], "`delta` must hold numbers in rows of equal length"),
        ([["a"]], [0], "`delta` must hold numbers"),
        (7, [0, 1], "`delta` must be a tensor, an array or a sequence of numbers, but is 7"),
        (torch.tensor([[1, 2, NAN]]), [0], "`delta` must be finite for table 'embed'"),
        (torch.tensor([[1, 2, float("-inf")]]), [0], "`delta` must be finite"),
    ],
)
def test_an_add_that_cannot_be_is_refused_and_changes_nothing(delta, rows, message):
    with tables.join() as world:
        table = world.matrix(5, 3, name="embed", init=torch.randn(5, 3), updater="adam")
        before = table._storage.copy_all(1.0)
        with pytest.raises(ConfigError, match=message):
            table.add(delta, rows=rows)
        for part, was in zip(table._storage.copy_all(1.0), before, strict=True):
            assert torch.equal(part, was)
        assert table.stats().adds == 0


@pytest.mark.parametrize(
    ("rows", "out", "message"),
    [
        ([5], None, "Row 5 is outside"),
        (None, torch.empty(4, 3), "`out` must be a tensor of torch.float32"),
        ([1], torch.empty(1, 3, dtype=torch.float64), "`out` must be a tensor of torch.float32"),
        ([1, 2], torch.empty(3, 2).t(), "`out` must be a contiguous tensor on the CPU"),
        ([1], [0], "`out` must be a tensor"),
    ],
)
def test_a_get_that_cannot_be_is_refused(rows, out, message):
    with tables.join() as world:
        table = world.matrix(5, 3, name="embed")
        with pytest.raises(ConfigError, match=message):
            table.get(rows, out=out)


def test_a_refused_get_does_not_end_the_round():
    with tables.join(sync=True) as world:
        table = world.array(2)
        with pytest.raises(ConfigError):
            table.get([7])
        table.add([1, 1])
        assert table.get().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rows": -1}, "`rows` must be an integer from 0 on, but is -1"),
        ({"rows": 2.0}, "`rows` must be an integer from 0 on, but is 2.0"),
        ({"cols": 0}, "`cols` must be an integer from 1 on, but is 0"),
        ({"dtype": torch.float16}, "`dtype` must be one of float32, float64, bfloat16, int32"),
        ({"dtype": "float"}, "`dtype` must be one of"),
        ({"num_shards": 0}, "`num_shards` must be an integer from 1 on"),
        ({"num_shards": 1000}, "`num_shards` must be at most 256"),
        ({"nonfinite": "ignore"}, "`nonfinite` must be 'reject', 'skip' or 'allow', but is 'ign"),
        ({"name": "a/b"}, "`name` must be 1 to 100 letters"),
        ({"init": [1.0]}, r"`init` must have shape \(2, 3\)"),
        ({"init": NAN}, "`init` must be finite"),
        ({"init": 0.5, "dtype": torch.int32}, "`init` must be an integer for torch.int32"),
        ({"staleness": -1}, "`staleness` must be a number of rounds from 0 on"),
        ({"staleness": 2, "sync": True}, "`staleness` must be absent where `sync` is True"),
        ({"sync": "yes"}, "`sync` must be True or False"),
        ({"updater": {"name": "sgd", "lr": 1e39}}, r"`lr` .* at most 3.403e\+38 .*, but is 1e\+39"),
        ({"updater": {"name": "adam", "lr": 10**400}}, "`lr` .* at most 3.403e"),
    ],
)
def test_a_table_that_cannot_be_is_refused(kwargs, message):
    with tables.join() as world, pytest.raises(ConfigError, match=message):
        world.matrix(**{"rows": 2, "cols": 3, **kwargs})


def test_a_rate_that_the_dtype_holds_is_taken():
    with tables.join() as world:
        table = world.matrix(2, 1, torch.float64, updater={"name": "sgd", "lr": 1e39})
        table.add([[1.0]], rows=[1])
        assert table.get().tolist() == [[0.0], [-1e39]]


@pytest.mark.parametrize("kind", ["matrix", "keys"])
def test_who_has_left_adds_nothing_and_may_read_on(kind):
    with tables.join(num_workers=2) as world, world.thread_worker() as gone:
        ours, its = (
            w.matrix(3, 2, name="x") if kind == "matrix" else w.keys(2, name="x")
            for w in (world, gone)
        )
        its.add([[1.0, 2.0]], rows=[1])
        gone.leave()
        with pytest.raises(
            StateError, match=r"An add to table 'x' .* worker 1 has left. Add before `leave\(\)`"
        ):
            its.add([[1.0, 2.0]], rows=[1])
        assert ours.get([1]).tolist() == its.get([1]).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"timeout_s": -1}, "`timeout_s` must be seconds from 0"),
        ({"timeout_s": NAN}, "`timeout_s` must be seconds from 0"),
        ({"num_workers": 0}, "`num_workers` must be 1 to 256, but is 0"),
        ({"num_workers": 257}, "`num_workers` must be 1 to 256, but is 257"),
        ({"run": "a b"}, "`run` must be 1 to 100 letters"),
        ({"sync": True, "staleness": 3}, "`staleness` must be absent"),
    ],
)
def test_a_world_that_cannot_be_is_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        tables.join(**kwargs)


def test_a_run_that_does_not_exist_is_not_joined_and_not_made():
    with pytest.raises(StateError, match="Run 'nobody-here' must have been begun by another"):
        tables.join("nobody-here", create=False)
    with tables.join("nobody-here") as world:
        assert world.worker_id == 0


def test_two_workers_cannot_open_one_name_as_two_kinds_of_table():
    with tables.join(num_workers=2) as one, one.thread_worker() as two:
        table = one.matrix(2, 3, name="t", init=1.0)
        for other, message in [
            (lambda: two.matrix(2, 4, name="t"), r"`shape` of table 't' .* \(\[2, 3\]\), but is"),
            (lambda: two.matrix(2, 3, torch.int32, name="t"), "`dtype` of table 't'"),
            (lambda: two.matrix(2, 3, name="t", updater="sgd"), "`updater` of table 't'"),
            (lambda: two.matrix(2, 3, name="t", sync=True), "`staleness` of table 't'"),
        ]:
            with pytest.raises(ConfigError, match=message):
                other()
        assert torch.equal(table.get(), torch.ones(2, 3))


def test_a_table_that_does_not_fit_is_refused_and_its_name_stays_free():
    with tables.join("too-large") as world:
        with pytest.raises(OutOfSpace):
            world.matrix(1 << 40, 64, name="t")
        assert world.matrix(2, 2, name="t").get().sum() == 0


@pytest.mark.parametrize(
    ("make", "refused", "told"),
    [
        (lambda world: world.matrix(2**40, 2**40), ConfigError, "has shape"),
        (lambda world: world.keys(2**40), ConfigError, f"has 1024 rows of {2**40}"),
        (lambda world: world.keys(2**36, capacity=1), OutOfSpace, "needs"),
        (lambda world: world.keys(2**36, capacity=1, init=0.5), OutOfSpace, "needs"),
    ],
)
def test_a_table_that_no_memory_holds_is_refused_before_it_is_made(make, refused, told):
    with tables.join() as world:
        with pytest.raises(refused, match=told):
            make(world)
        table = world.keys(3, init=0.5)
        assert table.get([7]).tolist() == [[0.5] * 3]


def test_nonfinite_adds_are_left_out_or_taken_as_the_table_says():
    with tables.join() as world:
        skips = world.array(2, nonfinite="skip")
        takes = world.array(2, nonfinite="allow")
        for table in (skips, takes):
            table.add([1.0, NAN])
            table.add([2.0, 2.0])
        assert skips.get().tolist() == [2.0, 2.0]
        assert skips.stats().skipped == 1
        assert takes.get()[0] == 3.0
        assert takes.get()[1].isnan()


def test_large_finite_numbers_whose_sum_is_not_are_taken():
    with tables.join() as world:
        table = world.array(2)
        table.add([3e38, 3e38])
        assert table.get().tolist() == pytest.approx([3e38, 3e38])


def test_a_closed_world_says_so():
    with tables.join() as world:
        table = world.array(2)
    for call in (world.barrier, world.tick, table.get, lambda: table.add([1, 2])):
        with pytest.raises(StateError, match="is closed"):
            call()
    world.close()
    assert repr(world) == "TableGroup(worker 0, closed)"


def test_tables_and_shared_modules_show_their_mode():
    with tables.join() as world:
        assert repr(world.matrix(4, 3, name="a")) == "Table('a', 4x3 float32, updater=Sum())"
        sync = world.matrix(4, 3, name="s", sync=True)
        assert repr(sync) == "Table('s', 4x3 float32, updater=Sum(), sync=True)"
        bounded = world.keys(3, name="k", staleness=2)
        assert repr(bounded) == "KeyTable('k', keys x 3 float32, updater=Sum(), staleness=2)"
        net = tables.SharedModule(nn.Linear(2, 2), world, name="n")
        assert repr(net) == "SharedModule(Linear, every=1, merge='mean')"
        net = tables.SharedModule(nn.Linear(2, 2), world, name="m", sync=True)
        assert repr(net) == "SharedModule(Linear, every=1, merge='mean', sync=True)"


def test_a_module_is_told_which_snapshots_it_takes(tmp_path):
    with tables.join() as world:
        tables.SharedModule(nn.Linear(2, 2), world, name="a", sync=True).snapshot(tmp_path)
    with tables.join() as world:
        other = tables.SharedModule(nn.Linear(2, 2), world, name="a")
        with pytest.raises(CheckpointError, match="`updater` of the snapshot") as caught:
            other.restore(tmp_path)
    assert "in the same mode (synchronous or not)" in caught.value.__notes__[0]


def test_only_the_master_assigns():
    with tables.join(num_workers=2) as one, one.thread_worker() as two:
        table, other = one.array(2, name="t"), two.array(2, name="t")
        table.assign([3, 4])
        with pytest.raises(StateError, match="`assign` must be called by the master, worker 0"):
            other.assign([0, 0])
        assert other.get().tolist() == [3.0, 4.0]


def test_a_snapshot_restores_values_and_state(tmp_path):
    def steps(table, k):
        for i in range(k):
            table.add(torch.full((4, 3), float(i + 1)))

    with tables.join() as world:
        kept = world.matrix(4, 3, name="t", updater="adam", init=1.0)
        steps(kept, 3)
        kept.snapshot(tmp_path)
        steps(kept, 2)
    with tables.join() as world:
        back = world.matrix(4, 3, name="t", updater="adam", num_shards=3)
        back.restore(tmp_path)
        steps(back, 2)
        with tables.join() as again:
            twin = again.matrix(4, 3, name="t", updater="adam", init=1.0)
            steps(twin, 3)
            steps(twin, 2)
            assert torch.equal(back.get(), twin.get())
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_a_snapshot_that_is_damaged_or_another_tables_is_refused(tmp_path):
    with tables.join() as world:
        table = world.matrix(4, 3, name="t", init=1.0)
        with pytest.raises(CheckpointError, match=r"'t', but '.*t\.json' is not there\. The"):
            table.restore(tmp_path)
        table.snapshot(tmp_path)
        (data,) = tmp_path.glob("*.safetensors")
        whole = data.read_bytes()
        data.write_bytes(whole[:-1] + b"\x01")
        with pytest.raises(CheckpointError, match="must be as it was written, but is damaged"):
            table.restore(tmp_path)
        data.write_bytes(whole)
    with tables.join() as world:
        other = world.matrix(3, 4, name="t", init=2.0)
        with pytest.raises(CheckpointError, match="`shape` of the snapshot"):
            other.restore(tmp_path)
        assert torch.equal(other.get(), torch.full((3, 4), 2.0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]
)
def test_every_dtype_adds_up_and_reads_into_out(dtype):
    with tables.join() as world:
        table = world.matrix(6, 2, dtype, init=torch.ones(6, 2, dtype=dtype))
        table.add(torch.full((2, 2), 3, dtype=dtype), rows=torch.tensor([5, 5], dtype=torch.int32))
        table.add([[1, 1]], rows=np.array([0]))
        out = torch.empty(3, 2, dtype=dtype)
        assert table.get([5, 0, 5], out=out) is out
        assert out.tolist() == [[7, 7], [2, 2], [7, 7]]
        assert table.get().dtype == dtype


def test_more_repeats_than_the_undo_record_holds_add_up():
    with tables.join() as world:
        table = world.matrix(3, 2, torch.int64)
        rows = torch.arange(10_000) % 3
        table.add(torch.ones(10_000, 2, dtype=torch.int64), rows=rows)
        assert table.get()[:, 0].tolist() == rows.bincount().tolist()


def test_rows_beyond_the_undo_record_are_taken_whole():
    with tables.join() as world:
        table = world.matrix(20_000, 1, updater="momentum")
        rows = torch.randperm(20_000)[:12_000]
        table.add(torch.ones(12_000, 1), rows=rows)
        expected = torch.zeros(20_000, 1).index_fill_(0, rows, -0.01)
        assert torch.equal(table.get(), expected)


def test_one_world_per_process():
    world = tables.init(timeout_s=5.0)
    try:
        with pytest.raises(StateError, match="`init` must be called once"):
            tables.init()
        assert (tables.num_workers(), tables.worker_id(), tables.barrier()) == (1, 0, 1)
        assert world.is_master
    finally:
        tables.shutdown()
    tables.shutdown()
    with pytest.raises(StateError, match="`init` must be called first"):
        tables.barrier()


@pytest.mark.parametrize("directory", [3, None, b"x", ["a"]])
def test_a_folder_that_is_no_path_is_refused(directory):
    with tables.join() as world:
        net = tables.SharedModule(torch.nn.Linear(2, 1), world)
        for table in (world.matrix(2, 2), world.keys(2), net):
            for call in (table.snapshot, table.restore):
                with pytest.raises(ConfigError, match="`directory` must be a path, but is"):
                    call(directory)


def test_who_was_announced_and_never_came_is_named_at_the_end():
    run = f"lonely-{os.getpid()}"
    with (
        pytest.warns(UserWarning, match=f"Workers 1–2 of run '{run}' did not come") as caught,
        tables.join(run, num_workers=3, timeout_s=0.05),
    ):
        pass
    assert [warning.filename for warning in caught] == [__file__]
    world = tables.join(run, num_workers=2, timeout_s=0.05)
    with pytest.warns(UserWarning, match="Worker 1 of run .* within 0.05 s") as caught:
        world.close()
    assert [warning.filename for warning in caught] == [__file__]


def test_hosts_whose_parts_begin_elsewhere_say_that_rows_differ():
    """Of 7 and of 8 rows the last of three hosts has two each."""
    with tables.join() as world:
        found = [world.matrix(rows, 2, name=f"t{rows}")._spec.as_mapping() for rows in (7, 8)]
    one, other = [part_of(TableSpec.from_mapping({**each, "name": "t"}), 2, 3) for each in found]
    with pytest.raises(
        ConfigError, match=r"`rows` of table 't' must .* row 5 there, .* row 6 here"
    ):
        other.refuse_other(one.as_mapping())

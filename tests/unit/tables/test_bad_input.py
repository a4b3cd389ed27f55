"""What a table refuses: in our sentence, and with every bit as it was."""

from __future__ import annotations

import os

import pytest
from torch import nn

from phalanx import tables
from phalanx.errors import CheckpointError, ConfigError, OutOfSpace, StateError

pytestmark = pytest.mark.promise("refused-calls-change-nothing")


def test_a_refused_get_does_not_end_the_round():
    with tables.join(sync=True) as world:
        table = world.array(2)
        with pytest.raises(ConfigError):
            table.get([7])
        table.add([1, 1])
        assert table.get().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "refused", "told"),
    [
        (lambda world: world.matrix(2**40, 2**40), ConfigError, f"has {2**40} rows of {2**40}"),
        (lambda world: world.keys(2**49), ConfigError, f"has 0 rows of {2**49}"),
        (lambda world: world.keys(2**36), OutOfSpace, "needs"),
        (lambda world: world.keys(2**36, init=0.5), OutOfSpace, "needs"),
    ],
)
def test_a_table_that_no_memory_holds_is_refused_before_it_is_made(make, refused, told):
    with tables.join() as world:
        with pytest.raises(refused, match=told):
            make(world)
        table = world.keys(3, init=0.5)
        assert table.get([7]).tolist() == [[0.5] * 3]


def test_a_module_takes_no_snapshot_that_lacks_the_outer_steps_momentum(tmp_path):
    with tables.join() as world:
        tables.SharedModule(nn.Linear(2, 2), world, name="a", sync=True).snapshot(tmp_path)
    with tables.join() as world:
        other = tables.SharedModule(nn.Linear(2, 2), world, name="a", outer="nesterov")
        with pytest.raises(CheckpointError, match="its updater must be 'nesterov'"):
            other.restore(tmp_path)


def test_only_the_master_restores(tmp_path):
    with tables.join(num_workers=2) as one, one.thread_worker() as two:
        table, other = one.array(2, name="t"), two.array(2, name="t")
        table.snapshot(tmp_path)
        table.add([3, 4])
        with pytest.raises(StateError, match="`restore` must be called by the master, worker 0"):
            other.restore(tmp_path)
        assert other.get().tolist() == [3.0, 4.0]


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

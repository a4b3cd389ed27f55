"""Workers' numbers that are given again: what the one before has said counts for it alone."""

from __future__ import annotations

import os

import pytest
import torch

from phalanx import tables
from phalanx.errors import ConfigError, StateError
from phalanx.tables.membership import MAX_WORKERS
from tests.multiprocess.children import Children, Parent


def test_only_workers_that_are_here_use_numbers_up():
    with tables.join() as world:
        others = [world.thread_worker() for _ in range(MAX_WORKERS - 1)]
        assert [other.worker_id for other in others] == list(range(1, MAX_WORKERS))
        with pytest.raises(ConfigError, match=r"must be numbered 0 to 255.* Let some leave first"):
            world.thread_worker()
        others[6].close()
        assert world.thread_worker().worker_id == 7


def test_who_has_left_does_not_speak_for_who_has_its_number():
    with tables.join() as world:
        gone = world.thread_worker()
        _, table = (each.array(1, name="x", sync=True) for each in (world, gone))
        gone.close()
        other = world.thread_worker()
        assert other.worker_id == gone.worker_id == 1
        assert not gone.is_master
        with pytest.raises(StateError, match="its group is closed"):
            table.add([1.0])
        gone.close()
        assert world.workers == [0, 1]


def test_who_goes_on_in_a_log_finds_its_end_though_it_was_there_before():
    """Worker 1 is of this process, then of another, then of this one again, in one round."""
    run = f"again-{os.getpid()}"
    with tables.join(run, timeout_s=20, sync=True) as world:
        ours = world.matrix(5, 1, name="x")
        with world.thread_worker() as one:
            one.matrix(5, 1, name="x").add([[1.0]], rows=[0])
        with Children() as children:
            assert children.start(add_two_rows, run).get() == "left"
        with world.thread_worker() as again:
            assert again.worker_id == 1
            again.matrix(5, 1, name="x").add([[8.0]], rows=[4])
        assert ours.get().view(-1).tolist() == [1.0, 2.0, 4.0, 0.0, 8.0]


def add_two_rows(parent: Parent, run: str) -> None:
    with tables.join(run, timeout_s=20, sync=True) as world:
        assert world.worker_id == 1
        world.matrix(5, 1, name="x").add(torch.tensor([[2.0], [4.0]]), rows=[1, 2])
    parent.tell("left")

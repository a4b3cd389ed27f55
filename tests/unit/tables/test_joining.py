"""Which run is meant, as a table; and torchrun's variables in real processes."""

from __future__ import annotations

import os

import pytest

from phalanx import tables
from phalanx.errors import ConfigError, UnsupportedError
from phalanx.tables.joining import Ticket, read_ticket
from tests.multiprocess.children import Children, Parent

TWO = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("run", "num_workers", "environment", "ticket"),
    [
        (None, None, {}, Ticket(None, None, None)),
        (None, 3, {}, Ticket(None, None, 3)),
        ("mine", 3, TWO, Ticket("mine", None, 3)),
        (None, None, {"RANK": "1"}, Ticket(None, None, None)),
        (None, None, {**TWO, "TORCHELASTIC_RUN_ID": "a"}, Ticket("torchrun-a-0", 1, 2)),
        (
            None,
            2,
            {**TWO, "TORCHELASTIC_RUN_ID": "a b", "TORCHELASTIC_RESTART_COUNT": "3"},
            Ticket("torchrun-a-b-3", 1, 2),
        ),
        (
            None,
            None,
            {**TWO, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"},
            Ticket("torchrun-port-29500-0", 1, 2),
        ),
    ],
)
def test_the_run_is_the_callers_or_torchruns_or_this_process(run, num_workers, environment, ticket):
    assert read_ticket(run, num_workers, environment) == ticket


@pytest.mark.parametrize(
    ("num_workers", "environment", "error", "message"),
    [
        (3, TWO, ConfigError, r"`num_workers` must be torchrun's `WORLD_SIZE` \(2\), but is 3"),
        (None, {**TWO, "RANK": "2"}, ConfigError, "`RANK` must be below `WORLD_SIZE`"),
        (None, {**TWO, "RANK": "x"}, ConfigError, "`RANK` must be a number, but is 'x'"),
        (None, {**TWO, "LOCAL_WORLD_SIZE": "1"}, UnsupportedError, "must be on one host"),
    ],
)
def test_variables_that_contradict_are_refused(num_workers, environment, error, message):
    with pytest.raises(error, match=message):
        read_ticket(None, num_workers, environment)


def started_by_torchrun(parent: Parent, rank: int, run: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", TORCHELASTIC_RUN_ID=run)
    with tables.join(timeout_s=60.0) as world:
        table = world.array(3)
        table.add([1.0], rows=[rank])
        is_master = world.is_master  # before anybody leaves
        world.barrier()
        parent.tell((world.worker_id, is_master, table.get().tolist()))


def test_the_workers_of_torchrun_find_each_other_by_rank():
    with Children() as children:
        run = f"torchrun-test-{os.getpid()}"
        started = [children.start(started_by_torchrun, rank, run) for rank in (2, 0, 1)]
        assert [child.get() for child in started] == [
            (2, False, [1.0] * 3),
            (0, True, [1.0] * 3),
            (1, False, [1.0] * 3),
        ]
        for child in started:
            child.process.join(60)
        assert not [entry for entry in os.listdir("/dev/shm") if run in entry]

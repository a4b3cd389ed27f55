"""The place of a process in its job, as a table of the variables that launchers set."""

from __future__ import annotations

import os

import pytest

from phalanx.environment import num_ranks_here, read_place
from phalanx.errors import ConfigError

TWO = {"RANK": "1", "WORLD_SIZE": "2"}
HERE = {**TWO, "LOCAL_WORLD_SIZE": "2"}
# As Open MPI 4.1, MPICH 4.0 and Slurm set them.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "17",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "3",
}
PORT = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({**HERE, "TORCHELASTIC_RUN_ID": "a"}, "torchrun-a-0"),
        (
            {**HERE, "TORCHELASTIC_RUN_ID": "a b", "TORCHELASTIC_RESTART_COUNT": "3"},
            "torchrun-a-b-3",
        ),
        ({**HERE, **PORT, "TORCHELASTIC_RUN_ID": "none"}, "torchrun-port-29500-0"),
        (OPEN_MPI, "openmpi-17"),
        ({**OPEN_MPI, **TWO}, "openmpi-17"),
        ({**OPEN_MPI, **SLURM}, "openmpi-17"),
        ({**SLURM, **TWO}, "slurm-5-3"),
        (SLURM, "slurm-5-3"),
    ],
)
def test_every_launcher_says_the_same_of_the_second_of_two_processes(environment, job):
    place = read_place(environment)
    assert place is not None
    assert place.job == job
    assert (place.rank, place.size, place.local_size) == (1, 2, 2)
    assert not place.is_spread


def test_workers_of_one_mpiexec_are_told_by_the_process_that_started_them():
    place = read_place(MPICH)
    assert place is not None
    assert place.job.startswith(f"mpich-{os.getppid()}-")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SLURM, "SLURM_STEP_ID": "4294967291"},  # a batch script
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # likewise
    ],
)
def test_a_process_that_no_launcher_has_started_has_no_place(environment):
    assert read_place(environment) is None


@pytest.mark.parametrize(
    ("environment", "local_size"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 1),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, 2),
        (
            {
                **SLURM,
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
                "SLURM_NODEID": "2",
            },
            1,
        ),
        ({**HERE, "LOCAL_WORLD_SIZE": "1"}, 1),
    ],
)
def test_ranks_are_spread_where_fewer_than_all_are_on_this_host(environment, local_size):
    place = read_place({**environment, **PORT})
    assert place is not None
    assert place.is_spread
    assert place.local_size == local_size
    assert place.find_store() == ("a", 29500)


@pytest.mark.parametrize(
    ("more", "keeps"),
    [
        ({"TORCHELASTIC_RUN_ID": "a"}, False),
        ({"TORCHELASTIC_RUN_ID": "a", "PHALANX_RANK_RESTARTS": "0"}, True),
        ({}, True),
    ],
)
def test_the_agent_of_torch_ends_survivors_but_under_phalanx_launch(more, keeps):
    place = read_place({**HERE, **more})
    assert place is not None
    assert place.keeps_survivors is keeps


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**TWO, "RANK": "x"}, "`RANK` must be a number, but is 'x'"),
        ({"RANK": "1"}, "`WORLD_SIZE` must be a number, but is None"),
        ({"WORLD_SIZE": "2"}, "`RANK` must be a number, but is None"),
        ({"PMI_RANK": "1"}, "`PMI_SIZE` must be a number, but is None"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"`RANK` must be below `WORLD_SIZE` \(2\), but is 2"),
        ({**TWO, "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "`MASTER_PORT` must be a number"),
    ],
)
def test_incomplete_variables_are_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        read_place(environment)


def test_ranks_of_this_host_are_one_without_a_launcher(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert num_ranks_here() == 2
    for name in SLURM:
        monkeypatch.delenv(name)
    assert num_ranks_here() == 1

"""Which run is meant, as a table of what starters set."""

from __future__ import annotations

import os

import pytest

from phalanx.errors import ConfigError
from phalanx.tables.joining import JoinRequest, read_join_request, read_master

TWO = {"RANK": "1", "WORLD_SIZE": "2"}
HERE = {**TWO, "LOCAL_WORLD_SIZE": "2"}
# As Open MPI 4.1, MPICH 4.0 and Slurm set them.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "17",
}
ONE_OF_ONE = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "3",
}


@pytest.mark.parametrize(
    ("run", "num_workers", "environment", "ticket"),
    [
        (None, None, {}, JoinRequest(None, None, None)),
        (None, 3, {}, JoinRequest(None, None, 3)),
        ("mine", 3, TWO, JoinRequest("mine", None, 3)),
        (None, None, {**HERE, "TORCHELASTIC_RUN_ID": "a"}, JoinRequest("torchrun-a-0", 1, 2)),
        (
            None,
            2,
            {**HERE, "TORCHELASTIC_RUN_ID": "a b", "TORCHELASTIC_RESTART_COUNT": "3"},
            JoinRequest("torchrun-a-b-3", 1, 2),
        ),
        (
            None,
            None,
            {**HERE, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"},
            JoinRequest("torchrun-port-29500-0", 1, 2),
        ),
        (
            None,
            None,
            {**HERE, "MASTER_PORT": "7"},
            JoinRequest("torchrun-port-7-0", 1, 2),
        ),
        (None, 2, OPEN_MPI, JoinRequest("openmpi-17", 1, 2)),
        (None, None, {**OPEN_MPI, **TWO}, JoinRequest("openmpi-17", 1, 2)),
        (None, None, {**OPEN_MPI, **SLURM}, JoinRequest("openmpi-17", 1, 2)),
        (None, None, {**SLURM, "RANK": "1", "WORLD_SIZE": "2"}, JoinRequest("slurm-5-3", 1, 2)),
        (None, None, SLURM, JoinRequest("slurm-5-3", 1, 2)),
        (
            None,
            3,
            {**SLURM, "SLURM_STEP_ID": "4294967291"},
            JoinRequest(None, None, 3),
        ),  # a batch script
        (
            None,
            3,
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            JoinRequest(None, None, 3),
        ),  # likewise
        (None, None, {**OPEN_MPI, **ONE_OF_ONE}, JoinRequest(None, None, None)),
        (
            None,
            None,
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            JoinRequest("openmpi-17", 1, 2, True),
        ),
        (
            None,
            None,
            {**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            JoinRequest("slurm-5-3", 1, 4, True),
        ),
    ],
)
def test_the_run_is_the_callers_or_torchruns_or_this_process(run, num_workers, environment, ticket):
    assert read_join_request(run, num_workers, environment) == ticket


@pytest.mark.parametrize(
    ("num_workers", "environment", "error", "message"),
    [
        (3, TWO, ConfigError, r"`num_workers` must be `WORLD_SIZE` \(2\), but is 3"),
        (None, {**TWO, "RANK": "x"}, ConfigError, "`RANK` must be a number, but is 'x'"),
        (None, {"RANK": "1"}, ConfigError, "`WORLD_SIZE` must be a number, but is None"),
        (None, {"WORLD_SIZE": "2"}, ConfigError, "`RANK` must be a number, but is None"),
        (None, TWO, ConfigError, "`LOCAL_WORLD_SIZE` must say how many of the 2 workers are on"),
        (3, OPEN_MPI, ConfigError, r"must be `OMPI_COMM_WORLD_SIZE` \(2\), but is 3"),
        (
            None,
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            ConfigError,
            "`MPI_LOCALNRANKS` must say how many of the 2 workers",
        ),
        (None, {"PMI_RANK": "1"}, ConfigError, "`PMI_SIZE` must be a number, but is None"),
    ],
)
def test_variables_that_contradict_are_refused(num_workers, environment, error, message):
    with pytest.raises(error, match=message):
        read_join_request(None, num_workers, environment)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_workers_on_several_hosts_need_to_be_told_where_the_store_is(name):
    found = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert read_master(found) == ("10.0.0.1", 29500)
    del found[name]
    with pytest.raises(ConfigError, match=f"`{name}` must be set where workers are on several"):
        read_master(found)


def test_workers_of_one_mpiexec_are_told_by_the_process_that_started_them():
    ticket = read_join_request(None, None, MPICH)
    assert (ticket.worker, ticket.num_workers) == (1, 2)
    assert ticket.run is not None
    assert ticket.run.startswith(f"mpich-{os.getppid()}-")

"""Which run is meant: by the caller, or by the launcher of this process."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigError
from phalanx.tables.joining import JoinRequest, read_join_request

TWO = {"RANK": "1", "WORLD_SIZE": "2"}
HERE = {**TWO, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}
SPREAD = {**HERE, "LOCAL_WORLD_SIZE": "1"}
PORT = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("run", "num_workers", "environment", "request_"),
    [
        (None, None, {}, JoinRequest(None, None, None)),
        (None, 3, {}, JoinRequest(None, None, 3)),
        ("mine", 3, TWO, JoinRequest("mine", None, 3)),
        (None, 2, HERE, JoinRequest("torchrun-a-0", 1, 2)),
        (None, None, {"RANK": "0", "WORLD_SIZE": "1"}, JoinRequest(None, None, None)),
        (None, 2, {**SPREAD, **PORT}, JoinRequest("torchrun-a-0", 1, 2, ("10.0.0.1", 29500))),
    ],
)
def test_the_run_is_the_callers_or_the_launchers_or_this_process(
    run, num_workers, environment, request_
):
    assert read_join_request(run, num_workers, environment) == request_


@pytest.mark.parametrize(
    ("run", "num_workers", "environment", "message"),
    [
        (None, 3, HERE, r"`num_workers` must be the number of processes .* \(2\), but is 3"),
        (None, None, TWO, "`LOCAL_WORLD_SIZE` must say how many of the 2 processes are on"),
        (None, None, SPREAD, "`MASTER_ADDR` and `MASTER_PORT` must say where the ranks meet"),
        ("a/b", None, {}, "`run` must be 1 to 100 letters"),
    ],
)
def test_variables_that_contradict_are_refused(run, num_workers, environment, message):
    with pytest.raises(ConfigError, match=message):
        read_join_request(run, num_workers, environment)

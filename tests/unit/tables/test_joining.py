"""Which run is meant: by the caller, or by the launcher of this process."""

from __future__ import annotations

import os

import pytest

from phalanx.errors import ConfigError
from phalanx.tables import join

ID = f"joining-{os.getppid()}"  # one for all processes of this suite, and another for the next
TWO = {"RANK": "1", "WORLD_SIZE": "2"}
HERE = {**TWO, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": ID}
SPREAD = {**HERE, "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("run", "num_workers", "environment", "shown"),
    [
        (None, None, {}, "worker 0 of 1 in this process"),
        (None, 3, {}, "worker 0 of 3 in this process"),
        (ID, 1, TWO, f"worker 0 of 1 in run '{ID}'"),
        (None, 2, HERE, f"worker 1 of 2 in run 'torchrun-{ID}-0'"),
        (None, None, {"RANK": "0", "WORLD_SIZE": "1"}, "worker 0 of 1 in this process"),
    ],
)
def test_the_run_is_the_callers_or_the_launchers_or_this_process(
    monkeypatch, run, num_workers, environment, shown
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    world = join(run, num_workers=num_workers, timeout_s=30.0)
    assert repr(world) == f"TableGroup({shown})"
    world.timeout_s = 0.0  # nobody else comes
    if world.num_workers > 1 and world.run:
        with pytest.warns(UserWarning, match="did not come"):
            world.close()
    world.close()


@pytest.mark.parametrize(
    ("run", "num_workers", "environment", "message"),
    [
        (None, 3, HERE, r"`num_workers` must be the number of processes .* \(2\), but is 3"),
        (None, None, TWO, "`LOCAL_WORLD_SIZE` must say how many of the 2 processes are on"),
        (None, None, SPREAD, "`MASTER_ADDR` and `MASTER_PORT` must say where the ranks meet"),
        ("a/b", None, {}, "`run` must be 1 to 100 letters"),
    ],
)
def test_variables_that_contradict_are_refused(monkeypatch, run, num_workers, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        join(run, num_workers=num_workers)

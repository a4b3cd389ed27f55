"""Tables of the processes that torchrun starts: they find each other by its variables alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("launchers")

SCRIPT = """
import json, os, sys
import torch
from phalanx import tables

torch.set_num_threads(1)
with tables.join(sync=True, timeout_s=60.0) as world:
    rows = world.matrix(3, 2, name="rows", init=1.0)
    by_key = world.keys(2, name="by-key", capacity=1)
    me = world.worker_id
    assert me == int(os.environ["RANK"]), "the rank is the worker's number"
    for i in range(4):
        rows.add([[me, i]], rows=[me])
        by_key.add([[1, me]] * 2, rows=[-7, 100 * me + i])
        seen = rows.get().tolist()
        keyed = by_key.get([-7, 203]).tolist()
    found = {"seen": seen, "keyed": keyed, "workers": world.num_workers, "run": world.run}
    with open(f"{sys.argv[1]}/{me}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.night  # by day `phalanx launch` and Ray set the same variables
def test_the_workers_of_torchrun_share_tables(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node", "3", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"{worker}.json").read_text()) for worker in range(3)]
    assert found[0]["seen"] == [[1.0, 7.0], [5.0, 7.0], [9.0, 7.0]]
    assert found[0]["keyed"] == [[12.0, 12.0], [1.0, 2.0]]
    assert found[1:] == [{**found[0], "workers": each["workers"]} for each in found[1:]]
    assert max(each["workers"] for each in found) == 3  # who is first out is not counted by others
    wait_until_removed(found[0]["run"])

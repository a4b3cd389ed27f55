"""Tables of the processes that an MPI has started: workers of one run, not each of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.ranks import START_S

pytestmark = pytest.mark.promise("launchers")

SCRIPT = """
import os
import torch
from phalanx import tables
torch.set_num_threads(1)
with tables.join(timeout_s=60.0) as world:
    table = world.array(4)
    table.add(torch.ones(4))
    world.barrier()
    said = f"worker {world.worker_id} of {world.num_workers} {table.get().tolist()}\\n"
    os.write(1, said.encode())  # in one piece: mpirun mixes the pieces of all
    world.barrier()
"""


def starter(name: str) -> list[str]:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    open_mpi = "Open MPI" in told or "OpenRTE" in told
    return [found, *(["--allow-run-as-root", "--oversubscribe"] if open_mpi else [])]


@pytest.mark.parametrize("name", ["mpirun.openmpi", "mpirun.mpich"])
def test_processes_of_mpirun_are_workers_of_one_run(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*starter(name), "-n", "3", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=2 * START_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"worker {worker} of 3 [3.0, 3.0, 3.0, 3.0]" for worker in range(3)
    ]

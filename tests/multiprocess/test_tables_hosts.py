"""One script, started by each of the launchers; hosts are played on one machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cluster import make_secret
from phalanx.ipc import wait_until
from tests.multiprocess.hosts import free_port

pytestmark = pytest.mark.promise("launchers")

DEADLINE_S = 150.0
SCRIPT = """
import os
if rank := os.environ.get(os.environ.get("RANKS", "")):
    os.environ["PHALANX_HOST"] = f"host-{int(rank) // 2}"
import torch
from phalanx import tables
os.chdir("/")  # a script may
with tables.join(timeout_s=100.0) as world:
    table = world.matrix(5, 2, name="t")
    bulk = world.array(3, name="b", sync=True)
    table.add(torch.ones(5, 2))
    bulk.add([1.0, 2.0, 3.0])
    seen = bulk.get().tolist()
    world.barrier()
    rows = table.get([4, 0])[:, 0].tolist()
    told = f"worker {world.worker_id} sees {rows} {seen}\\nits run is {world.run};\\n"
    os.write(1, told.encode())  # whole, beside others
    world.barrier()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    make_secret(tmp_path / "secret")
    return path


def expected_lines(num_workers: int) -> set[str]:
    n = float(num_workers)
    return {f"worker {worker} sees {[n, n]} {[n, 2 * n, 3 * n]}" for worker in range(num_workers)}


def play(
    script: Path, ranks: str, commands: list[list[str]], num_workers: int = 4, **variables: str
) -> None:
    """Run the commands at once; see that all workers have met, and nothing is left."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PHALANX_HOST"},
        "PHALANX_SECRET_FILE": str(script.parent / "secret"),
        "OMP_NUM_THREADS": "1",
        "RANKS": ranks,
        **variables,
    }
    started = [
        subprocess.Popen(
            command,
            env=environment,
            cwd=script.parent,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command in commands
    ]
    try:
        told = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    lines = "".join(told)
    assert all(line in lines for line in expected_lines(num_workers)), lines
    assert {process.returncode for process in started} == {0}, lines
    run = "|".join(map(re.escape, re.findall("its run is (.*?);", lines)))
    assert run
    assert wait_until(lambda: not re.search(run, " ".join(os.listdir("/dev/shm"))), 30.0)


@pytest.mark.night
def test_torchrun_on_each_host(script):
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", f"t{port}"]
    command += ["--rdzv-endpoint", f"localhost:{port}", str(script)]
    play(script, "RANK", [command] * 2)


@pytest.mark.night
def test_srun_by_its_variables(script):
    port = free_port()
    commands = [["env", f"SLURM_PROCID={rank}", sys.executable, str(script)] for rank in range(4)]
    variables = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(port),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    play(script, "SLURM_PROCID", commands, **variables)


@pytest.mark.parametrize("name", ["mpirun.openmpi", "mpirun.mpich"])
def test_processes_of_mpirun_are_workers_of_one_run(script, name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    open_mpi = "Open MPI" in told or "OpenRTE" in told
    options = ["--allow-run-as-root", "--oversubscribe"] if open_mpi else []
    command = [found, *options, "-n", "3", sys.executable, str(script)]
    play(script, "", [command], num_workers=3)

"""Processes of a real `mpirun` are workers of one run of tables, and leave nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise("launchers")

SCRIPT = """
import os, torch
from phalanx import tables
with tables.join(timeout_s=100.0) as world:
    table = world.array(3, name="t", sync=True)
    table.add([1.0, 2.0, 3.0])
    told = f"worker {world.worker_id} sees {table.get().tolist()}, run {world.run};\\n"
    os.write(1, told.encode())  # whole, beside others
    world.barrier()
"""


@pytest.mark.parametrize("name", ["mpirun.openmpi", "mpirun.mpich"])
def test_processes_of_mpirun_are_workers_of_one_run(tmp_path: Path, name: str) -> None:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}")
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--allow-run-as-root", "--oversubscribe"] if "openmpi" in name else []
    done = subprocess.run(
        [found, *options, "-n", "3", sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"worker (\d) sees \[3\.0, 6\.0, 9\.0\], run (.*?);", done.stdout)
    assert sorted(worker for worker, _ in said) == ["0", "1", "2"], done.stdout
    assert len({run for _, run in said}) == 1
    assert not [name for name in os.listdir("/dev/shm") if said[0][1] in name]

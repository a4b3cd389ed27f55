"""An all-reduce by MPI, timed as `make bench-allreduce` times the others; where there is one.

MPI starts its ranks itself and brings its own group, so it takes its turn in processes of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.clock import now_s
from phalanx.errors import PhalanxError

__all__ = ["ProcessFailed", "has_mpi", "main", "measure_mpi"]

_TIMEOUT_S = 300.0
_START = "from benchmarks.mpi import main; main()"


class ProcessFailed(PhalanxError):
    """MPI's processes did not end well."""


def has_mpi() -> bool:
    """Tell whether `mpirun` and the package mpi4py are there."""
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def measure_mpi(ranks: int, calls_by_size: dict[int, int], rounds: int) -> dict[int, list[float]]:
    """Return the seconds of a call by size, one per round, as rank 0 sees them.

    Args:
        ranks: How many.
        calls_by_size: How many calls a round has, by bytes of the tensor.
        rounds: How many rounds.

    Raises:
        ProcessFailed: The ranks failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "seconds.json"
        job = json.dumps([list(calls_by_size.items()), rounds, str(answer)])
        ended = _run(["-n", str(ranks), "--oversubscribe", sys.executable, "-c", _START, job])
        if ended.returncode:
            last_words = ended.stderr.strip()
            raise ProcessFailed(f"MPI's ranks must end well, but ended with:\n{last_words}")
        seconds = json.loads(answer.read_text(encoding="utf-8"))
    return {int(size): rounds_of_size for size, rounds_of_size in seconds.items()}


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        ["mpirun", *arguments],
        env={**os.environ, **allowed, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    """Time the job of the command line in one rank; rank 0 writes JSON to the file it names."""
    from mpi4py import MPI  # starts MPI, which only these processes shall

    group = MPI.COMM_WORLD
    sizes, rounds, answer = json.loads(arguments[0])
    torch.set_num_threads(1)
    seconds: dict[int, list[float]] = {}
    for size, calls in sizes:
        tensor = torch.ones(size // 4)
        data = [tensor.numpy(), MPI.FLOAT]
        for _ in range(rounds):
            tensor.fill_(1.0)
            group.Allreduce(MPI.IN_PLACE, data)
            since = now_s()
            for _ in range(calls):
                group.Allreduce(MPI.IN_PLACE, data)
            seconds.setdefault(size, []).append((now_s() - since) / calls)
            group.Barrier()
    if group.Get_rank() == 0:
        Path(answer).write_text(json.dumps(seconds), encoding="utf-8")

"""An all-reduce by MPI, timed as `make bench-allreduce` times the others; where there is one.

MPI starts its ranks itself and brings its own group, so it takes its turn in processes of its own.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.processes import Child, claim_stdout, command_of, hear
from phalanx.clock import now_s

_TIMEOUT_S = 300.0
_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


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
        PeerError: The ranks failed.
    """
    start = ("mpirun", "-n", str(ranks), "--oversubscribe")
    job = MpiJob(calls_by_size=[*calls_by_size.items()], rounds=rounds)
    with Child((*start, *command_of(job)), _ENVIRONMENT) as child:
        [line] = hear("mpi", [child], _TIMEOUT_S)
    seconds = json.loads(line)
    return {int(size): rounds_of_size for size, rounds_of_size in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class MpiJob:
    """What all ranks time."""

    calls_by_size: Sequence[tuple[int, int]]  # pairs, as keys of JSON are strings
    rounds: int

    def run(self) -> None:
        """Be a rank; rank 0 tells the seconds."""
        from mpi4py import MPI  # starts MPI, which only these processes shall

        answers = claim_stdout()
        group = MPI.COMM_WORLD
        torch.set_num_threads(1)
        seconds: dict[int, list[float]] = {}
        for size, calls in self.calls_by_size:
            tensor = torch.ones(size // 4)
            data = [tensor.numpy(), MPI.FLOAT]
            for _ in range(self.rounds):
                tensor.fill_(1.0)
                group.Allreduce(MPI.IN_PLACE, data)
                since = now_s()
                for _ in range(calls):
                    group.Allreduce(MPI.IN_PLACE, data)
                seconds.setdefault(size, []).append((now_s() - since) / calls)
                group.Barrier()
        if group.Get_rank() == 0:
            print(json.dumps(seconds), file=answers, flush=True)

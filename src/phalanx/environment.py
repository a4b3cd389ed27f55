"""The place of this process in its job, by the variables of the program that started it.

    phalanx launch, torchrun, Ray   RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID, …
    Open MPI's mpirun               OMPI_COMM_WORLD_RANK, …
    MPICH's mpiexec                 PMI_RANK, …
    Slurm's srun                    SLURM_PROCID, …

Nothing else in the package reads these variables, but for `rank_restarts.py`, which imports the
standard library only. MASTER_ADDR and MASTER_PORT say where the store of the job is: our launchers
and torchrun set them, and the user does with MPI and Slurm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import ConfigError
from phalanx.ipc import ProcessIdentity

__all__ = ["Place", "error_file", "num_ranks_here", "read_attempt", "read_place", "read_rank"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank of a job, as its launcher describes it.

    Attributes:
        job: Name of this start of the job: the same in all its processes, another after a restart.
        rank: Number of this process, from 0.
        size: Number of processes.
        local_size: Number of processes of this host; None where it is not said.
        attempt: How often the launcher has started all ranks again.
        store: Address and port of the job's store; None where they are not said.
        keeps_survivors: Whether the launcher lets the other ranks of a host live when one fails.
    """

    job: str
    rank: int
    size: int
    local_size: int | None = None
    attempt: int = 0
    store: tuple[str, int] | None = None
    keeps_survivors: bool = True

    @property
    def is_spread(self) -> bool:
        """True where the ranks are on several hosts.

        Raises:
            ConfigError: The launcher has not said how many are on this one.
        """
        if self.local_size is None and self.size > 1:
            raise ConfigError(
                f"`LOCAL_WORLD_SIZE` must say how many of the {self.size} processes are on this "
                "host, but is not set. `phalanx launch` and torchrun set it."
            )
        return self.local_size not in (None, self.size)

    def find_store(self) -> tuple[str, int]:
        """Return address and port of the job's store.

        Raises:
            ConfigError: They are not said.
        """
        if self.store is None:
            raise ConfigError(
                "`MASTER_ADDR` and `MASTER_PORT` must say where the ranks meet, but are not set. "
                "`phalanx launch` and torchrun set them; with mpirun or srun export the host of "
                "rank 0 and a port that is free there."
            )
        return self.store


class _Launcher(NamedTuple):
    """The variables by which a launcher gives processes their places."""

    name: str  # as jobs are called
    rank: str
    size: str
    local_size: str
    job: str  # what tells one start from another, if it has such a variable


_OPEN_MPI = _Launcher(
    name="openmpi",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job="PMIX_NAMESPACE",
)
_MPICH = _Launcher("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "")
_SLURM = _Launcher(
    name="slurm",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_size="SLURM_STEP_TASKS_PER_NODE",
    job="SLURM_JOB_ID",
)
_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
# torchrun comes last, as a script may have copied the numbers of another launcher.
_LAUNCHERS = (_OPEN_MPI, _MPICH, _SLURM, _TORCHRUN)
_LONGEST_NAME = 100
_LARGEST_STEP = 4_000_000_000  # beyond, Slurm numbers batch scripts and the like


def read_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """Return the place of this process; None if no launcher has started it.

    Args:
        environment: The variables; None for this process's.

    Raises:
        ConfigError: A variable is missing, or no number.

    Example:
        >>> found = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "7"}
        >>> place = read_place(found)
        >>> place.job, place.rank, place.size
        ('torchrun-port-7-0', 1, 2)
        >>> read_place({}) is None
        True
    """
    found = os.environ if environment is None else environment
    launcher = _launcher_of(found)
    if launcher is None:
        return None
    rank, size = _number(found, launcher.rank), _number(found, launcher.size)
    if rank >= size:
        raise ConfigError(
            f"`{launcher.rank}` must be below `{launcher.size}` ({size}), but is {rank}."
        )
    local_size = _local_size(found, launcher)
    return Place(
        job=_job(found, launcher, is_spread=local_size != size),
        rank=rank,
        size=size,
        local_size=local_size,
        attempt=read_attempt(found),
        store=_store(found),
        keeps_survivors="TORCHELASTIC_RUN_ID" not in found or "PHALANX_RANK_RESTARTS" in found,
    )


def read_attempt(environment: Mapping[str, str] | None = None) -> int:
    """Return how often the launcher has started all ranks again."""
    found = os.environ if environment is None else environment
    return int(found.get("TORCHELASTIC_RESTART_COUNT", "0"))


def read_rank() -> int:
    """Return this process's rank as torch's agent numbers it; 0 where no agent has started it."""
    return int(os.environ.get("RANK", "0"))


def error_file() -> Path | None:
    """Return the file where a launcher reads why this rank has failed, if there is one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def num_ranks_here() -> int:
    """Return the number of ranks of the job on this host; 1 where no launcher says it."""
    place = read_place()
    return 1 if place is None else place.local_size or 1


def _launcher_of(found: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher that has started this process, if one has."""
    if "TORCHELASTIC_RUN_ID" in found or "LOCAL_WORLD_SIZE" in found:
        return _TORCHRUN
    for launcher in _LAUNCHERS:
        is_set = launcher.rank in found or launcher.size in found
        if is_set and (launcher is not _SLURM or _is_step(found)):
            return launcher
    return None


def _is_step(found: Mapping[str, str]) -> bool:
    step = found.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _LARGEST_STEP


def _local_size(found: Mapping[str, str], launcher: _Launcher) -> int | None:
    if launcher.local_size not in found:
        return None
    if launcher is not _SLURM:
        return _number(found, launcher.local_size)
    sizes: list[int] = []  # of each host: Slurm says 2(x3),1 of four
    for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", found[launcher.local_size]):
        sizes += [int(size)] * int(times or 1)
    return sizes[int(found.get("SLURM_NODEID", "0"))]


def _job(found: Mapping[str, str], launcher: _Launcher, *, is_spread: bool) -> str:
    """Name a start of the launcher."""
    job = found.get(launcher.job, "none")
    if job == "none":  # torchrun was given no id, or the launcher has no such variable
        parent = ProcessIdentity.of(os.getppid())  # on one host one process has started them all
        job = f"{parent.pid}-{parent.start_ticks}"
        if is_spread or launcher is _TORCHRUN:
            job = f"port-{found.get('MASTER_PORT', '0')}"
    elif launcher is _SLURM:
        job = f"{job}-{found['SLURM_STEP_ID']}"
    if launcher is _TORCHRUN:
        job = f"{job}-{read_attempt(found)}"
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{launcher.name}-{job}")[:_LONGEST_NAME]


def _store(found: Mapping[str, str]) -> tuple[str, int] | None:
    if not found.get("MASTER_ADDR") or not found.get("MASTER_PORT"):
        return None
    return found["MASTER_ADDR"], _number(found, "MASTER_PORT")


def _number(found: Mapping[str, str], name: str) -> int:
    if not found.get(name, "").isdecimal():
        raise ConfigError(
            f"`{name}` must be a number, but is {found.get(name)!r}. Start the processes with "
            "`phalanx launch`, torchrun, mpirun or srun, which set it."
        )
    return int(found[name])

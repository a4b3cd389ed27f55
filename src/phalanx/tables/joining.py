"""Which run to join, and as which worker: by the caller, or by the variables of our launcher.

    phalanx launch, torchrun    RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID
    Open MPI's mpirun           OMPI_COMM_WORLD_RANK, …
    MPICH's mpiexec             PMI_RANK, …
    Slurm's srun                SLURM_PROCID, …

A process started by one of these is never a run of its own: incomplete variables are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from phalanx.errors import ConfigError
from phalanx.ipc import ProcessIdentity


class JoinRequest(NamedTuple):
    """What to join.

    Attributes:
        run: Name of the run, or None for this process alone.
        worker: Our number, or None for the next one.
        num_workers: How many are expected, or None if nobody knows.
        is_spread: Whether they are on several hosts.
    """

    run: str | None
    worker: int | None
    num_workers: int | None
    is_spread: bool = False


class _Launcher(NamedTuple):
    """The variables by which a launcher gives processes their numbers.

    Attributes:
        name: As runs are called.
        rank: A process's number.
        size: The number of processes.
        here: The number of those on this host.
        job: What tells one start from another, if it has such a variable.
    """

    name: str
    rank: str
    size: str
    here: str
    job: str


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_LAUNCHERS = (
    _Launcher(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    _Launcher("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ""),
    _Launcher(
        "slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID",
    ),
    _TORCHRUN,  # last, as a script may have copied the numbers of another
)
_WAY_OUT = "Start them with `phalanx launch`, or give `join` a `run`, which names what they share."
_LONGEST_NAME = 100
_LARGEST_STEP = 4_000_000_000  # beyond, Slurm numbers batch scripts and the like


def read_join_request(
    run: str | None, num_workers: int | None, environment: Mapping[str, str] | None = None
) -> JoinRequest:
    """Decide which run to join.

    Args:
        run: The name, if the caller gave one. It comes before all variables.
        num_workers: How many are expected, if the caller said.
        environment: The variables; None for this process's.

    Raises:
        ConfigError: The variables contradict the caller, or do not say enough.

    Example:
        >>> found = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "7"}
        >>> read_join_request(None, None, found)
        JoinRequest(run='torchrun-port-7-0', worker=1, num_workers=2, is_spread=False)
        >>> read_join_request(None, None, {})
        JoinRequest(run=None, worker=None, num_workers=None, is_spread=False)
    """
    if run is not None:
        if _clean(run) != run or not run[:1].isalnum():
            raise ConfigError(
                f"`run` must be 1 to {_LONGEST_NAME} letters, digits, dots, dashes and "
                f"underscores, a letter or digit first, but is {run!r}."
            )
        return JoinRequest(run, None, num_workers)
    found = os.environ if environment is None else environment
    launcher = _launcher_of(found)
    if launcher is None:
        return JoinRequest(None, None, num_workers)
    rank, size = (_number(found, name) for name in (launcher.rank, launcher.size))
    if num_workers not in (None, size):
        raise ConfigError(
            f"`num_workers` must be `{launcher.size}` ({size}), but is {num_workers}."
        )
    if size == 1:
        return JoinRequest(None, None, num_workers)
    if launcher.here not in found:
        raise ConfigError(
            f"`{launcher.here}` must say how many of the {size} workers are on this host where "
            f"`{launcher.rank}` is set, but is not set. {_WAY_OUT}"
        )
    is_spread = found[launcher.here] != str(size)  # Slurm says 2(x3) of three hosts
    job = _clean(f"{launcher.name}-{_job(found, launcher, is_spread=is_spread)}")
    return JoinRequest(job, rank, size, is_spread)


def _launcher_of(found: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher that has started this process, if one has."""
    if "TORCHELASTIC_RUN_ID" in found or "LOCAL_WORLD_SIZE" in found:
        return _TORCHRUN
    for launcher in _LAUNCHERS:
        is_set = launcher.rank in found or launcher.size in found
        if is_set and (launcher.name != "slurm" or _is_step(found)):
            return launcher
    return None


def _is_step(found: Mapping[str, str]) -> bool:
    step = found.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _LARGEST_STEP


def _job(found: Mapping[str, str], launcher: _Launcher, *, is_spread: bool) -> str:
    """Name a start of the launcher: the same in all its processes, another after a restart."""
    job = found.get(launcher.job, "none")
    if job == "none":  # torchrun was given no id, or the launcher has no such variable
        parent = ProcessIdentity.of(os.getppid())  # on one host one process has started them all
        job = f"{parent.pid}-{parent.start_ticks}"
        if is_spread or launcher is _TORCHRUN:
            job = f"port-{found.get('MASTER_PORT', '0')}"
    if launcher is _TORCHRUN:
        return f"{job}-{found.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return f"{job}-{found['SLURM_STEP_ID']}" if launcher.name == "slurm" else job


def read_trust(
    secret_file: str | None,
    trusted_network: bool | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[str | None, bool]:
    """Return the secret's file and whether the network is trusted: as given, or by variables.

    Raises:
        ConfigError: Both are given.
    """
    found = os.environ if environment is None else environment
    if secret_file is None and trusted_network is None:
        secret_file = found.get("PHALANX_SECRET_FILE") or None
        trusted_network = bool(found.get("PHALANX_TRUSTED_NETWORK"))
    if secret_file and trusted_network:
        raise ConfigError(
            "`trusted_network` must be False where `secret_file` is given, but both are set. With "
            "a secret everything between hosts is encrypted, and no network needs to be trusted."
        )
    return secret_file, bool(trusted_network)


def read_master(environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return address and port of the store of a job on several hosts.

    Raises:
        ConfigError: The variables do not say.
    """
    found = os.environ if environment is None else environment
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not found.get(name):
            raise ConfigError(
                f"`{name}` must be set where workers are on several hosts, but is not. torchrun "
                "and `phalanx launch` set it; with mpirun or srun export MASTER_ADDR (the host of "
                "rank 0) and MASTER_PORT (a port that is free there)."
            )
    return found["MASTER_ADDR"], _number(found, "MASTER_PORT")


def _number(found: Mapping[str, str], name: str) -> int:
    if not found.get(name, "").isdecimal():
        raise ConfigError(f"`{name}` must be a number, but is {found.get(name)!r}. {_WAY_OUT}")
    return int(found[name])


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:_LONGEST_NAME]

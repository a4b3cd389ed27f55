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

__all__ = ["JoinRequest", "read_join_request", "read_master", "read_trust_of_network"]


class JoinRequest(NamedTuple):
    """What to join.

    Attributes:
        run: Name of the run on this host, or None for this process alone.
        worker: Our number, or None for the next one.
        num_workers: How many are expected, or None if nobody knows.
        is_spread: Whether they are on several hosts.
    """

    run: str | None
    worker: int | None
    num_workers: int | None
    is_spread: bool = False


class _Launcher(NamedTuple):
    """How a launcher tells processes their numbers.

    Attributes:
        name: As messages call it, and as runs are called.
        rank: The variable with a process's number.
        size: That with the number of processes.
        here: That with the number of those on this host.
        job: Those that tell one start from another; none for the process that started us.
    """

    name: str
    rank: str
    size: str
    here: str
    job: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    _Launcher("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ()),
    _Launcher("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", ()),
)
_WAY_OUT = "Start them with `phalanx launch`, or give `join` a `run`, which names what they share."
_TORCH = ("RANK", "WORLD_SIZE")
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
        ConfigError: The variables contradict each other or the caller, or do not say enough.

    Example:
        >>> read_join_request(
        ...     None, None, {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}
        ... )
        JoinRequest(run='torchrun-a-0', worker=1, num_workers=2, is_spread=False)
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
    request = _torchs(found, num_workers) or _others(found, num_workers)
    return request or JoinRequest(None, None, num_workers)


def _torchs(found: Mapping[str, str], num_workers: int | None) -> JoinRequest | None:
    """Read torchrun's variables; None where they are not there, or set by hand for torch alone."""
    numbers = _rank_and_size(found, *_TORCH)
    if numbers is None:
        return None
    rank, size = numbers
    _check_expected(num_workers, size, "torchrun's `WORLD_SIZE`")
    here = _number(found, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in found else None
    if here is None and "TORCHELASTIC_RUN_ID" not in found:
        other = _others(found, num_workers)  # whose numbers a script has copied, say
        if other is not None and (other.worker, other.num_workers) == (rank, size):
            return other
        raise ConfigError(
            f"`LOCAL_WORLD_SIZE` must say how many of the {size} workers are on this host where "
            f"`RANK` and `WORLD_SIZE` are set, but is not set. Set it to {size} if all are. "
            + _WAY_OUT
        )
    return JoinRequest(_torchs_run(found), rank, size, here not in (None, size))


def _others(found: Mapping[str, str], num_workers: int | None) -> JoinRequest | None:
    for launcher in _LAUNCHERS:
        if launcher.name == "slurm" and not _is_step(found):
            continue
        numbers = _rank_and_size(found, launcher.rank, launcher.size)
        if numbers is None:
            continue
        rank, size = numbers
        _check_expected(num_workers, size, f"`{launcher.size}`")
        if size == 1:
            return JoinRequest(None, None, num_workers)
        if launcher.here not in found:
            raise ConfigError(
                f"`{launcher.here}` must say how many of the {size} workers are on this host where "
                f"`{launcher.rank}` is set, but is not set. {_WAY_OUT}"
            )
        text = found[launcher.here]
        here = int(text) if text.isdecimal() else None  # Slurm says 2(x3) of three hosts
        run = _clean(f"{launcher.name}-{_job(found, launcher)}")
        return JoinRequest(run, rank, size, here != size)
    return None


def _is_step(found: Mapping[str, str]) -> bool:
    step = found.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _LARGEST_STEP


def _job(found: Mapping[str, str], launcher: _Launcher) -> str:
    if launcher.name == "slurm":
        return f"{found.get('SLURM_JOB_ID', '')}-{found['SLURM_STEP_ID']}"
    for name in launcher.job:
        if name in found:
            return found[name]
    parent = ProcessIdentity.of(os.getppid())  # on one host one process has started them all
    return f"{parent.pid}-{parent.start_ticks}"


def _rank_and_size(found: Mapping[str, str], rank: str, size: str) -> tuple[int, int] | None:
    there = [name for name in (rank, size) if name in found]
    if not there:
        return None
    for name in (rank, size):
        if name not in found:
            raise ConfigError(
                f"`{name}` must be set where `{there[0]}` is, but is not. Set both or neither. "
                + _WAY_OUT
            )
    numbers = _number(found, rank), _number(found, size)
    if not numbers[0] < numbers[1]:
        raise ConfigError(f"`{rank}` must be below `{size}` ({numbers[1]}), but is {numbers[0]}.")
    return numbers


def _check_expected(num_workers: int | None, size: int, what: str) -> None:
    if num_workers not in (None, size):
        raise ConfigError(f"`num_workers` must be {what} ({size}), but is {num_workers}.")


def read_trust_of_network(
    secret_file: str | None,
    trusted_network: bool | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[str | None, bool]:
    """Return the secret's file and whether the network is trusted: as given, or by variables."""
    found = os.environ if environment is None else environment
    if secret_file is None and trusted_network is None:
        return found.get("PHALANX_SECRET_FILE") or None, bool(found.get("PHALANX_TRUSTED_NETWORK"))
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
    if not found[name].isdecimal():
        raise ConfigError(f"`{name}` must be a number, but is {found[name]!r}.")
    return int(found[name])


def _torchs_run(found: Mapping[str, str]) -> str:
    """Name this start of the run: the same in all its workers, another after a restart."""
    run = found.get("TORCHELASTIC_RUN_ID", "none")
    if run == "none":  # torchrun was given no id; then the port tells runs apart
        run = "port-" + found.get("MASTER_PORT", "0")
    restart = found.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _clean(f"torchrun-{run}-{restart}")


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:_LONGEST_NAME]

"""The store of a job that torch's launcher, Slurm or MPI has started, as `env://` would find it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore, rendezvous

from phalanx.distributed.folder_store import FolderStore
from phalanx.errors import ConfigError, PeerTimeout, UnsupportedError

__all__ = [
    "FOLDER",
    "STORE",
    "keep_store",
    "keep_survivors",
    "open_lasting_store",
    "open_store",
    "read_rank",
    "refuse_torchrun",
]

FOLDER = "PHALANX_JOB_FOLDER"
"""The variable that tells the ranks of a job on one host where it keeps what outlives them."""

STORE = "PHALANX_JOB_STORE"
"""The variable with the ``host:port`` of a store that outlives the ranks, kept by the launcher."""

_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def refuse_torchrun() -> None:
    """Refuse elastic ranks in a process that torchrun, or a call of `launch`, has started.

    torch's agent ends the survivors of a lost rank. `phalanx launch` puts a process between the
    agent and each rank (`rank_restarts.py`), which sets a variable for it.

    Raises:
        UnsupportedError: This is such a process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and "PHALANX_RANK_RESTARTS" not in os.environ:
        size = os.environ.get("LOCAL_WORLD_SIZE", "2")
        raise UnsupportedError(
            "`executor=Ranks()` needs a launcher that keeps the survivors of a lost rank, but "
            "torchrun and `phalanx.launch()` end them. Start "
            f"`phalanx launch -n {size} script.py`, or take executor='ranks', whose ranks all "
            "restart from the last checkpoint."
        )


def keep_survivors() -> None:
    """Let the launcher keep this host's other ranks when this rank is lost."""
    if _ERROR_FILE in os.environ:
        Path(os.environ[_ERROR_FILE]).with_name("elastic").touch()


def read_rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torch's variables have them.

    Raises:
        ConfigError: They are not set, or no such numbers.
    """
    for name in ("RANK", "WORLD_SIZE"):
        if not os.environ.get(name, "").isdecimal():
            raise ConfigError(
                f"`{name}` must be set to a number for ranks, but is {os.environ.get(name)!r}. "
                "Start them by `phalanx launch`, torchrun, or another launcher that sets it."
            )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= size:
        raise ConfigError(f"`RANK` must be below `WORLD_SIZE` ({size}), but is {rank}.")
    return rank, size


def open_lasting_store(rank: int, size: int, timeout_s: float) -> Store:
    """Return a store that outlives the ranks of the job, where its launcher keeps one.

    That is a folder in that of `phalanx launch`, the store of the driver on Ray, or torchrun's
    at MASTER_ADDR. Where the launcher keeps none, rank 0 does, and the job cannot do without it.

    Raises:
        ConfigError: The variables do not say where it is.
        PeerTimeout: It is not there in time.
    """
    timeout = timedelta(seconds=timeout_s)
    folder = os.environ.get(FOLDER)
    if folder:
        found: Store = FolderStore(Path(folder) / "lasting-store")
        found.set_timeout(timeout)
        return found
    address, _, port = os.environ.get(STORE, "").rpartition(":")
    is_kept = bool(address) or os.environ.get(_AGENT) == "True"
    if not address:
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ConfigError(
            "`MASTER_ADDR` and `MASTER_PORT` must say where the ranks meet, but are "
            f"{address!r} and {port!r}. `phalanx launch` and torchrun set them."
        )
    if not is_kept:
        return open_store(address, int(port), rank, size, timeout_s)
    try:
        return TCPStore(address, int(port), None, timeout=timeout, wait_for_workers=False)
    except RuntimeError as exc:
        raise _not_there(address, int(port), timeout_s, exc) from exc


def open_store(address: str, port: int, rank: int, size: int, timeout_s: float) -> Store:
    """Return the job's store; rank 0 makes it, where torchrun's agent has not.

    `init_process_group()` of the same process uses the same one.

    Raises:
        PeerTimeout: It is not there in time.
    """
    try:
        found = rendezvous(
            f"tcp://{address}:{port}", rank, size, timeout=timedelta(seconds=timeout_s)
        )
        store: Store = next(found)[0]
    except RuntimeError as exc:
        raise _not_there(address, port, timeout_s, exc) from exc
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def keep_store() -> TCPStore:
    """Return a store at a free port of this host, for ranks that it shall outlive."""
    return TCPStore("0.0.0.0", 0, None, is_master=True, wait_for_workers=False)


def _not_there(address: str, port: int, timeout_s: float, error: RuntimeError) -> PeerTimeout:
    return PeerTimeout(
        f"The store of the job at {address}:{port} was not there within {timeout_s:g} s: {error}. "
        "See that rank 0 runs, and that its host lets this one connect.",
        0,
    )

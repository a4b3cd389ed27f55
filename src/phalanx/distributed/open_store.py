"""The store of a job that torch's launcher, Slurm or MPI has started, as `env://` would find it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore, rendezvous

from phalanx.distributed.folder_store import FolderStore
from phalanx.environment import Place
from phalanx.errors import PeerTimeout

__all__ = [
    "FOLDER",
    "keep_store",
    "open_lasting_store",
    "open_store",
]

FOLDER = "PHALANX_JOB_FOLDER"
"""The variable that tells the ranks of a job on one host where it keeps what outlives them."""


def open_lasting_store(place: Place, timeout_s: float) -> Store:
    """Return a store that outlives the ranks of the job, where its launcher keeps one.

    That is a folder in that of `phalanx launch`, or torchrun's store at MASTER_ADDR. Where the
    launcher keeps none, rank 0 does, and the job cannot do without it.

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
    address, port = place.find_store()
    if not place.store_is_kept:
        return open_store(address, port, place.rank, place.size, timeout_s)
    try:
        return TCPStore(address, port, None, timeout=timeout, wait_for_workers=False)
    except RuntimeError as exc:
        raise _not_there(address, port, timeout_s, exc) from exc


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

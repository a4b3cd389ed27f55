"""The store of a job that a launcher has started, as `init_process_group()` would find it."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store, rendezvous

from phalanx.errors import PeerTimeout

__all__ = ["open_store"]


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
        raise PeerTimeout(
            f"The store of the job at {address}:{port} was not there within {timeout_s:g} s: "
            f"{exc}. See that rank 0 runs, and that its host lets this one connect.",
            0,
        ) from exc
    store.set_timeout(timedelta(seconds=timeout_s))
    return store

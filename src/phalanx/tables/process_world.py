"""One world per process, for scripts that pass nothing around."""

from __future__ import annotations

from phalanx.errors import StateError
from phalanx.tables.world import World, join

__all__ = ["barrier", "current", "init", "num_workers", "shutdown", "worker_id"]

_world: World | None = None


def init(
    run: str | None = None,
    *,
    sync: bool = False,
    staleness: int | None = None,
    num_workers: int | None = None,
    timeout_s: float = 30.0,
) -> World:
    """Join, as :func:`phalanx.tables.join`, and keep the world for the functions beside this one.

    Raises:
        StateError: This process has joined already.

    Example:
        >>> world = init()
        >>> num_workers(), worker_id(), barrier()
        (1, 0, 1)
        >>> shutdown()
    """
    global _world
    if _world is not None and not _world.closed:
        raise StateError("`init` must be called once, but was called before. Call `shutdown`.")
    _world = join(run, sync=sync, staleness=staleness, num_workers=num_workers, timeout_s=timeout_s)
    return _world


def current() -> World:
    """Return the world of :func:`init`.

    Raises:
        StateError: There is none.
    """
    if _world is None or _world.closed:
        raise StateError("`init` must be called first, but was not.")
    return _world


def barrier(name: str = "barrier", timeout_s: float | None = None) -> int:
    """Wait for all workers, as :meth:`World.barrier`."""
    return current().barrier(name, timeout_s)


def shutdown() -> None:
    """Leave the world of :func:`init`; without one, do nothing."""
    global _world
    if _world is not None:
        _world.close()
        _world = None


def num_workers() -> int:
    """Return how many workers there are, as :attr:`World.num_workers`."""
    return current().num_workers


def worker_id() -> int:
    """Return this process's number, from 0."""
    return current().worker_id

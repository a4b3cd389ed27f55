"""The way of a worker to its run: by a name from the caller, or by the process's launcher."""

from __future__ import annotations

from phalanx.environment import Place, read_place
from phalanx.errors import ConfigError
from phalanx.native import require_library
from phalanx.plan import Staleness, check_argument
from phalanx.tables.run_context import RunContext
from phalanx.tables.spec import NAME
from phalanx.tables.table_group import TableGroup, read_mode, read_seconds


def join(
    run: str | None = None,
    *,
    sync: bool = False,
    staleness: int | None = None,
    num_workers: int | None = None,
    timeout_s: float = 30.0,
    secret_file: str | None = None,
) -> TableGroup:
    """Become a worker: of a launcher's run, of run ``run``, or of this process alone.

    Args:
        run: A name that the processes of one run on this host agree on. None: the launcher's run
            (torchrun, mpirun, srun), or without a launcher this process and its threads alone.
        sync: True if tables are bulk-synchronous by default.
        staleness: k for bounded staleness of tables by default; 0 is bulk-synchronous.
        num_workers: The number of workers that will join. Barriers and rounds then also wait for
            workers that have not joined yet; without it only for those present.
        timeout_s: The longest wait of a call for other workers, in seconds.
        secret_file: For workers on several hosts: the file that `phalanx secret` made, the
            same on each. Default: the variable ``PHALANX_SECRET_FILE``.

    Raises:
        ConfigError: ``run`` is no name, other workers gave another ``num_workers``, or a variable
            of the launcher is missing.
        OutOfSpace: ``/dev/shm`` is full.
        UnsupportedError: The C library was not built when phalanx was installed.

    Example:
        >>> with join() as world:
        ...     world.worker_id, world.num_workers, world.is_master
        (0, 1, True)
    """
    require_library("Tables")
    timeout_s = read_seconds(timeout_s)
    mode = read_mode(sync, staleness, Staleness(None))
    place = _place_of(run, num_workers)
    if place is None:
        context = RunContext(run)
    elif place.is_spread:
        # Late: what is between hosts takes a tenth of a second, which runs on one host do without.
        from phalanx.tables.host_rendezvous import join_hosts

        context = join_hosts(place, secret_file, timeout_s)
    else:
        context = RunContext(place.job)
    try:
        rank, size = (None, num_workers) if place is None else (place.rank, place.size)
        return TableGroup(context, rank, size, mode, timeout_s)
    except BaseException:
        context.close(timeout_s)
        raise


def _place_of(run: str | None, num_workers: int | None) -> Place | None:
    """Return this process's place in the job whose ranks are the workers; None if it has no job.

    Raises:
        ConfigError: The name or the number of workers cannot be.
    """
    if run is not None:
        wanted = (
            "be 1 to 100 letters, digits, dots, dashes and underscores, a letter or digit first"
        )
        check_argument(NAME.fullmatch(run) is not None, "run", wanted, run)
        return None
    place = read_place()
    if place is not None and num_workers not in (None, place.size):
        raise ConfigError(
            f"`num_workers` must be the number of processes that were started ({place.size}), but "
            f"is {num_workers}."
        )
    return None if place is None or place.size == 1 else place

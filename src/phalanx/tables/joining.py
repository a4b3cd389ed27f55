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
    trusted_network: bool | None = None,
) -> TableGroup:
    """Become a worker: of this process alone, of the run that was started, or of run ``run``.

    Args:
        run: A name that the processes of one run on this host agree on. None for the run of what
            started us (torchrun, mpirun, srun), else for this process and its threads alone.
        sync: Whether tables are bulk-synchronous unless they say otherwise.
        staleness: k for bounded staleness, unless tables say otherwise; 0 is bulk-synchronous.
        num_workers: How many will come. Then barriers and rounds wait for those too that have not
            come yet; else only for those that are here.
        timeout_s: How long calls wait for others.
        secret_file: Where workers are on several hosts: the file that `phalanx secret` made, the
            same on each. Default: the variable ``PHALANX_SECRET_FILE``.
        trusted_network: In place of a secret: whoever reaches the servers may read and change the
            tables, and nothing is encrypted. Default: ``PHALANX_TRUSTED_NETWORK``.

    Raises:
        ConfigError: The name is none, others said another ``num_workers``, or variables lack.
        OutOfSpace: There is no room in ``/dev/shm``.
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

        context = join_hosts(place, secret_file, trusted_network, timeout_s)
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

"""Start the ranks of a job on Ray: it decides which runs where, and prints their lines.

    driver: the job's store   placement group, packed
      │  run                 ┌ node a ───────┐  ┌ node b ───────┐
      ├─────────────────────►│ actor, rank 0 │  │               │
      ├─────────────────────►│ actor, rank 1 │  │               │
      └──────────────────────┼───────────────┼─►│ actor, rank 2 │
                             └───────────────┘  └───────────────┘

A rank finds the variables that torchrun sets. A node of Ray is a host, also where one machine
simulates several. Ray ends an actor with its placement group or with the driver. The secret lies in
a file without a name, which ends with the actor.
"""

from __future__ import annotations

import importlib
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import TCPStore

from phalanx.clock import pause
from phalanx.cluster import draw_secret
from phalanx.errors import PeerTimeout, UnsupportedError
from phalanx.launching.rank_failures import ECHOES, RankFailed
from phalanx.launching.rank_start import prepare_rank
from phalanx.plan import check_function, read_count

__all__ = ["on_ray"]

_OTHERS_S = 3.0  # after a failure: for those of the others, one of which may be its cause
_LAST_LINES_S = 0.5  # for Ray to print what the ranks wrote last


def on_ray(
    function: Callable[..., Any],
    workers: int | None = None,
    *,
    args: Sequence[object] = (),
    cpus_per_worker: int = 1,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Run ``function(*args)`` in ``workers`` actors of a Ray cluster, as ranks of one job.

    Each rank finds torchrun's variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, …), so
    ``phalanx.tables.join()``, ``torch.distributed.init_process_group()`` and
    ``phalanx.Trainer(executor="ranks")`` work there as under ``phalanx launch``. Tables between
    nodes are encrypted, with a secret that is made for this run.

    Args:
        function: One that was typed in a notebook as well. Modules that it imports must be on
            every node.
        workers: Number of ranks; by default as many as the cluster has room for.
        args: Arguments of the function, which are pickled.
        cpus_per_worker: Ray's CPUs for each rank, and its threads.
        timeout_s: Longest time of Ray to place the ranks, in seconds.

    Returns:
        The results of the function, by rank.

    Raises:
        ConfigError: ``function`` cannot be called, or a number makes no sense.
        UnsupportedError: Ray is not installed.
        PeerTimeout: Ray had no room for the ranks in time.
        RankFailed: A rank failed, or its node was lost; ``.rank`` names the first, its traceback
            is in the message.

    Blocks: Until all ranks have ended.

    Example:
        >>> import operator
        >>> on_ray(operator.add, 2, args=(3, 4))  # doctest: +SKIP
        [7, 7]
    """
    check_function("function", function)
    cpus = read_count("cpus_per_worker", cpus_per_worker, 1, "CPU")
    try:
        ray: Any = importlib.import_module("ray")  # an extra, and slow
    except ImportError as exc:
        raise UnsupportedError(
            f"Ranks on Ray need ray, but: {exc}. Say `pip install 'phalanx[ray]'`."
        ) from exc
    ray.init(ignore_reinit_error=True)
    room = max(1, int(ray.cluster_resources().get("CPU", 0)) // cpus)
    ranks = room if workers is None else read_count("workers", workers, 1, "worker")
    secret = draw_secret()
    store = TCPStore("0.0.0.0", 0, None, is_master=True, wait_for_workers=False)  # outlives ranks
    job = {
        "OMP_NUM_THREADS": str(cpus),
        "TORCHELASTIC_RUN_ID": f"ray-{secrets.token_hex(8)}",
        "MASTER_ADDR": ray.util.get_node_ip_address(),
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    group = ray.util.placement_group([{"CPU": cpus}] * ranks, strategy="PACK")  # on few nodes
    try:
        if not group.wait(math.ceil(timeout_s)):  # Ray takes whole seconds
            raise PeerTimeout(
                f"Ray did not place {ranks} ranks with {cpus} CPU each within {timeout_s:g} s. "
                "Ask for fewer, or add nodes; `ray status` shows what is free."
            )
        node_by_bundle = ray.util.placement_group_table(group)["bundles_to_node_id"]
        nodes = [node_by_bundle[rank] for rank in range(ranks)]
        strategies = ray.util.scheduling_strategies
        actors: list[Any] = []  # Ray ends an actor that nobody holds
        for rank, node in enumerate(nodes):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(nodes[:rank].count(node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                "PHALANX_HOST": f"ray-{node}",
            }
            new_actor = ray.remote(_Actor).options(
                num_cpus=cpus,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, rank),
                runtime_env={"env_vars": {**job, **place}},  # before it imports torch
            )
            actors.append(new_actor.remote(rank, secret))
        runs = [each.run.remote(function, args) for each in actors]
        return _await_ranks(ray, runs)
    finally:
        ray.util.remove_placement_group(group)  # and the actors in it
        pause(_LAST_LINES_S)


# Any: Ray's module and references, whose types are not there where Ray is not.
def _await_ranks(ray: Any, runs: Sequence[Any]) -> list[Any]:
    """Return what the ranks return, by rank, or raise the first failure."""
    failures: dict[int, Exception] = {}  # by rank, as they come
    waiting = list(runs)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=_OTHERS_S if failures else None)
        if not done:
            break
        try:
            ray.get(done)
        except ray.exceptions.RayError as exc:  # one of a task is of the task's own type, too
            failures[runs.index(done[0])] = exc
    if failures:
        rank = min(failures, key=lambda each: isinstance(failures[each], ECHOES))
        raise RankFailed(f"Rank {rank} failed: {failures[rank]}".rstrip(), rank)
    return list(ray.get(runs))


class _Actor:
    """An actor of Ray's that is a rank."""

    def __init__(self, rank: int, secret: bytes) -> None:
        self._rank = rank
        self._secret = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - of mode 0600
        self._secret.write(secret)
        os.environ["PHALANX_SECRET_FILE"] = f"/proc/{os.getpid()}/fd/{self._secret.fileno()}"

    def __repr__(self) -> str:  # stands before each line that Ray prints
        return f"rank {self._rank}"

    # Any: what functions return.
    def run(self, function: Callable[..., Any], args: Sequence[object]) -> Any:
        """Call a function; return its result, or None where it exits with success."""
        prepare_rank()
        try:
            return function(*args)
        except SystemExit as exc:
            if exc.code:
                raise  # it ends the actor, and Ray says why
            return None

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
import pickle
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch.distributed import TCPStore

from phalanx.clock import pause
from phalanx.cluster import draw_secret
from phalanx.errors import PeerTimeout, UnsupportedError
from phalanx.launching.rank_failures import RankFailed, RankFailure, describe_failures
from phalanx.launching.rank_start import call
from phalanx.plan import check_function, read_count

__all__ = ["on_ray", "plan_ranks"]

_OTHERS_S = 3.0  # after a failure: for those of the others, one of which may be its cause
_LAST_LINES_S = 0.5  # for Ray to print what the ranks wrote last


def on_ray(
    function: Callable[..., Any],
    workers: int | None = None,
    *,
    args: Sequence[object] = (),
    cpus_per_worker: int = 1,
    max_restarts: int = 0,
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
        max_restarts: Number of restarts of all ranks after one has failed.
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
    restarts = read_count("max_restarts", max_restarts, 0)
    try:
        ray: Any = importlib.import_module("ray")  # an extra, and slow
    except ImportError as exc:
        raise UnsupportedError(
            f"Ranks on Ray need ray, but: {exc}. Say `pip install 'phalanx[ray]'`."
        ) from exc
    ray.init(ignore_reinit_error=True)
    room = max(1, int(ray.cluster_resources().get("CPU", 0)) // cpus)
    ranks = room if workers is None else read_count("workers", workers, 1, "worker")
    # Actors get their class by value: they import neither this module nor torch.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        pickled = ray.cloudpickle.dumps(partial(call, function, tuple(args)))
        run_id = f"ray-{secrets.token_hex(8)}"
        run = partial(_run_once, ray, ranks, cpus, timeout_s, pickled, run_id)
        for attempt in range(restarts):
            with suppress(RankFailed):
                return run(attempt)
        return run(restarts)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        pause(_LAST_LINES_S)


def plan_ranks(nodes: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Number the ranks node by node.

    Args:
        nodes: On which node Ray has placed each bundle.

    Returns:
        The bundle of each rank, and the variables of torchrun's that tell it its place.

    Example:
        >>> [bundle for bundle, variables in plan_ranks(["a", "b", "a"])]
        [0, 2, 1]
    """
    order = sorted(range(len(nodes)), key=lambda bundle: nodes.index(nodes[bundle]))
    plan: list[tuple[int, dict[str, str]]] = []
    for rank, bundle in enumerate(order):
        node = nodes[bundle]
        place = {
            "RANK": rank,
            "WORLD_SIZE": len(nodes),
            "LOCAL_RANK": rank - order.index(nodes.index(node)),
            "LOCAL_WORLD_SIZE": nodes.count(node),
            "PHALANX_HOST": f"ray-{node}",
        }
        plan.append((bundle, {name: str(value) for name, value in place.items()}))
    return plan


# Any: Ray's modules, handles and references, whose types are not there where Ray is not.
def _run_once(
    ray: Any, ranks: int, cpus: int, timeout_s: float, pickled: bytes, run_id: str, attempt: int
) -> list[Any]:
    """Run all ranks; return what they return, by rank, or raise the first failure."""
    secret = draw_secret()
    store = TCPStore("0.0.0.0", 0, None, is_master=True, wait_for_workers=False)  # outlives ranks
    job = {
        "OMP_NUM_THREADS": str(cpus),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
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
        strategies = ray.util.scheduling_strategies
        actors: list[Any] = []  # Ray ends an actor that nobody holds
        runs: dict[Any, int] = {}
        for bundle, place in plan_ranks([node_by_bundle[bundle] for bundle in range(ranks)]):
            where = strategies.PlacementGroupSchedulingStrategy(group, bundle)
            new_actor = ray.remote(_Actor).options(num_cpus=cpus, scheduling_strategy=where)
            actors.append(new_actor.remote(len(actors)))
            run = actors[-1].run.remote(pickled, os.getcwd(), {**job, **place}, secret)
            runs[run] = len(runs)
        return _await_ranks(ray, runs)
    finally:
        ray.util.remove_placement_group(group)  # and the actors in it


def _await_ranks(ray: Any, runs: Mapping[Any, int]) -> list[Any]:
    values: dict[int, Any] = {}
    failures: dict[int, RankFailure] = {}
    waiting = list(runs)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=_OTHERS_S if failures else None)
        if not done:
            break
        for run in done:
            rank = runs[run]
            try:
                values[rank], note = ray.get(run)
            except ray.exceptions.RayActorError as exc:
                why = " ".join(str(exc).split())
                raise RankFailed(f"Rank {rank} was lost: {why}", rank, 128 + 9) from None
            if note is not None:
                failures[rank] = RankFailure(note["exit_code"], note)
    if failures:
        raise describe_failures(failures)
    return [values[rank] for rank in range(len(values))]


class _Actor:
    """An actor of Ray's that is a rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:  # stands before each line that Ray prints
        return f"rank {self._rank}"

    def run(
        self, pickled: bytes, folder: str, variables: Mapping[str, str], secret: bytes
    ) -> object:
        """Call a pickled function in ``folder``, with more variables."""
        self._secret = tempfile.TemporaryFile()  # noqa: SIM115 - of mode 0600, until this ends
        self._secret.write(secret)
        self._secret.flush()
        path = f"/proc/{os.getpid()}/fd/{self._secret.fileno()}"
        os.environ.update({**variables, "PHALANX_SECRET_FILE": path})
        if os.path.isdir(folder):
            os.chdir(folder)
        return pickle.loads(pickled)()  # imports torch, which reads the variables

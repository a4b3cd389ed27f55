"""Start the ranks of a job on Ray: it decides which runs where, and prints their lines.

    driver: the job's store       placement group, packed
      │  run                     ┌ node a ──────────────────┐  ┌ node b ──────────┐
      ├─────────────────────────►│ actor ─► process, rank 0 │  │                  │
      ├─────────────────────────►│ actor ─► process, rank 1 │  │                  │
      └──────────────────────────┼──────────────────────────┼─►│ actor ─► rank 2  │
                                 └──────────────────────────┘  └──────────────────┘

A rank finds the variables that torchrun sets, so the same script runs under all launchers. A node
of Ray is a host, also where one machine plays several.

A rank is a process of its own, without threads of Ray's. The kernel ends it with its actor; Ray
ends the actor with its placement group or with the driver. The secret and the outcome lie in files
without a name, which end with the actor and the process.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from phalanx.clock import pause
from phalanx.cluster import draw_secret
from phalanx.distributed import keep_store
from phalanx.errors import ConfigError, PeerTimeout, UnsupportedError
from phalanx.launching.rank_failures import RankFailed, RankFailure, describe_failures
from phalanx.plan import check_function, read_count

__all__ = ["on_ray", "plan_ranks"]

_ANSWER_S = 10.0  # of a cluster; Ray itself tries for minutes
_OTHERS_S = 3.0  # after a failure: for those of the others, one of which may be its cause
_LAST_LINES_S = 0.5  # for Ray to print what the ranks wrote last
_PROGRAM = "from phalanx.launching.rank_start import call; call()"


def on_ray(
    function: Callable[..., Any],
    workers: int | None = None,
    *,
    args: Sequence[object] = (),
    cpus_per_worker: int = 1,
    address: str | None = None,
    max_restarts: int = 0,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Run ``function(*args)`` in ``workers`` processes of a Ray cluster, as ranks of one job.

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
        address: As ``ray.init`` takes it: ``"auto"`` for the Ray that runs on this machine. By
            default the Ray that this process uses already, or that one, or a new one.
        max_restarts: Number of restarts of all ranks after one has failed.
        timeout_s: Longest time of Ray to place the ranks, in seconds.

    Returns:
        The results of the function, by rank.

    Raises:
        ConfigError: ``function`` cannot be called, a number makes no sense, or there is no Ray at
            ``address``.
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
    with _connected(address) as ray:
        room = max(1, int(ray.cluster_resources().get("CPU", 0)) // cpus)
        ranks = room if workers is None else read_count("workers", workers, 1, "worker")
        call = ray.cloudpickle.dumps((function, tuple(args)))
        run = partial(_run_once, ray, ranks, cpus, timeout_s, call)
        run_id = f"ray-{secrets.token_hex(8)}"
        for attempt in range(restarts):
            with suppress(RankFailed):
                return run(run_id, attempt)
        return run(run_id, restarts)


# Any: Ray's modules, handles and references, whose types are not there where Ray is not.


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Yield Ray, connected; disconnect if we have connected it."""
    try:
        ray: Any = importlib.import_module("ray")  # an extra, and slow
    except ImportError as exc:
        raise UnsupportedError(
            f"Ranks on Ray need ray, but: {exc}. Say `pip install 'phalanx[ray]'`."
        ) from exc
    is_ours = address is not None or not ray.is_initialized()
    if is_ours:
        try:
            _check_answers(address or "")
            ray.init(address=address)
        except OSError as exc:
            raise ConfigError(
                f"`address` must be where a Ray cluster is, but is {address!r}: {exc}. "
                "Start one by `ray start --head`, or take 'local' for a new one on this machine."
            ) from exc
    # Actors get their class by value: they import neither this module nor torch.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        yield ray
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        if is_ours:
            pause(_LAST_LINES_S)
            ray.shutdown()


def _check_answers(address: str) -> None:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdecimal():  # else "auto", "local", or nothing
        socket.create_connection((host, int(port)), _ANSWER_S).close()


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
    names = list(dict.fromkeys(nodes))  # in the order of their first bundles
    plan: list[tuple[int, dict[str, str]]] = []
    for node_rank, node in enumerate(names):
        bundles = [bundle for bundle, its in enumerate(nodes) if its == node]
        for local_rank, bundle in enumerate(bundles):
            place = {
                "RANK": len(plan),
                "WORLD_SIZE": len(nodes),
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": len(bundles),
                "GROUP_RANK": node_rank,
                "GROUP_WORLD_SIZE": len(names),
                "PHALANX_HOST": f"ray-{node}",
            }
            plan.append((bundle, {name: str(value) for name, value in place.items()}))
    return plan


def _run_once(
    ray: Any, ranks: int, cpus: int, timeout_s: float, call: bytes, run_id: str, attempt: int
) -> list[Any]:
    """Run all ranks; return what they return, by rank, or raise the first failure."""
    secret, store = draw_secret(), keep_store()
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
            run = actors[-1].run.remote(call, os.getcwd(), {**job, **place}, secret)
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
                exit_code, outcome = ray.get(run)
            except ray.exceptions.RayActorError as exc:
                why = " ".join(str(exc).split())
                raise RankFailed(f"Rank {rank} was lost: {why}", rank, 128 + 9) from None
            # Of the same user's code; nothing by `sys.exit(0)`, or half of it by a signal.
            outcome = pickle.loads(outcome) if outcome and exit_code >= 0 else None
            if exit_code:
                failures[rank] = RankFailure(exit_code, outcome)
            else:
                values[rank] = outcome
    if failures:
        raise describe_failures(failures)
    return [values[rank] for rank in range(len(values))]


class _Actor:
    """An actor of Ray's; it runs a rank as a process, whose output is the actor's."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:  # stands before each line that Ray prints
        return f"rank {self._rank}"

    def run(
        self, call: bytes, folder: str, variables: Mapping[str, str], secret: bytes
    ) -> tuple[int, bytes]:
        """Run a pickled function in a process; return its exit code and outcome."""
        actor = os.getpid()
        with tempfile.TemporaryFile() as key, tempfile.TemporaryFile() as outcome:
            key.write(secret)
            key.flush()
            mine = {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # Ray's: as the driver's
                "PHALANX_SECRET_FILE": f"/proc/{actor}/fd/{key.fileno()}",  # of mode 0600
            }
            with subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM, str(actor), str(outcome.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[outcome.fileno()],
                cwd=folder if os.path.isdir(folder) else None,
                env={**os.environ, **mine, **variables},
            ) as process:
                process.communicate(call)
            outcome.seek(0)
            return process.returncode, outcome.read()

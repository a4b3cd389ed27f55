"""Start the workers of a run on Ray: it decides which runs where.

    driver                         placement group, packed
      │  start, read               ┌ node a ───────────────────┐  ┌ node b ────────────┐
      ├───────────────────────────►│ actor 0 ─► worker, rank 0 │  │                    │
      ├───────────────────────────►│ actor 1 ─► worker, rank 1 │  │                    │
      └────────────────────────────┼───────────────────────────┼─►│ actor 2 ─► rank 2  │
                                   └───────────────────────────┘  └────────────────────┘

Ranks are numbered node by node. A worker finds the variables that torchrun sets, so the same script
runs under all launchers. A node of Ray is a host, also where one machine plays several.

# Note [Pickle]
Functions and what they return travel as pickles: on connections of Ray's, which pickles its own
arguments, and between a driver and workers that run the same user's code. Nothing else does: tables
and ranks talk without it.

# Note [Which workers start again]
Where survivors take newcomers in (`Trainer(executor=Ranks())`), `rank_restarts` starts a worker
that has failed again by itself: in its actor, or in another, where Ray has room, if the actor or
its node is gone. They meet in a store that the driver keeps. A worker for which there is no room
is waited for no longer than the others run.

When these are used up, all workers of the attempt end, and all are started, where Ray places them
anew (a group that it keeps may lie on a node that is gone), with a new port and a higher
TORCHELASTIC_RESTART_COUNT: what `max_restarts` means under `phalanx launch`. That serves every
script.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from phalanx.clock import pause
from phalanx.cluster.ray_worker import Ended, RayWorker
from phalanx.cluster.secret import Secret, draw_secret
from phalanx.distributed import (
    STORE,
    RankFailed,
    describe_failures,
    keep_store,
    process_failure,
    run_script,
    signals_put_back,
    tell_of_death,
)
from phalanx.errors import ConfigError, PeerTimeout, UnsupportedError
from phalanx.ipc import Waiting
from phalanx.plan import check_function, read_count

__all__ = ["RankPlace", "RayJob", "launch_script_on_ray", "on_ray", "plan_ranks"]

_GRACE_S = 10.0  # for what a worker does on SIGTERM
_ENDED_S = 10.0  # and for Ray, to tell the driver
_KILLED = -9
_AGAIN_S = 0.2
_ANSWER_S = 10.0
_NO_ROOM_S = 5.0  # until the warning: the user may add a node, or ask for less


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """How many workers, on which Ray, and how often they are tried.

    Args:
        workers: How many; None for as many as the cluster has room for.
        cpus_per_worker: Ray's CPUs for each, which are also its threads.
        address: As `ray.init` takes it. None: the Ray of RAY_ADDRESS or of this machine, or a new
            one on this machine.
        max_restarts: How often all workers are started again after one has failed.
        rank_restarts: How often each worker is started again by itself before that, while the
            others continue: for scripts with elastic ranks (`Ranks()`).
        secret_file: What tables are encrypted with; None for a new secret.
        timeout_s: How long Ray may take to place the workers.
        colour: Whether the line prefixes bear colours.
    """

    workers: int | None = None
    cpus_per_worker: int = 1
    address: str | None = None
    max_restarts: int = 0
    rank_restarts: int = 0
    secret_file: str | None = None
    timeout_s: float = 60.0
    colour: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None:
            read_count("workers", self.workers, 1, "worker")
        read_count("cpus_per_worker", self.cpus_per_worker, 1, "CPU")
        read_count("max_restarts", self.max_restarts, 0)
        read_count("rank_restarts", self.rank_restarts, 0)
        if not self.timeout_s > 0:
            raise ConfigError(f"`timeout_s` must be above 0 seconds, but is {self.timeout_s!r}.")


def on_ray(
    function: Callable[..., Any],
    workers: int | None = None,
    *,
    args: Sequence[object] = (),
    cpus_per_worker: int = 1,
    address: str | None = None,
    max_restarts: int = 0,
    rank_restarts: int = 0,
    secret_file: str | None = None,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Run ``function(*args)`` in ``workers`` processes of a Ray cluster, as ranks of one job.

    Each worker finds torchrun's variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, …), so
    ``phalanx.tables.join()``, ``torch.distributed.init_process_group()`` and
    ``phalanx.Trainer(executor="ranks")`` work there as under ``phalanx launch``. Their output
    appears here, with the rank before each line. Tables between nodes are encrypted, with a secret
    that is made for this run and handed to the actors.

    Args:
        function: One that was typed in a notebook as well; Ray brings it to the workers. Modules
            that it imports must be on every node.
        workers: How many; by default as many as the cluster has room for.
        args: Its arguments, which are pickled.
        cpus_per_worker: Ray's CPUs for each worker, and its threads unless ``OMP_NUM_THREADS`` is
            set here.
        address: As ``ray.init`` takes it: ``"auto"`` for the Ray that runs on this machine. By
            default that, or a new one on this machine alone. Where this process has called
            ``ray.init`` already, that Ray is used.
        max_restarts: How often all are started again after one has failed.
        rank_restarts: How often each worker is started again by itself before that, while the
            others continue: for ``phalanx.Trainer(executor=phalanx.Ranks())``. One that comes
            when the others have finished returns None.
        secret_file: A secret of your own, made by ``phalanx secret``; only here, on no node.
        timeout_s: How long Ray may take to place the workers, in seconds.

    Returns:
        What each worker returned, by rank.

    Raises:
        ConfigError: ``function`` cannot be called, a number makes no sense, or there is no Ray at
            ``address``.
        UnsupportedError: Ray is not installed.
        PeerTimeout: Ray had no room for the workers in time.
        RankFailed: A worker was killed, exited, or raised an error that cannot be pickled.
        Exception: What the first worker that failed has raised, with a note that names the worker,
            and its traceback as the cause.

    Blocks: Until all workers have ended. None outlives the call.

    Example:
        >>> import operator
        >>> on_ray(operator.add, 2, args=(3, 4))  # doctest: +SKIP
        [7, 7]
    """
    check_function("function", function)
    job = RayJob(
        workers=workers,
        cpus_per_worker=cpus_per_worker,
        address=address,
        max_restarts=max_restarts,
        rank_restarts=rank_restarts,
        secret_file=secret_file,
        timeout_s=timeout_s,
    )
    return [pickle.loads(value) for value in _run(job, function, args)]  # see Note [Pickle]


def launch_script_on_ray(script: Path, args: Sequence[str], job: RayJob) -> None:
    """Run a Python script in every worker of ``job``; see :func:`on_ray`.

    Raises:
        ConfigError: There is no such script.
        RankFailed: A worker failed, and no attempts were left.

    Blocks: Until all workers have ended.
    """
    if not script.is_file():
        raise ConfigError(f"`script` must be a Python file, but there is no file {str(script)!r}.")
    try:
        _run(job, run_script, (str(script), args))
    except RankFailed:
        raise
    except Exception as exc:
        if isinstance(exc.__cause__, RankFailed):  # which tells it as `phalanx launch` does
            raise exc.__cause__ from None
        raise


# --- where each rank runs -------------------------------------------------------------------------


class RankPlace(NamedTuple):
    """Where a rank runs.

    Attributes:
        bundle: Of the placement group.
        node: Ray's id of the node.
        local_rank: Its number on that node.
        num_local: How many run there.
        node_rank: The node's number.
        num_nodes: How many nodes there are.
    """

    bundle: int
    node: str
    local_rank: int
    num_local: int
    node_rank: int
    num_nodes: int

    def variables(self, rank: int, size: int) -> dict[str, str]:
        """Return what torchrun would tell this rank of its place, and which host it is on."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_local),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(size),
            "ROLE_NAME": "default",
            "PHALANX_HOST": f"ray-{self.node}",
        }


def plan_ranks(nodes: Sequence[str]) -> list[RankPlace]:
    """Number the ranks node by node.

    Args:
        nodes: On which node Ray has placed each bundle.

    Returns:
        The place of each rank.

    Example:
        >>> [place.bundle for place in plan_ranks(["a", "b", "a"])]
        [0, 2, 1]
    """
    bundles_by_node: dict[str, list[int]] = {}
    for bundle, node in enumerate(nodes):
        bundles_by_node.setdefault(node, []).append(bundle)
    return [
        RankPlace(bundle, node, local_rank, len(bundles), node_rank, len(bundles_by_node))
        for node_rank, (node, bundles) in enumerate(bundles_by_node.items())
        for local_rank, bundle in enumerate(bundles)
    ]


# --- Ray ------------------------------------------------------------------------------------------
# Any: Ray's modules, handles and references, whose types are not there where Ray is not.


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Yield Ray, connected; disconnect if we have connected it."""
    try:
        import ray  # an extra, and slow
    except ImportError as exc:
        raise UnsupportedError(
            f"To start workers on Ray needs ray, which cannot be imported: {exc}. Say "
            "`pip install 'phalanx[ray]'`."
        ) from exc
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(
                "`address` must be None where this process has called `ray.init`, but is "
                f"{address!r}. Leave it out, or call `ray.shutdown()` before."
            )
        yield ray
        return
    if address is not None:
        _check_answers(address)
    try:
        with signals_put_back():  # SIGTERM ends a driver as before, and Ray then ends its actors
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as exc:
        raise ConfigError(
            f"`address` must be where a Ray cluster is, but is {address!r}, and Ray says: {exc} "
            "Start one by `ray start --head`."
        ) from exc
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuse an address of which nobody hears; Ray itself tries it for minutes."""
    found = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = found.hostname, found.port
    except ValueError:  # Ray says what is wrong with it
        return
    if host is None or port is None:  # "auto", "local"
        return
    try:
        socket.create_connection((host, port), _ANSWER_S).close()
    except OSError as exc:
        raise ConfigError(
            f"`address` must be where a Ray cluster is, but nothing answers at {host}:{port} "
            f"({exc}). See `ray status` there, and that the port can be reached from here."
        ) from exc


@contextmanager
def _reserved(workers: int, job: RayJob) -> Iterator[Any]:
    """Yield a placement group with a bundle for each worker, few nodes before many."""
    from ray.util import placement_group, remove_placement_group  # an extra

    group = placement_group([{"CPU": job.cpus_per_worker}] * workers, strategy="PACK")
    try:
        yield group
    finally:
        remove_placement_group(group)


def _place(ray: Any, group: Any, job: RayJob) -> list[RankPlace]:
    """Wait until Ray has placed every bundle; return where. Say early that there is no room."""
    from ray.util import placement_group_table  # an extra

    def say(waited_s: float) -> str:
        total = ray.cluster_resources().get("CPU", 0)
        free = ray.available_resources().get("CPU", 0)
        return (
            f"Ray did not place {group.bundle_count} workers with {job.cpus_per_worker} CPU each "
            f"within {waited_s:g} s; the cluster has {total:g} CPUs, of which {free:g} are free."
        )

    def is_placed(within_s: float) -> bool:
        return bool(group.wait(math.ceil(within_s)))  # Ray takes whole seconds

    waiting = Waiting(job.timeout_s)
    if not is_placed(min(_NO_ROOM_S, job.timeout_s)) and not waiting.over():
        sys.stderr.write(f"{say(_NO_ROOM_S)} Waiting for room, {job.timeout_s:g} s in all.\n")
    if not is_placed(waiting.remaining_s()):
        raise PeerTimeout(f"{say(job.timeout_s)} Ask for fewer workers, or give it more nodes.")
    node_by_bundle = placement_group_table(group)["bundles_to_node_id"]
    return plan_ranks([node_by_bundle[bundle] for bundle in range(group.bundle_count)])


# --- the run --------------------------------------------------------------------------------------


def _run(job: RayJob, function: Callable[..., Any], args: Sequence[object]) -> list[bytes]:
    """Call the function in every worker; return what they return, pickled, by rank."""
    secret = Secret.read(job.secret_file).content if job.secret_file else draw_secret()
    with _connected(job.address) as ray:
        workers = job.workers
        if workers is None:
            workers = max(1, int(ray.cluster_resources().get("CPU", 0)) // job.cpus_per_worker)
        try:
            call = ray.cloudpickle.dumps((function, tuple(args)))
        except Exception as exc:
            raise ConfigError(
                "`function` and `args` must be picklable, as they travel to the workers, but are "
                f"not: {exc}."
            ) from exc
        sys.stderr.write(f"{workers} workers on Ray at {ray.get_runtime_context().gcs_address}\n")
        variables = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(job.cpus_per_worker)),
            "TORCHELASTIC_RUN_ID": f"ray-{secrets.token_hex(8)}",
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        }
        count = 0
        while True:
            variables["TORCHELASTIC_RESTART_COUNT"] = str(count)
            # Kept for ranks that survive others, until the attempt has ended.
            store = keep_store() if job.rank_restarts else None
            variables[STORE] = f"{ray.util.get_node_ip_address()}:{store.port}" if store else ""
            with _reserved(workers, job) as group:
                attempt = _Attempt(ray, group, _place(ray, group, job), job, store)
                try:
                    attempt.start(call, variables, secret)
                    attempt.follow()
                finally:
                    attempt.close()
            if count == job.max_restarts or not attempt.failures():
                return attempt.values()
            count += 1


class _Attempt:
    """The workers of one attempt, from their start to the end of the last."""

    def __init__(
        self,
        ray: Any,
        group: Any,
        places: Sequence[RankPlace],
        job: RayJob,
        store: Any,  # what `keep_store` returns, or None
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # an extra

        self._ray = ray
        self._places = list(places)
        self._job = job
        self._store = store
        self._address_by_node = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        actor = ray.remote(RayWorker)

        def new_worker(place: RankPlace) -> Any:
            return actor.options(
                num_cpus=job.cpus_per_worker,
                max_concurrency=2,  # `end` comes while `read` waits
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, place.bundle),
            ).remote()

        self._new_worker = new_worker
        self._workers = [new_worker(place) for place in places]
        self._restarts = [0] * len(places)
        self._starting: set[int] = set()  # ranks that wait for an actor
        self._asked: dict[Any, int] = {}  # ranks by reference to their next answer
        self._pids: dict[int, int] = {}
        self._ended: dict[int, Ended] = {}
        self._lost: dict[int, str] = {}

    def start(self, call: bytes, variables: Mapping[str, str], secret: bytes) -> None:
        """Start all workers."""
        self._call, self._secret = call, secret
        try:
            port = self._ray.get(self._workers[0].free_port.remote())
        except self._ray.exceptions.RayActorError as exc:
            self._end_lost(0, exc)  # none has begun, so none can go on without it
            return
        self._variables = {
            **variables,
            "MASTER_ADDR": self._address_by_node[self._places[0].node],
            "MASTER_PORT": str(port),
        }
        for rank in range(len(self._places)):
            self._start(rank)

    def _start(self, rank: int) -> None:
        place = self._places[rank].variables(rank, len(self._places))
        mine = {**self._variables, **place, "PHALANX_RANK_RESTARTS": str(self._restarts[rank])}
        started = self._workers[rank].start.remote(self._call, os.getcwd(), mine, self._secret)
        self._asked[started] = rank

    def _start_again(self, rank: int, how: str, *, anew: bool) -> bool:
        """Start a worker again by itself, in another actor if need be; False if it shall not be."""
        if self.failures():
            return False
        if (
            rank in self._starting
        ):  # Ray has not found another place for that of a node that is gone
            pause(_AGAIN_S)
        elif self._restarts[rank] == self._job.rank_restarts:
            return False
        else:
            self._restarts[rank] += 1
            told = (
                f"Rank {rank} (process {self._pids.get(rank, 0)}) {how}. It is started again "
                f"({self._restarts[rank]} of {self._job.rank_restarts}); elastic ranks "
                "(`Ranks()`) continue."
            )
            self._write(sys.stderr, rank, [told])
            if self._store is not None and rank in self._pids:
                tell_of_death(self._store, rank, self._pids[rank])
        if anew:
            self._workers[rank] = self._new_worker(self._places[rank])
        self._starting.add(rank)
        self._asked[self._workers[rank].node.remote()] = rank
        return True

    def follow(self) -> None:
        """Show what the workers write, until all have ended; after a failure, end the others."""
        ending: Waiting | None = None
        while not self._starting.issuperset(self._asked.values()):
            if ending is None and self.failures():
                self._end_others()
                ending = Waiting(_GRACE_S + _ENDED_S)
            if ending is not None and ending.over():
                return
            timeout_s = None if ending is None else ending.remaining_s()
            done, _ = self._ray.wait(list(self._asked), timeout=timeout_s)
            for reference in done:
                self._take(reference, self._asked.pop(reference))

    def _take(self, reference: Any, rank: int) -> None:
        try:
            found = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as exc:
            self._lose(rank, exc)
            return
        if isinstance(found, Ended):
            how = f"ended with exit code {found.exit_code}"
            if found.exit_code < 0:
                how = f"was killed by {signal.Signals(-found.exit_code).name}"
            if found.exit_code == 0 or not self._start_again(rank, how, anew=False):
                self._ended[rank] = found
            return
        if isinstance(found, str):  # the node of an actor that is there
            self._starting.discard(rank)
            self._places[rank] = self._places[rank]._replace(node=found)
            self._start(rank)
            return
        self._asked[self._workers[rank].read.remote()] = rank
        if isinstance(found, int):
            self._pids[rank] = found
            return
        for stream, lines in found:
            self._write(sys.stdout if stream == 1 else sys.stderr, rank, lines)

    def _write(self, target: TextIO, rank: int, lines: Sequence[str]) -> None:
        colour, plain = (f"\x1b[9{self._places[rank].local_rank % 8}m", "\x1b[0m")
        before = f"{colour}[rank {rank}]{plain} " if self._job.colour else f"[rank {rank}] "
        target.write("".join(f"{before}{line}\n" for line in lines))
        target.flush()

    def _lose(self, rank: int, exc: Exception) -> None:
        """Note that a worker's actor is gone; the kernel has killed its process with it."""
        if not self._start_again(rank, "has lost its actor", anew=True):
            self._end_lost(rank, exc)

    def _end_lost(self, rank: int, exc: Exception) -> None:
        self._ended[rank] = Ended(self._pids.get(rank, 0), _KILLED, b"")
        self._lost[rank] = " ".join(str(exc).split())

    def _end_others(self) -> list[Any]:
        left = set(self._asked.values())
        return [self._workers[rank].end.remote(_GRACE_S) for rank in sorted(left)]

    def close(self) -> None:
        """End whatever still runs, and give the actors back."""
        answers = self._end_others()
        if answers:
            self._ray.wait(answers, num_returns=len(answers), timeout=_GRACE_S + _ENDED_S)
        for worker in self._workers:
            self._ray.kill(worker)

    def failures(self) -> dict[int, Ended]:
        """Return the workers that have failed so far, by rank."""
        return {rank: ended for rank, ended in self._ended.items() if ended.exit_code != 0}

    def values(self) -> list[bytes]:
        """Return what each worker has returned, or raise what the first that failed has."""
        failures = self.failures()
        if not self._ended:  # they were to start again, and had no place
            raise RankFailed("A worker must run to its end, but Ray found no place for any.")
        if not failures:
            return [  # see Note [Pickle]
                _read_outcome(self._ended[rank])[1] if rank in self._ended else pickle.dumps(None)
                for rank in range(len(self._places))
            ]
        failed = describe_failures(
            {
                rank: process_failure(
                    self._places[rank].local_rank,
                    ended.pid,
                    ended.exit_code,
                    _read_outcome(ended)[0],
                )
                for rank, ended in failures.items()
            }
        )
        rank = failed.rank
        assert rank is not None
        node = self._places[rank].node
        where = f"on Ray's node {self._address_by_node[node]} ({node[:8]})"
        if rank in self._lost:
            failed.add_note(f"Its actor {where} is lost: {self._lost[rank]}")
        else:
            failed.add_note(f"It ran {where}.")
        try:
            error = pickle.loads(_read_outcome(self._ended[rank])[1])  # see Note [Pickle]
        except Exception:  # its class is known to the worker only, or the process was killed
            raise failed from None
        if not isinstance(error, Exception):
            raise failed
        error.add_note(f"Raised by worker {rank} of {len(self._places)}, {where}.")
        raise error from failed


# Any: JSON of a rank's own.
def _read_outcome(ended: Ended) -> tuple[dict[str, Any] | None, bytes]:
    """Return the note on a failure, if there is one, and the error or the value, pickled."""
    try:
        note, content = pickle.loads(ended.outcome)  # see Note [Pickle]
    except (EOFError, pickle.UnpicklingError):  # it was killed before or while it wrote
        return None, b""
    return note, content

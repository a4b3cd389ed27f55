"""One way to start workers: `world.run(body, n)` returns what ``body`` returns in each of them.

=================  =======================================  ======================
worlds             workers                                  what ``body`` is given
=================  =======================================  ======================
`TABLE_WORLDS`     threads, processes, processes of hosts   its `TableGroup`
`EXECUTOR_WORLDS`  replicas of one trainer, or ranks        executor and replicas
=================  =======================================  ======================

Processes are started once and used again, since a start takes longer than most tests; a file of
tests ends them by `close`. A body that runs in processes is a function of a module, or a `partial`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from phalanx import tables
from phalanx.cluster import make_secret
from tests.multiprocess import hosts
from tests.multiprocess.children import Parent, ReusedChildren
from tests.multiprocess.networks import Networks, networks_of_hosts
from tests.multiprocess.ranks import Ranks

DEADLINE_S = 60.0

Body = Callable[..., Any]


class World(ABC):
    """A way to start workers."""

    name: str

    @abstractmethod
    def run(self, body: Body, n: int = 3, **how: Any) -> list[Any]:
        """Call ``body`` in ``n`` workers at once; return what they return, by number."""

    def __repr__(self) -> str:
        return self.name


# --- tables ---------------------------------------------------------------------------------------


class ThreadTables(World):
    """Workers are this process and its threads; ``how`` are options of `tables.join`."""

    name = "threads"

    def run(self, body: Body, n: int = 3, *, run: str = "", **how: Any) -> list[Any]:
        results: list[Any] = [None] * n
        raised: list[BaseException] = []

        def work(group: tables.TableGroup) -> None:
            try:
                with group:
                    results[group.worker_id] = body(group)
            except BaseException as exc:
                raised.append(exc)

        group = tables.join(num_workers=n, timeout_s=DEADLINE_S, **how)
        groups = [group, *(group.thread_worker() for _ in range(n - 1))]
        threads = [threading.Thread(target=work, args=(each,)) for each in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
        if raised:
            raise raised[0]
        return results


class ProcessTables(World):
    """Workers are processes of this host, in the run ``run``."""

    name = "processes"

    def run(self, body: Body, n: int = 3, *, run: str = "", **how: Any) -> list[Any]:
        results = dict(_children.run(_join_and_run, [(run, n, body, how)] * n))
        assert sorted(results) == list(range(n))
        return [results[worker] for worker in range(n)]


class HostTables(World):
    """Workers are processes, spread over as many hosts, simulated on this one."""

    name = "hosts"

    def run(self, body: Body, n: int = 3, *, run: str = "", **how: Any) -> list[Any]:
        return hosts.run_hosts(n, run, n, body, **how)


class NetworkTables(World):
    """Workers are processes of three hosts, each a namespace of the network; needs root."""

    name = "networks"

    def run(self, body: Body, n: int = 3, *, run: str = "", **how: Any) -> list[Any]:
        if not _networks:
            secret = Path(_open.enter_context(TemporaryDirectory())) / "secret"
            make_secret(secret)
            _networks.append((_open.enter_context(networks_of_hosts(n)), str(secret)))
        networks, how["secret_file"] = _networks[0]
        return hosts.run_hosts(n, run, n, body, networks=networks, **how)


_children = ReusedChildren()
_networks: list[tuple[Networks, str]] = []  # and the file of a secret
_open = ExitStack()


def _join_and_run(parent: Parent, run: str, n: int, body: Body, how: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with tables.join(run, num_workers=n, timeout_s=DEADLINE_S, **how) as group:
        result = body(group)
        parent.tell((group.worker_id, result))


THREADS, PROCESSES, HOSTS = ThreadTables(), ProcessTables(), HostTables()
NETWORKS = NetworkTables()
TABLE_WORLDS = [
    pytest.param(THREADS, 1, id="one process"),
    pytest.param(THREADS, 2, id="2 threads", marks=pytest.mark.night),
    pytest.param(THREADS, 3, id="3 threads"),
    pytest.param(PROCESSES, 1, id="1 process", marks=pytest.mark.night),
    pytest.param(PROCESSES, 2, id="2 processes"),
    pytest.param(PROCESSES, 3, id="3 processes", marks=pytest.mark.night),
    pytest.param(HOSTS, 2, id="2 hosts", marks=pytest.mark.night),
    pytest.param(HOSTS, 3, id="3 hosts"),
    pytest.param(NETWORKS, 3, id="3 networks", marks=pytest.mark.night),
]


def in_table_worlds(
    *, at_least: int = 1, at_most: int = 3, only: str = "", **factor: Sequence[Any]
) -> pytest.MarkDecorator:
    """Run a test with each ``world`` of tables and number ``n`` of workers that is asked for.

    Args:
        at_least: The fewest workers.
        at_most: The most.
        only: A word in the names of the worlds that are asked for.
        factor: One more argument of the test and its values. By day threads meet all of them,
            and processes and hosts, where each case takes as long as ten, the last one.
    """
    chosen = [
        each
        for each in TABLE_WORLDS
        if at_least <= each.values[1] <= at_most and only in str(each.id)
    ]
    if not factor:
        return pytest.mark.parametrize(("world", "n"), chosen)
    ((name, values),) = factor.items()
    cases = []
    for each in chosen:
        for value in values:
            by_day = each.values[0] is THREADS or value is values[-1]
            marks = each.marks if by_day else pytest.mark.night
            cases.append(pytest.param(*each.values, value, id=f"{value}-{each.id}", marks=marks))
    return pytest.mark.parametrize(("world", "n", name), cases)


# --- executors ------------------------------------------------------------------------------------


class ExecutorWorld(World):
    """Workers are the replicas of one trainer of this process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, body: Body, n: int = 3, **how: Any) -> list[Any]:
        """Return the one result of ``body(executor, replicas)``."""
        return [body(self.name, n, **how)]


class RankWorld(World):
    """Workers are ``n`` ranks of one group, each with a trainer of one replica."""

    name = "ranks"

    def run(self, body: Body, n: int = 3, **how: Any) -> list[Any]:
        """Return the result of ``body("ranks", 1)`` of each rank."""
        if n not in _ranks:
            _ranks[n] = Ranks(n, backend="phalanx")
        return _ranks[n].run(partial(_as_rank, body, how))


_ranks: dict[int, Ranks] = {}


def _as_rank(body: Body, how: dict[str, Any], rank: int) -> Any:
    torch.manual_seed(100 + rank)  # a trainer takes the weights of rank 0
    return body("ranks", 1, **how)


INLINE, THREAD_REPLICAS, PROCESS_REPLICAS = map(ExecutorWorld, ("inline", "threads", "processes"))
RANKS = RankWorld()
EXECUTOR_WORLDS = [
    pytest.param(INLINE, 1, id="inline"),
    pytest.param(THREAD_REPLICAS, 1, id="1 thread", marks=pytest.mark.night),
    pytest.param(THREAD_REPLICAS, 3, id="3 threads"),
    pytest.param(PROCESS_REPLICAS, 1, id="1 process", marks=pytest.mark.night),
    pytest.param(PROCESS_REPLICAS, 2, id="2 processes"),
    pytest.param(PROCESS_REPLICAS, 3, id="3 processes", marks=pytest.mark.night),
    pytest.param(RANKS, 2, id="2 ranks", marks=pytest.mark.night),
    pytest.param(RANKS, 3, id="3 ranks"),
]
WORLDS_BY_DAY = [each.values for each in EXECUTOR_WORLDS if not each.marks]
"""Worlds with their workers, for `tests.products.some_by_day` and other tests of many cases."""
EXECUTORS = [("inline", 1), ("threads", 3), ("processes", 2)]
"""Executors with their replicas, for tests whose trainers are all of this process."""
in_every_executor = pytest.mark.parametrize(("executor", "replicas"), EXECUTORS)
in_executor_worlds = pytest.mark.parametrize(("world", "n"), EXECUTOR_WORLDS)


def close() -> None:
    """End the processes that worlds have started; the next run starts others."""
    _children.close()
    hosts.WORKERS.close()
    hosts.IN_NETWORKS.close()
    _open.close()
    _networks.clear()
    for ranks in _ranks.values():
        ranks.__exit__()
    _ranks.clear()

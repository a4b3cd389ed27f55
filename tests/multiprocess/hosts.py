"""Workers on several hosts, played on one machine: `PHALANX_HOST` says which is which.

In contract tests the server of a host is a thread of its first worker, so that no test has to wait
for processes that import torch. Tests of faults start real ones.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import torch

from phalanx import tables
from phalanx.cluster import Secret
from phalanx.tables import host_server, host_supervisor
from tests.multiprocess.children import Parent, ReusedChildren

DEADLINE_S = 60.0
WORKERS = ReusedChildren()


def free_port() -> int:
    """Return a port that was free a moment ago, for a job's store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def variables(run: str, worker: int, num_workers: int, num_hosts: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a worker; workers are spread evenly, in their order."""
    host = worker * num_hosts // num_workers
    return {
        "RANK": str(worker),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(-(-num_workers // num_hosts)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run,
        "PHALANX_HOST": f"host-{host}",
    }


def become_worker(given: dict[str, str]) -> list[threading.Thread]:
    """Let `join` find ``given``, and start a host's server as a thread of this process.

    Returns:
        The thread, once it is started.
    """
    torch.set_num_threads(1)
    os.environ.update(given)
    threads: list[threading.Thread] = []
    host_server._OVER_S = 0.05

    def start(spec: host_server.ServerSpec) -> None:
        thread = threading.Thread(target=host_supervisor.supervise, args=(spec,))
        threads.append(thread)
        thread.start()

    host_supervisor.start_supervisor = start
    host_supervisor.run_server = serve_here
    return threads


def serve_here(spec: host_server.ServerSpec, secret: Secret | None) -> bool:
    """Be the server, in place of a process that is forked."""
    host_server.serve(spec, secret)
    return True


def _worker(parent: Parent, given: dict[str, str], body: Callable, how: dict) -> None:
    threads = become_worker(given)
    with tables.join(timeout_s=DEADLINE_S, **how) as world:
        result = body(world)
        parent.tell((world.worker_id, result))
    wait_for_servers(threads)


def wait_for_servers(threads: list[threading.Thread]) -> None:
    """Wait until the servers that are threads of this process have ended."""
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a server outlives its workers"


def run_hosts(num_hosts: int, run: str, num_workers: int, body: Callable, **how: object) -> list:
    """Run ``body`` as each of the workers; return what they return, by number."""
    port = free_port()
    given = [variables(run, worker, num_workers, num_hosts, port) for worker in range(num_workers)]
    results = dict(WORKERS.run(_worker, [(each, body, how) for each in given]))
    assert sorted(results) == list(range(num_workers))
    return [results[worker] for worker in range(num_workers)]

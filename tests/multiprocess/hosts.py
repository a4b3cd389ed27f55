"""Workers on several hosts, simulated on one machine: `PHALANX_HOST` says which is which."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from unittest.mock import patch

import torch

from phalanx import tables
from phalanx.distributed import this_host
from phalanx.ipc import RunDirectory
from phalanx.tables import host_rendezvous, host_server
from tests.multiprocess.children import Parent, ReusedChildren, wait_for_exit
from tests.multiprocess.networks import Networks, enter

DEADLINE_S = 60.0
WORKERS = ReusedChildren()
IN_NETWORKS = ReusedChildren()


def free_port() -> int:
    """Return a port that was free a moment ago, for a job's store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def variables(
    run: str,
    worker: int,
    num_workers: int,
    num_hosts: int,
    port: int,
    networks: Networks | None = None,
) -> dict[str, str]:
    """Return what torchrun tells a worker; workers are spread evenly, in their order."""
    host = worker * num_hosts // num_workers
    return {
        "NETWORK": networks.names[host] if networks else "",
        "RANK": str(worker),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(-(-num_workers // num_hosts)),
        "MASTER_ADDR": networks.addresses[0] if networks else "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run,
        "PHALANX_HOST": f"host-{host}",
    }


def become_worker(given: dict[str, str]) -> None:
    """Let `join` find ``given``, and a host's server, its fork, end soon after its workers."""
    torch.set_num_threads(1)
    os.environ.update(given)
    if given["NETWORK"]:
        enter(given["NETWORK"])
    host_server._OVER_S = 0.05


def _worker(parent: Parent, given: dict[str, str], body: Callable, how: dict) -> None:
    become_worker(given)
    with tables.join(timeout_s=DEADLINE_S, **how) as world:
        result = body(world)
        parent.tell((world.worker_id, result))


def run_on(run: str, host: int) -> str:
    """Return what a run is called on a host that this machine simulates."""
    with patch.dict(os.environ, PHALANX_HOST=f"host-{host}"):
        return host_rendezvous.run_on(this_host(), f"torchrun-{run}-0")


def kill_server(run: str, host: int) -> None:
    """Kill the server of a host, if it has one, and return when it has ended."""
    with regions_on(run, host) as regions:
        page = host_server.ServerPage(regions)
        if page.is_served:
            server = page.serving.owner
            os.kill(server, signal.SIGKILL)
            wait_for_exit(server)


def regions_on(run: str, host: int) -> RunDirectory:
    """Become a member of the run on a host that this machine simulates."""
    return RunDirectory.join(f"tables-{run_on(run, host)}")


def run_hosts(
    num_hosts: int,
    run: str,
    num_workers: int,
    body: Callable,
    *,
    worker: Callable = _worker,
    networks: Networks | None = None,
    **how: object,
) -> list:
    """Run ``body`` as each of the workers, which ``worker`` joins; return the results by number."""
    port, spread = free_port(), (num_workers, num_hosts)
    given = [variables(run, rank, *spread, port, networks) for rank in range(num_workers)]
    pool = IN_NETWORKS if networks else WORKERS
    results = dict(pool.run(worker, [(each, body, how) for each in given]))
    assert sorted(results) == list(range(num_workers))
    return [results[rank] for rank in range(num_workers)]

"""Tables over three hosts in networks of their own: cut off, and slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from phalanx import tables
from phalanx.cluster import make_secret
from phalanx.errors import PeerTimeout
from phalanx.ipc import RunDirectory
from tests.multiprocess.children import Child, Children, Parent
from tests.multiprocess.hosts import become_worker, variables
from tests.multiprocess.networks import Networks, networks_of_hosts

NUM_HOSTS = 3
PORT = 29500  # of a network that nobody else is in
DEADLINE_S = 60.0
CUT_S = 5.0
ROWS = 30_001  # 10,000 on each host but one more on the first
SLOW = "1mbit"


@pytest.fixture
def networks() -> Iterator[Networks]:
    with networks_of_hosts(NUM_HOSTS) as networks:
        yield networks


@contextmanager
def workers(networks: Networks, folder: Path, body: Callable[..., None]) -> Iterator[list[Child]]:
    make_secret(folder / "secret")
    with Children() as children:
        started = []
        for worker in range(NUM_HOSTS):
            given = variables(networks.names[0], worker, NUM_HOSTS, NUM_HOSTS, PORT, networks)
            given["PHALANX_SECRET_FILE"] = str(folder / "secret")
            started.append(children.start(be_worker, given, body))
        yield started
    RunDirectory.sweep()


def be_worker(parent: Parent, given: dict[str, str], body: Callable) -> None:
    become_worker(given)
    with tables.join(timeout_s=DEADLINE_S) as world:
        body(parent, world)
    parent.tell("left")


def add_until_told(parent: Parent, world: tables.TableGroup) -> None:
    table = world.array(2 * NUM_HOSTS, torch.int64, name="t")
    world.barrier()
    num_adds, longest_s = 0, 0.0
    parent.tell("adding")
    while not parent.connection.poll():
        began = time.perf_counter()
        table.add(torch.ones(2 * NUM_HOSTS, dtype=torch.int64))
        longest_s = max(longest_s, time.perf_counter() - began)
        num_adds += 1
    world.barrier()
    parent.tell((num_adds, longest_s, table.get().tolist()))
    world.barrier()


def test_calls_go_on_after_a_link_was_down_for_5_s(networks, tmp_path):
    with workers(networks, tmp_path, add_until_told) as started:
        for worker in started:
            assert worker.get() == "adding"
        networks.cut(1)
        threading.Event().wait(CUT_S)
        networks.mend(1)
        for worker in started:
            worker.put("enough")
        found = [worker.get() for worker in started]
        for worker in started:
            assert worker.get() == "left"
    total = sum(num_adds for num_adds, _, _ in found)
    assert min(num_adds for num_adds, _, _ in found) > 0
    assert [values for _, _, values in found] == [[total] * (2 * NUM_HOSTS)] * NUM_HOSTS
    assert min(longest_s for _, longest_s, _ in found) > CUT_S - 1.0  # all of them waited


def use_a_slow_link(parent: Parent, world: tables.TableGroup) -> None:
    table = world.matrix(ROWS, 8, name="t")
    world.barrier()
    if world.worker_id == 0:
        parent.tell("ready")
        assert parent.hear() == "it is slow"
        far = range(10_001, 20_001)  # host 1's: 320 kB, which take some three seconds
        table.add(torch.ones(len(far), 8), rows=far)
        assert torch.equal(table.get(far), torch.ones(len(far), 8))
        world.timeout_s = 0.5
        with pytest.raises(PeerTimeout) as caught:
            table.get(far)
        parent.tell(str(caught.value))
        world.timeout_s = DEADLINE_S
        table.add(torch.ones(ROWS, 8))
        assert table.get()[::5_000, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    world.barrier()


@pytest.mark.night
def test_a_slow_link_delays_calls_or_ends_them_with_the_hosts_name(networks, tmp_path):
    with workers(networks, tmp_path, use_a_slow_link) as started:
        assert started[0].get() == "ready"
        networks.limit(1, SLOW)
        started[0].put("it is slow")
        told = started[0].get()
        assert told.startswith("Host 1 (")
        assert f"(server at {networks.addresses[1]}:" in told
        assert "did not answer `get` of table 't' within " in told
        for worker in started:
            assert worker.get() == "left"

"""Somebody reads and writes the job's store, one of torch's, while a run on three hosts uses it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from phalanx import tables
from phalanx.cluster import Connection, Endpoint, Secret, make_secret
from phalanx.errors import ConfigError, PeerTimeout, StateError
from phalanx.ipc import wait_until
from phalanx.tables import host_rendezvous
from phalanx.tables.host_server import ServerPage, ServerWatch
from phalanx.tables.router import Operation
from tests.multiprocess.children import DEADLINE_S, Children, Parent, wait_for_exit
from tests.multiprocess.hosts import become_worker, regions_on, run_on, variables

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")

SIZE = 3


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """Return a run's name that no test of a suite beside this one has."""
    return f"{abs(hash(request.node.name))}-{os.getpid()}"


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    make_secret(tmp_path / "secret")
    return str(tmp_path / "secret")


def work(parent: Parent, given: dict[str, str], secret_file: str) -> None:
    """Add before and after the parent says so; tell what the table holds, or what `join` said."""
    given["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent keeps the store
    become_worker(given)
    try:
        with tables.join(timeout_s=DEADLINE_S, secret_file=secret_file) as world:
            table = world.matrix(5, 3, name="t")
            table.add(torch.ones(5, 3))
            world.barrier()
            parent.tell("added")
            parent.hear()
            table.add(torch.ones(5, 3))
            world.barrier()
            values = table.get()
            world.barrier()
    except ConfigError as exc:
        parent.tell(str(exc))
        return
    parent.tell(values.tolist())


def keep_store() -> TCPStore:
    return TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def key(run: str, name: str) -> str:
    return f"phalanx/tables/torchrun-{run}-0/{name}"


def test_who_reads_and_writes_the_store_gets_nothing_and_disturbs_nobody(
    run: str, children: Children, tmp_path: Path, secret_file: str
) -> None:
    store = keep_store()
    workers = [
        children.start(work, variables(run, rank, SIZE, SIZE, store.port), secret_file)
        for rank in range(SIZE)
    ]
    assert [worker.get() for worker in workers] == ["added"] * SIZE

    seen = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    values = {key: seen.get(key).decode() for key in seen.list_keys() if "/" in key}
    everything = "".join(values.values())
    assert len(everything) > 100
    assert not any(line in everything for line in Path(secret_file).read_text().splitlines())
    make_secret(tmp_path / "another")
    another = Secret.read(tmp_path / "another").tls(server=False)
    ours = Secret.read(secret_file).tls(server=False)
    for host in range(SIZE):
        address, there = json.loads(values[key(run, str(host))])[2], run_on(run, host)
        for tls in (None, another):
            stranger = Connection(Endpoint(host, "it", address, there, tls))
            with pytest.raises((PeerTimeout, ConfigError)):
                stranger.call(Operation.KEYS, "`keys`", 0.3, text="t")
        holder = Connection(Endpoint(host, "it", address, there, ours))
        assert holder.call(Operation.GET, "a get", DEADLINE_S, text="t").tensors
        for name in ("a\0", "../members", "a" * 300):  # names of files, if they were taken
            with pytest.raises(StateError, match="must be opened first"):
                holder.call(Operation.KEYS, "`keys`", DEADLINE_S, text=name)
        holder.close()

    for each in values:
        seen.set(each, json.dumps(["lies", "lies", "lies"]))
    for worker in workers:
        worker.put()
    expected = torch.full((5, 3), 2.0 * SIZE).tolist()
    assert [worker.get() for worker in workers] == [expected] * SIZE


def join_again(parent: Parent, given: dict[str, str], secret_file: str) -> None:
    become_worker(given)
    for _ in range(2):
        with tables.join(timeout_s=DEADLINE_S, secret_file=secret_file) as world:
            table = world.array(5, name="t")
            table.add(torch.ones(5))
            world.barrier()
            parent.tell(table.get().tolist())
            world.barrier()


def test_the_processes_of_a_run_may_join_again_when_it_is_over(
    run: str, children: Children, secret_file: str
) -> None:
    store = keep_store()
    workers = []
    for rank in range(2):
        given = {
            **variables(run, rank, 2, 2, store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        workers.append(children.start(join_again, given, secret_file))
    for _ in range(2):
        assert [worker.get() for worker in workers] == [[2.0] * 5] * 2


def join_alone(parent: Parent, given: dict[str, str], secret_file: str) -> None:
    given["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    become_worker(given)
    host_rendezvous._START_S = 0.0
    try:
        tables.join(timeout_s=2.0, secret_file=secret_file)
    except PeerTimeout as exc:
        parent.tell(str(exc))
    parent.hear(None)


def test_a_host_whose_server_does_not_come_is_named_and_nothing_outlives_the_attempt(
    run: str, children: Children, secret_file: str
) -> None:
    store = keep_store()
    worker = children.start(join_alone, variables(run, 0, 2, 2, store.port), secret_file)
    told = worker.get()
    assert told.startswith(
        "Rank 1 has not said in the store of the job where its host's server is: "
    )
    assert told.endswith(" See that it runs and calls `tables.join`.")
    with regions_on(run, 0) as regions:
        page = ServerPage(regions, create=False)
        assert page.is_served  # as long as the process that wants it
        server = page.serving.owner
    worker.kill()
    wait_for_exit(server)


def test_a_server_that_dies_as_it_begins_is_replaced_at_once(run: str, tmp_path: Path) -> None:
    with regions_on(run, 0) as regions:
        page = ServerPage(regions)

        def die_in_the_first_moment() -> None:
            with page.serving.held():
                (tmp_path / f"server-{os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        watch = ServerWatch(page, die_in_the_first_moment)
        try:
            # Five would take 50 s if the watch waited for a server that is dead already.
            assert wait_until(lambda: len(list(tmp_path.glob("server-*"))) >= 5, 20.0)
        finally:
            watch.close(DEADLINE_S)

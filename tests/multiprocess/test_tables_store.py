"""Somebody reads and writes the job's store, one of torch's, while a run on three hosts uses it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from phalanx import tables
from phalanx.cluster import Connection, Endpoint, Secret, make_secret
from phalanx.errors import ConfigError, PeerTimeout
from phalanx.tables import host_rendezvous
from phalanx.tables.host_operations import Operation
from phalanx.tables.host_server import ServerPage
from phalanx.tables.run_regions import RunRegions
from tests.multiprocess.children import DEADLINE_S, Children, Parent, wait_for_exit
from tests.multiprocess.hosts import become_worker, variables

SIZE = 3
PLACES = [f"phalanx/tables/place/{rank}" for rank in range(SIZE)]
RUN = "phalanx/tables/run"


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


def test_who_reads_and_writes_the_store_gets_nothing_and_disturbs_nobody(
    children: Children, tmp_path: Path, secret_file: str
) -> None:
    store = keep_store()
    workers = [
        children.start(work, variables("r", rank, SIZE, SIZE, store.port), secret_file)
        for rank in range(SIZE)
    ]
    assert [worker.get() for worker in workers] == ["added"] * SIZE

    seen = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    values = {key: seen.get(key).decode() for key in seen.list_keys() if "/" in key}
    secret, cluster = Secret.read(secret_file), content(values[RUN])[0]
    everything = "".join(values.values())
    assert len(everything) > 500
    assert secret.content.hex() not in everything
    make_secret(tmp_path / "another")
    another = Secret.read(tmp_path / "another")
    for host in range(SIZE):
        name, address = content(values[f"phalanx/tables/server/{host}"])
        for tls in (None, another.tls(cluster, server=False)):
            stranger = Connection(Endpoint(host, name, address, cluster, tls), worker=0)
            with pytest.raises((PeerTimeout, ConfigError)):
                stranger.call(Operation.COUNTS, "`stats`", 0.3, text="t")
        endpoint = Endpoint(host, name, address, cluster, secret.tls(cluster, server=False))
        holder = Connection(endpoint, worker=0)
        assert holder.call(Operation.COUNTS, "`stats`", DEADLINE_S, text="t").args == (0, 0, 0, 0)
        holder.close()

    for key in values:
        seen.set(key, signed(another, key, ["lies", "lies"]))
    for worker in workers:
        worker.put()
    expected = torch.full((5, 3), 2.0 * SIZE).tolist()
    assert [worker.get() for worker in workers] == [expected] * SIZE


def write_place(store: TCPStore, secret: Secret, place: str) -> None:
    """Say what rank 1 says of its place."""
    store.set(PLACES[1], signed(secret, "place/1", [place, "one", "1"]))


def signed(secret: Secret, key: str, value: list[str]) -> str:
    """Return what a process writes to the store before it knows of a start."""
    text = json.dumps(value)
    tag = secret.sign("\n".join((key, "", text)).encode())
    return f"{tag.hex()}\n{text}"


def content(value: str) -> list[str]:
    return json.loads(value.partition("\n")[2])


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
    children: Children, secret_file: str
) -> None:
    store = keep_store()
    run = f"late{os.getpid()}"
    write_place(store, Secret.read(secret_file), "elsewhere")
    worker = children.start(join_alone, variables(run, 0, 2, 2, store.port), secret_file)
    told = worker.get()
    assert told.startswith("The store of the job has no 'server/1': ")
    assert told.endswith(
        " Host 1 (one) has not said where its server is. Rank 1, the first process there, starts "
        "it: see its output, and start all hosts again."
    )
    regions = RunRegions(f"torchrun-{run}-0-0")
    server = ServerPage(regions, create=False).server
    regions.close()
    assert server is not None
    assert server.alive()  # as long as the process that wants it
    worker.kill()
    wait_for_exit(server.pid)

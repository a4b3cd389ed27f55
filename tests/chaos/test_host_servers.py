"""A host's server is killed in the middle of an add, at any point: the add counts once, and whole.

Worker 0 is on host 0 and adds to rows of host 1, whose server kills itself at a fail point. Another
one is started, maps the same memory, and the worker, which has had no answer, asks again. Where it
waits for none of its adds ("together"), the second and third are one message; "last" is the same,
with a server that dies at the third. Where adds have several blocks ("blocks"), they are logged.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from phalanx import tables
from phalanx.cluster import connection
from phalanx.ipc import ProcessIdentity, inject, wait_until
from phalanx.tables import host_server, host_supervisor, part
from phalanx.tables.keys import POINTS as NEW_KEYS
from phalanx.tables.part import POINTS, TablePart
from phalanx.tables.run_regions import RunRegions
from tests.chaos.host_bugs import make_adds_in_python
from tests.multiprocess.children import DEADLINE_S, Child, Children, Parent
from tests.multiprocess.hosts import free_port, serve_here, variables
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")

NUM_HOSTS = 2
ADDS, SECOND, THIRD = 3, 1, 2
ONCE = [sum(10.0**number for number in range(ADDS))]


def counted_twice() -> None:
    """A part does not know which adds it has taken."""
    make_adds_in_python()
    TablePart.has = lambda self, worker, number: False  # type: ignore[method-assign]


def undone_counts() -> None:
    """An add that was put back counts as taken."""
    put_back = TablePart._put_back

    def counting(self: TablePart) -> None:
        put_back(self)
        header = self._header
        self._done[header[part._WORKER]] = header[part._NUMBER]

    TablePart._put_back = counting  # type: ignore[method-assign]


BUGS = {
    "counted_twice": counted_twice,
    "undone_counts": undone_counts,
}


def serve(
    parent: Parent,
    spec: str,
    dies_at: str | None,
    bug: str | None,
    at_add: int = SECOND,
    blocks: bool = False,
) -> None:
    """Serve a host; kill this process when that add, or the first keys, pass ``dies_at``."""
    host_server._OVER_S = 0.05
    if blocks:
        part.BLOCK_ROWS = 1000
    host_supervisor.run_server = serve_here
    if bug is not None:
        BUGS[bug]()
    adds_begun = 0

    def fault(point: str, worker: int) -> None:
        nonlocal adds_begun
        adds_begun += point == "before lock"
        if point == dies_at and (point in NEW_KEYS or adds_begun == at_add + 1):
            os.kill(os.getpid(), signal.SIGKILL)

    if dies_at is not None:
        inject(fault)
    regions = RunRegions(json.loads(spec)[0])
    host_server.ServerPage(regions)  # as the worker does that starts a supervisor
    host_supervisor.main(spec)
    regions.close()
    parent.tell("ended")


def work(parent: Parent, given: dict[str, str], kind: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(given)
    host_supervisor.start_supervisor = lambda spec: None  # the test starts them
    connection._RETRY_S = 0.1
    with tables.join(timeout_s=DEADLINE_S) as world:
        parent.tell("joined")
        assert parent.hear() == "go on"
        if kind == "keys":
            table, rows = world.keys(2, name="t", capacity=4), list(range(6000))
        else:  # all of host 1
            table, rows = world.matrix(6000, 2, name="t"), list(range(3100, 6000))
        if world.worker_id == 0:
            [remote] = world._context._others.of(0).values()
            waits = kind not in ("together", "last")
            with nullcontext() if waits else remote.adding:
                for number in range(ADDS):
                    delta = torch.full((len(rows), 2), 10.0**number)
                    table.add(delta, rows=rows, wait=waits)
                    if number == 0:  # it is a message of its own
                        assert wait_until(lambda: not remote.deferred._kept, DEADLINE_S)
        world.barrier()
        parent.tell(table.get(rows).unique().tolist())
    parent.tell("left")


def play(tmp_path: Path, kind: str, point: str, bug: str | None = None) -> list[list[float]]:
    """Return which values both workers read at the end."""
    name = f"s{os.getpid()}-{tmp_path.name}"
    cluster, port = f"torchrun-{name}-0", free_port()
    with Children() as children:

        def start(host: int, dies_at: str | None) -> Child:
            me = ProcessIdentity.current()
            spec = host_server.ServerSpec(f"{cluster}-{host}", host, cluster, "127.0.0.1", None, me)
            at_add = THIRD if kind == "last" else SECOND
            return children.start(serve, json.dumps(spec), dies_at, bug, at_add, kind == "blocks")

        start(0, None)
        first = start(1, point)
        workers = [
            children.start(work, variables(name, worker, NUM_HOSTS, NUM_HOSTS, port), kind)
            for worker in range(NUM_HOSTS)
        ]
        for worker in workers:
            assert worker.get() == "joined"
        for worker in workers:
            worker.put("go on")
        first.process.join(DEADLINE_S)
        assert first.process.exitcode == -signal.SIGKILL, f"nobody passed {point!r}"
        second = start(1, None)
        got = [worker.get() for worker in workers]
        for worker in workers:
            assert worker.get() == "left"
        assert second.get() == "ended"
    return got


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path):
    yield
    wait_until_removed(f"s{os.getpid()}-{tmp_path.name}", sweep=True)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "kind", ["rows", "blocks", "together", "last", pytest.param("keys", marks=pytest.mark.night)]
)
def test_an_add_counts_once_wherever_the_server_dies(tmp_path, kind, point):
    assert play(tmp_path, kind, point) == [ONCE] * 2


def test_keys_that_were_coming_when_the_server_died_come_once(tmp_path):
    assert play(tmp_path, "keys", "keys pending") == [ONCE] * 2


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize(
    ("bug", "kind", "point"),
    [
        ("counted_twice", "rows", "after unlock"),
        ("counted_twice", "together", "after unlock"),
        ("undone_counts", "rows", "half the rows written"),
    ],
)
def test_a_planted_bug_is_caught(tmp_path, bug, kind, point):
    got = play(tmp_path, kind, point, bug)
    assert got != [ONCE] * 2


def test_the_next_server_takes_the_same_address(tmp_path):
    """Real servers, as `join` starts them: the first is killed, and the call goes on."""
    name = f"s{os.getpid()}-{tmp_path.name}"
    port = free_port()
    with Children() as children:
        workers = [
            children.start(add_beside_kills, variables(name, w, NUM_HOSTS, NUM_HOSTS, port))
            for w in range(NUM_HOSTS)
        ]
        regions = None
        for worker in workers:
            assert worker.get() == "joined"
        regions = RunRegions(f"torchrun-{name}-0-1")
        page = host_server.ServerPage(regions, create=False)
        server, address = page.server, page.address
        assert server is not None
        workers[0].put("go on")
        assert workers[0].get() == "adding"
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(lambda: page.server not in (None, server), DEADLINE_S)
        assert page.address == address
        workers[0].put("enough")
        num_adds = workers[0].get()
        workers[1].put("go on")
        assert workers[1].get() == num_adds > 0
        for worker in workers:
            assert worker.get() == "left"
        assert wait_until(lambda: page.is_over, DEADLINE_S)
        regions.close()


def add_beside_kills(parent: Parent, given: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(given)
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(2, name="t")
        world.barrier()
        parent.tell("joined")
        assert parent.hear() == "go on"
        if world.worker_id == 0:
            table.add([1.0], rows=[1])
            parent.tell("adding")
            num_adds = 1
            while not parent.connection.poll(0):
                table.add([1.0], rows=[1])
                num_adds += 1
            assert parent.hear() == "enough"
            parent.tell(float(num_adds))
        else:
            parent.tell(table.get([1]).item())
    parent.tell("left")

"""A host's server is killed in the middle of an add, at any point: the add counts once, and whole.

Worker 0 is on host 0 and adds to rows of host 1, whose server kills itself at a fail point. Another
one is forked, maps the same memory, and the worker, which has had no answer, asks again. Where adds
have several blocks ("blocks"), they are logged.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from phalanx import tables
from phalanx.ipc import inject
from phalanx.tables import host_server, part
from phalanx.tables.keys import POINTS as NEW_KEYS
from phalanx.tables.part import POINTS, TablePart
from tests.chaos.host_bugs import add_counted_twice
from tests.multiprocess.children import DEADLINE_S, Children, Parent
from tests.multiprocess.hosts import become_worker, free_port, variables
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")

NUM_HOSTS = 2
ADDS, SECOND = 3, 1
ONCE = [sum(10.0**number for number in range(ADDS))]


def undone_counts() -> None:
    """An add that was put back counts as taken."""
    put_back = TablePart._put_back

    def counting(self: TablePart) -> None:
        put_back(self)
        header = self._header
        self._done[header[part._WORKER]] = header[part._NUMBER]

    TablePart._put_back = counting  # type: ignore[method-assign]


BUGS = {"counted_twice": add_counted_twice, "undone_counts": undone_counts}


def die_in_first_server(dies_at: str, at_add: int, died: Path) -> None:
    """Let the first server that this process forks die when an add, or keys, pass ``dies_at``."""
    serve = host_server.serve

    def serve_and_die(spec: host_server.ServerSpec) -> None:
        adds_begun = 0

        def fault(point: str, worker: int) -> None:
            nonlocal adds_begun
            adds_begun += point == "before lock"
            if point == dies_at and (point in NEW_KEYS or adds_begun == at_add + 1):
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        if not died.exists():
            inject(fault)
        serve(spec)

    host_server.serve = serve_and_die


def work(
    parent: Parent, given: dict[str, str], kind: str, point: str, bug: str | None, died: Path
) -> None:
    become_worker(given)
    if kind == "blocks":
        part.BLOCK_ROWS = 1000
    if bug is not None:
        BUGS[bug]()
    if given["RANK"] == "1":
        die_in_first_server(point, SECOND, died)
    with tables.join(timeout_s=DEADLINE_S) as world:
        if kind == "keys":
            table, rows = world.keys(2, name="t", capacity=4), list(range(6000))
        else:  # all of host 1
            table, rows = world.matrix(6000, 2, name="t"), list(range(3100, 6000))
        world.barrier()
        if world.worker_id == 0:
            for number in range(ADDS):
                table.add(torch.full((len(rows), 2), 10.0**number), rows=rows)
        world.barrier()
        parent.tell(table.get(rows).unique().tolist())


def play(tmp_path: Path, kind: str, point: str, bug: str | None = None) -> list[list[float]]:
    """Return which values both workers read at the end."""
    name, died = f"s{os.getpid()}-{tmp_path.name}", tmp_path / "died"
    port = free_port()
    with Children() as children:
        workers = [
            children.start(
                work, variables(name, rank, NUM_HOSTS, NUM_HOSTS, port), kind, point, bug, died
            )
            for rank in range(NUM_HOSTS)
        ]
        got = [worker.get() for worker in workers]
        assert died.exists(), f"nobody passed {point!r}"
        for worker in workers:
            worker.process.join(DEADLINE_S)
            assert worker.process.exitcode == 0
    return got


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path):
    yield
    wait_until_removed(f"s{os.getpid()}-{tmp_path.name}", sweep=True)


@pytest.mark.parametrize("point", [each for each in POINTS if each != "undo written"])  # in C
@pytest.mark.parametrize("kind", ["rows", "blocks", pytest.param("keys", marks=pytest.mark.night)])
def test_an_add_counts_once_wherever_the_server_dies(tmp_path, kind, point):
    assert play(tmp_path, kind, point) == [ONCE] * 2


def test_keys_that_were_coming_when_the_server_died_come_once(tmp_path):
    assert play(tmp_path, "keys", "keys pending") == [ONCE] * 2


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize(
    ("bug", "kind", "point"),
    [
        ("counted_twice", "rows", "after unlock"),
        ("undone_counts", "rows", "half the rows written"),
    ],
)
def test_a_planted_bug_is_caught(tmp_path, bug, kind, point):
    got = play(tmp_path, kind, point, bug)
    assert got != [ONCE] * 2

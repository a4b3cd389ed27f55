"""Faults between hosts, and a planted bug for each: a scene goes well, and each bug makes it fail.

Three hosts, each with its server as a thread of its first worker. Messages are lost in the servers:
the first request of each kind, or the first answer. Hosts are halted and killed whole.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch

from phalanx import tables
from phalanx.cluster import Server, connection
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import wait_until
from phalanx.tables import host_server
from phalanx.tables.host_operations import Operation
from tests.chaos.host_bugs import BUGS
from tests.multiprocess.children import Child, Children, Parent
from tests.multiprocess.hosts import become_worker, free_port, variables, wait_for_servers
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")

NUM_HOSTS = 3
DEADLINE_S = 30.0
SHORT_S = 3.0
HOST_LOST_S = 1.0
LATER = 50
_numbers = count()

Scene = Callable[[str, "str | None", Path], None]


@contextmanager
def workers(
    run: str, num_workers: int, body: Callable[..., None], bug: str | None, *args: object
) -> Iterator[list[Child]]:
    port = free_port()
    with Children() as children:
        yield [
            children.start(
                be_worker, variables(run, worker, num_workers, NUM_HOSTS, port), bug, body, *args
            )
            for worker in range(num_workers)
        ]


def be_worker(
    parent: Parent, given: dict[str, str], bug: str | None, body: Callable[..., None], *args: object
) -> None:
    threads = become_worker(given)
    connection._RETRY_S, connection._LONGEST_RETRY_S = 0.1, 0.5
    host_server._HOST_LOST_S, host_server._LOOK_EVERY_S = HOST_LOST_S, 0.05
    if bug is not None:
        BUGS[bug]()
    body(parent, *args)
    wait_for_servers(threads)


# --- messages that are lost -----------------------------------------------------------------------


def lose(what: str) -> set[int]:
    """Let this process's server lose the first message of each kind; return the kinds."""
    lost: set[int] = set()

    def first(operation: int) -> bool:
        return operation not in lost and not lost.add(operation)

    if what == "requests":
        take = Server._take_request

        def take_but_first(self, link, head, frames):
            if not first(head.operation):
                take(self, link, head, frames)

        Server._take_request = take_but_first  # type: ignore[method-assign]
    else:
        send = Server._send

        def send_but_first(self, link, asked, answer):
            if not first(asked.operation):
                send(self, link, asked, answer)

        Server._send = send_but_first  # type: ignore[method-assign]
    return lost


def ask_everything(parent: Parent, what: str, folder: Path) -> None:
    lost = lose(what)
    with tables.join(timeout_s=SHORT_S * 3) as world:
        rows = world.matrix(7, 2, name="rows")
        keys = world.keys(2, name="keys", capacity=4)
        bulk = world.array(5, name="bulk", sync=True)
        rows.add(torch.ones(7, 2))
        keys.add(torch.ones(11, 2), rows=range(11))
        bulk.add(torch.ones(5))
        later = world.matrix(7, 2, name="later")
        for _ in range(LATER):  # the first is under way while others come, which go together
            later.add(torch.ones(2, 2), rows=[0, 6], wait=False)
        found = [bulk.get().unique().tolist()]
        world.tick()
        world.barrier()
        found += [rows.get([6, 0, 3]).unique().tolist(), keys.get(range(11)).unique().tolist()]
        assert keys.keys().tolist() == list(range(11))
        assert rows.stats().undone == 0
        world.barrier()
        if world.worker_id == 0:
            rows.snapshot(folder)
            rows.restore(folder)
        world.barrier()
        found.append(rows.get().unique().tolist())
        found.append((later.get([0, 6]) / LATER).unique().tolist())
    parent.tell((found, lost))


def messages_are_lost(run: str, bug: str | None, folder: Path, what: str) -> None:
    lost: set[int] = set()
    with workers(run, NUM_HOSTS, ask_everything, bug, what, folder) as started:
        for worker in started:
            found, lost_there = worker.get()
            assert found == [[3.0]] * 5, f"an add is lost, or there twice: {found}"
            lost |= lost_there
    assert lost == set(Operation), "a kind of request was never lost"


def requests_are_lost(run: str, bug: str | None, folder: Path) -> None:
    messages_are_lost(run, bug, folder, "requests")


def answers_are_lost(run: str, bug: str | None, folder: Path) -> None:
    messages_are_lost(run, bug, folder, "answers")


# --- hosts that are halted or killed --------------------------------------------------------------


def add_until_refused(parent: Parent) -> None:
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(4 * NUM_HOSTS, name="t")
        world.barrier()
        parent.tell("adding")
        if world.worker_id == NUM_HOSTS - 1:
            try:
                while True:
                    table.add([1.0], rows=[0])
            except StateError as exc:
                parent.tell(str(exc))
            return
        assert wait_until(lambda: world.workers == [0, 1], DEADLINE_S), "nobody is missed"
        parent.tell(table.get([0]).item())
        assert parent.hear() == "it goes on"
        parent.tell(table.get([0]).item())


def a_host_is_halted(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, NUM_HOSTS, add_until_refused, bug) as started:
        *others, halted = started
        for worker in started:
            assert worker.get() == "adding"
        os.kill(halted.pid, signal.SIGSTOP)
        before = [worker.get() for worker in others]
        os.kill(halted.pid, signal.SIGCONT)
        try:
            refused = halted.get(SHORT_S)
        except AssertionError as exc:
            raise AssertionError("who was taken for dead writes") from exc
        assert "was taken for lost on this host" in refused
        for worker in others:
            worker.put("it goes on")
        assert [worker.get() for worker in others] == before, "who was taken for dead wrote"


def go_on_without_a_host(parent: Parent) -> None:
    world = tables.join(timeout_s=SHORT_S)
    with pytest.raises(PeerTimeout, match="an add of table 't'"):
        go_on_in(world, parent)
    assert world.closed


def go_on_in(world: tables.TableGroup, parent: Parent) -> None:
    with world:
        table, other = (world.array(4 * NUM_HOSTS, name=name) for name in "tu")
        others = [0, 1, 4]
        world.barrier()
        parent.tell("here")
        if world.worker_id not in others:
            parent.hear()
        assert parent.hear() == "killed"
        try:
            world.barrier("without them")
        except PeerTimeout as exc:
            raise AssertionError(f"somebody waits for the dead: {exc}") from exc
        # Each host finds out for itself.
        assert wait_until(lambda: world.workers == others, SHORT_S), f"{world.workers} are here"
        table.add([1.0, 1.0], rows=[0, 4 * NUM_HOSTS - 1])
        world.barrier()
        parent.tell(table.get([0, 4 * NUM_HOSTS - 1]).tolist())

        def add_without_waiting() -> None:
            for each in (table, other, other):  # of two tables, so in two messages
                each.add([1.0], rows=[4], wait=False)
            table.flush()

        for call in (table.get, lambda: table.add([1.0], rows=[4]), add_without_waiting):
            with pytest.raises(PeerTimeout) as caught:
                call()
            parent.tell(str(caught.value))
        [note] = caught.value.__notes__
        assert note.startswith("2 later adds of this worker to that host")
        table.flush()  # it was said
        table.add([1.0], rows=[4], wait=False)  # said as the worker leaves


def a_host_is_killed(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, 5, go_on_without_a_host, bug) as started:
        for worker in started:
            assert worker.get() == "here"
        for worker in started[2:4]:
            worker.kill()
        survivors = [started[number] for number in (0, 1, 4)]
        for worker in survivors:
            worker.put("killed")
        for worker in survivors:
            assert worker.get() == [3.0, 3.0]
            for asked in ("a get", "an add", "an add"):
                told = worker.get()
                assert told.startswith("Host 1 (")
                assert "(server at tcp://127.0.0.1:" in told
                assert f"did not answer {asked} of table 't' within 3" in told


def add_beside_a_silent_server(parent: Parent, is_silent: bool) -> None:
    """Add until the parent says so, while the last host's server does not say who lives."""
    if is_silent:
        take = Server._take_request

        def take_but_one(self, link, head, frames):
            if head.operation != Operation.MEMBERS:
                take(self, link, head, frames)

        Server._take_request = take_but_one  # type: ignore[method-assign]
    with tables.join(timeout_s=DEADLINE_S) as world:
        table, adds = world.array(4 * NUM_HOSTS, name="t"), 0
        world.barrier()
        parent.tell("adding")
        try:
            while not parent.connection.poll():
                table.add([1.0], rows=[0])
                adds += 1
        except StateError as exc:
            raise AssertionError(f"a worker that asks counts as lost: {exc}") from exc
        world.barrier()
        parent.tell((adds, table.get([0]).item()))
        world.barrier()


def a_server_is_silent(run: str, bug: str | None, folder: Path) -> None:
    with Children() as children:
        port = free_port()
        started = [
            children.start(
                be_worker,
                variables(run, worker, NUM_HOSTS, NUM_HOSTS, port),
                bug,
                add_beside_a_silent_server,
                worker == NUM_HOSTS - 1,
            )
            for worker in range(NUM_HOSTS)
        ]
        for worker in started:
            assert worker.get() == "adding"
        started[-1].connection.poll(4 * HOST_LOST_S)  # says something only if it fails
        for worker in started:
            worker.put()
        told = [worker.get() for worker in started]
        assert {sum_ for _, sum_ in told} == {sum(adds for adds, _ in told)}


SCENES: dict[str, tuple[Scene, str]] = {
    "never_asked_again": (requests_are_lost, "did not answer"),
    "add_counted_twice": (answers_are_lost, "an add is lost, or there twice"),
    "round_add_counted_twice": (answers_are_lost, "an add is lost, or there twice"),
    "stale_accepted": (a_host_is_halted, "who was taken for dead w"),
    "lost_host_awaited": (a_host_is_killed, "somebody waits for the dead"),
    "only_servers_heard": (a_server_is_silent, "a worker that asks counts as lost"),
}


def a_run() -> str:
    return f"hc{os.getpid()}-{next(_numbers)}"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until_removed(f"hc{os.getpid()}-", sweep=True)


@pytest.mark.parametrize("scene", {scene: 0 for scene, _ in SCENES.values()})
def test_each_scene_goes_well(scene: Scene, tmp_path: Path) -> None:
    scene(a_run(), None, tmp_path)


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    scene, says = SCENES[bug]
    with pytest.raises(AssertionError, match=says):
        scene(a_run(), bug, tmp_path)

"""Faults between hosts, and a planted bug for each: a scene goes well, and each bug makes it fail.

Three hosts. Connections break in the servers: at the first request of each kind, or the first
answer. Workers are halted, cut off, and killed with all of their host.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from signal import SIGSTOP

import pytest
import torch

from phalanx import tables
from phalanx.cluster import Head, Server
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import ProcessIdentity, inject, wait_until
from phalanx.tables import host_service
from phalanx.tables.host_operations import Operation
from tests.chaos.host_bugs import BUGS
from tests.multiprocess.children import Child, Children, Parent
from tests.multiprocess.hosts import become_worker, free_port, kill_server, variables
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")

NUM_HOSTS = 3
DEADLINE_S = 30.0
SHORT_S = 3.0
BACK_S = 0.5
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
    become_worker(given)
    host_service._BACK_S, host_service._AFTER_A_START_S = BACK_S, 2 * BACK_S
    if bug is not None:
        BUGS[bug]()
    body(parent, *args)


# --- messages that are lost -----------------------------------------------------------------------


def lose(what: str, folder: Path) -> None:
    """Let servers forked later lose the first message of each kind, with its connection."""
    lost: set[tuple[int, ...]] = set()

    def lose_first(head: Head) -> None:
        kind = (head.operation,)
        if head.operation == Operation.ADD:  # of several adds, and of a round, too
            kind += (head.args[0] > 1, head.args[2] > 0)
        if kind not in lost:
            lost.add(kind)
            (folder / f"lost-{head.operation}").touch()
            raise ConnectionResetError("lost by the test")

    if what == "requests":
        answer = Server._ask

        def answer_but_first(self, stream, head, link):
            lose_first(head)
            return answer(self, stream, head, link)

        Server._ask = answer_but_first  # type: ignore[method-assign]
    else:
        send = Server._send

        def send_but_first(self, stream, asked, answer):
            lose_first(asked)
            send(self, stream, asked, answer)

        Server._send = send_but_first  # type: ignore[method-assign]


def ask_everything(parent: Parent, what: str, folder: Path) -> None:
    lose(what, folder)
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
    parent.tell(found)


def messages_are_lost(run: str, bug: str | None, folder: Path, what: str) -> None:
    with workers(run, NUM_HOSTS, ask_everything, bug, what, folder) as started:
        for worker in started:
            found = worker.get()
            assert found == [[3.0]] * 5, f"an add is lost, or there twice: {found}"
    lost = {int(path.name.removeprefix("lost-")) for path in folder.glob("lost-*")}
    assert lost == set(Operation), "a kind of request was never lost"


def requests_are_lost(run: str, bug: str | None, folder: Path) -> None:
    messages_are_lost(run, bug, folder, "requests")


def answers_are_lost(run: str, bug: str | None, folder: Path) -> None:
    messages_are_lost(run, bug, folder, "answers")


# --- workers that are halted, cut off or killed ---------------------------------------------------


def wait_for_it(table: tables.Table, rows: list[int]) -> None:
    with suppress(PeerTimeout):
        table.get(rows)


def add_beside_a_halted_holder(parent: Parent) -> None:
    """Worker 1 halts as it holds a lock of table t, in its own host's rows; 0 and 2 go on."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        table, other = (world.array(4 * NUM_HOSTS, name=name) for name in "tu")
        theirs = [4]  # of worker 1's host
        world.barrier()
        if world.worker_id == 1:
            inject(lambda point, worker: point == "undo written" and os.kill(os.getpid(), SIGSTOP))
            table.add([1.0], rows=theirs)
            inject(None)
        else:
            assert parent.hear() == "it is halted"
            pending = threading.Thread(target=wait_for_it, args=(table, theirs), daemon=True)
            pending.start()
            threading.Event().wait(0.5)  # it waits with the long deadline
            world.timeout_s = SHORT_S
            try:
                for _ in range(10):
                    other.add([1.0], rows=theirs)
                    other.get(theirs)
            except PeerTimeout as exc:
                raise AssertionError(f"the halted one holds others up: {exc}") from exc
            with pytest.raises(PeerTimeout, match=r"Lock 'shard 0 of table t' .* holds it"):
                table.add([1.0], rows=theirs)
            assert 1 in world.workers, "a halted worker counts as dead"
            world.timeout_s = DEADLINE_S
            parent.tell("it may go on")
        world.barrier()
        parent.tell(other.get(theirs).item())
        world.barrier()


def a_holder_is_halted(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, NUM_HOSTS, add_beside_a_halted_holder, bug) as started:
        halted, others = started[1], (started[0], started[2])
        assert wait_until(ProcessIdentity.of(halted.pid).stopped, DEADLINE_S)
        for worker in others:
            worker.put("it is halted")
        for worker in others:
            assert worker.get() == "it may go on"
        os.kill(halted.pid, signal.SIGCONT)
        for worker in started:
            assert worker.get() == 20.0


def add_until_refused(parent: Parent) -> None:
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(4 * NUM_HOSTS, name="t")
        world.barrier()
        if world.worker_id == NUM_HOSTS - 1:
            for remote in world._context.membership._others.of(world.worker_id).values():
                remote._session._connection.close()  # it is not opened again
                remote._session._stream.shut()
            try:
                while True:
                    table.add([1.0], rows=[0])
            except StateError as exc:
                parent.tell(str(exc))
            return
        assert wait_until(lambda: world.workers == [0, 1], DEADLINE_S), "nobody is missed"
        parent.tell("it is missed")
        for _ in range(2):
            assert parent.hear() == "read"
            parent.tell(table.get([0]).item())


def values_of(workers: Sequence[Child]) -> list[float]:
    for worker in workers:
        worker.put("read")
    return [worker.get() for worker in workers]


def a_worker_is_cut_off(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, NUM_HOSTS, add_until_refused, bug) as (*others, lost):
        for worker in others:  # each host finds it dead by itself
            assert worker.get() == "it is missed"
        before = values_of(others)
        try:
            refused = lost.get(SHORT_S)
        except AssertionError as exc:
            raise AssertionError("who was taken for dead writes") from exc
        assert "was taken for lost on this host" in refused
        assert values_of(others) == before, "who was taken for dead wrote"


def add_beside_a_kill(parent: Parent) -> None:
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(4 * NUM_HOSTS, name="t")
        world.barrier()
        parent.tell("here")
        assert parent.hear() == "its server was killed"
        # Who asks for nothing must stay, too.
        threading.Event().wait(6 * BACK_S)
        try:
            table.add(torch.ones(4 * NUM_HOSTS))
        except StateError as exc:
            raise AssertionError(f"a worker that lives counts as lost: {exc}") from exc
        world.barrier()
        parent.tell(table.get().unique().tolist())
        world.barrier()


def a_server_is_killed(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, NUM_HOSTS, add_beside_a_kill, bug) as started:
        for worker in started:
            assert worker.get() == "here"
        kill_server(run, 1)
        for worker in started:
            worker.put("its server was killed")
        for worker in started:
            assert worker.get() == [3.0]


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
        kill_server(run, 1)
        survivors = [started[number] for number in (0, 1, 4)]
        for worker in survivors:
            worker.put("killed")
        for worker in survivors:
            assert worker.get() == [3.0, 3.0]
            for asked in ("a get", "an add", "an add"):
                told = worker.get()
                assert told.startswith("Host 1 (")
                assert "(server at 127.0.0.1:" in told
                assert f"did not answer {asked} of table 't' within 3" in told


SCENES: dict[str, tuple[Scene, str]] = {
    "never_asked_again": (requests_are_lost, "did not answer"),
    "add_counted_twice": (answers_are_lost, "an add is lost, or there twice"),
    "round_add_counted_twice": (answers_are_lost, "an add is lost, or there twice"),
    "stale_accepted": (a_worker_is_cut_off, "who was taken for dead w"),
    "lost_host_awaited": (a_host_is_killed, "somebody waits for the dead"),
    "session_stays_broken": (a_server_is_killed, "a worker that lives counts as lost"),
    "one_at_a_time": (a_holder_is_halted, "the halted one holds others up"),
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
    run = a_run()
    with pytest.raises(AssertionError, match=says):
        scene(run, bug, tmp_path)
    for host in range(NUM_HOSTS):  # whose workers were killed, some before they had come
        kill_server(run, host)

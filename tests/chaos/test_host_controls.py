"""Faults between hosts, and a planted bug for each: a scene goes well, and each bug makes it fail.

Three hosts. Connections break in the servers: at the first request of each kind, or the first
answer. Workers are halted, cut off, and killed with all of their host. Tables outlive a host by
`snapshot` and `restore`: clients keep books, and go on with them on the hosts that are left.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest
import torch

from phalanx import tables
from phalanx.cluster import Message, Server
from phalanx.errors import CheckpointError, PeerTimeout, StateError
from phalanx.ipc import ProcessIdentity, inject, wait_until
from phalanx.tables import host_rendezvous, host_service, part
from phalanx.tables.remote_host import RemoteHost
from phalanx.tables.router import Operation
from tests.chaos.books import Books
from tests.chaos.host_bugs import BUGS, NUM_HOSTS
from tests.multiprocess.children import Child, Children, Parent, wait_for_exit
from tests.multiprocess.hosts import become_worker, free_port, kill_server, variables
from tests.multiprocess.test_tables import KEY_POINTS, POINTS
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")

CLIENTS = 5  # on hosts 0, 0, 1, 1 and 2
ADDS = 10
DEADLINE_S = 60.0
SHORT_S = 3.0
BACK_S = 0.5
_numbers = count()

Scene = Callable[[str, "str | None", Path], None]


@contextmanager
def workers(
    run: str,
    num_workers: int,
    body: Callable[..., None],
    bug: str | None,
    *args: object,
    num_hosts: int = NUM_HOSTS,
) -> Iterator[list[Child]]:
    port = free_port()
    with Children() as children:
        yield [
            children.start(
                be_worker, variables(run, worker, num_workers, num_hosts, port), bug, body, *args
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

    def lose_first(message: Message) -> None:
        kind: tuple[int, ...] = (message.operation,)
        if message.operation == Operation.ADD:  # of a round, too
            kind += (message.args[0] > 0,)
        if kind not in lost:
            lost.add(kind)
            (folder / f"lost-{message.operation}").touch()
            raise ConnectionResetError("lost by the test")

    ask = Server._ask

    def ask_but_first(self, asked, link):
        if what == "requests":
            lose_first(asked)
        answer = ask(self, asked, link)
        if what == "answers":
            lose_first(asked)
        return answer

    Server._ask = ask_but_first  # type: ignore[method-assign]


def ask_everything(parent: Parent, what: str, folder: Path) -> None:
    lose(what, folder)
    with tables.join(timeout_s=SHORT_S * 3) as world:
        rows = world.matrix(7, 2, name="rows")
        keys = world.keys(2, name="keys")
        bulk = world.array(5, name="bulk", sync=True)
        rows.add(torch.ones(7, 2))
        keys.add(torch.ones(11, 2), rows=range(11))
        bulk.add(torch.ones(5))
        found = [bulk.get().unique().tolist()]
        world.tick()
        world.barrier()
        found += [rows.get([6, 0, 3]).unique().tolist(), keys.get(range(11)).unique().tolist()]
        assert keys.keys().tolist() == list(range(11))
        assert len(keys) == 11
        world.barrier()
        if world.worker_id == 0:
            rows.snapshot(folder)
            rows.restore(folder)
        world.barrier()
        found.append(rows.get().unique().tolist())
    parent.tell(found)


def messages_are_lost(run: str, bug: str | None, folder: Path, what: str) -> None:
    with workers(run, NUM_HOSTS, ask_everything, bug, what, folder) as started:
        for worker in started:
            found = worker.get()
            assert found == [[3.0]] * 4, f"an add is lost, or there twice: {found}"
    lost = {int(path.name.removeprefix("lost-")) for path in folder.glob("lost-*")}
    assert lost == set(Operation), "a kind of request was never lost"


def requests_are_lost(run: str, bug: str | None, folder: Path) -> None:
    messages_are_lost(run, bug, folder, "requests")


def answers_are_lost(run: str, bug: str | None, folder: Path) -> None:
    messages_are_lost(run, bug, folder, "answers")


# --- a server dies within an add ------------------------------------------------------------------


def die_in_first_server(dies_at: str, died: Path) -> None:
    """Let the first server that this process forks die when its second add passes ``dies_at``."""
    serve = host_rendezvous.serve

    def serve_and_die(*given: Any) -> None:
        adds_begun = 0

        def fault(point: str, worker: int) -> None:
            nonlocal adds_begun
            adds_begun += point == "before lock"
            if point == dies_at and (point in KEY_POINTS or adds_begun == 2):
                died.touch()
                os.kill(os.getpid(), SIGKILL)

        if not died.exists():
            inject(fault)
        serve(*given)

    host_rendezvous.serve = serve_and_die


def add_to_host_1(parent: Parent, folder: Path, kind: str, point: str) -> None:
    """Worker 0 adds to rows of host 1, in several blocks or in one."""
    if kind == "blocks":
        part.BLOCK_ROWS = 1000
    if os.environ["RANK"] == "1":
        die_in_first_server(point, folder / "died")
    with tables.join(timeout_s=DEADLINE_S) as world:
        if kind == "keys":
            table, rows = world.keys(2, name="t"), list(range(6000))
        else:
            table, rows = world.matrix(6000, 2, name="t"), list(range(3100, 6000))
        world.barrier()
        if world.worker_id == 0:
            for number in range(3):
                table.add(torch.full((len(rows), 2), 10.0**number), rows=rows)
        world.barrier()
        parent.tell(table.get(rows).unique().tolist())


def a_server_dies_within_an_add(
    run: str,
    bug: str | None,
    folder: Path,
    kind: str = "rows",
    point: str = "half the rows written",
) -> None:
    """Another is forked and maps the same memory; the worker, which had no answer, asks again."""
    with workers(run, 2, add_to_host_1, bug, folder, kind, point, num_hosts=2) as started:
        for worker in started:
            found = worker.get()
            assert found == [111.0], f"an add is lost, or there twice: {found}"
        assert (folder / "died").exists(), f"nobody passed {point!r}"
        for worker in started:
            worker.process.join(DEADLINE_S)
            assert worker.process.exitcode == 0


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
            inject(
                lambda point, worker: (
                    point == "half the rows written" and os.kill(os.getpid(), SIGSTOP)
                )
            )
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
            with pytest.raises(PeerTimeout, match=r"Lock 'rows of table t' .* holds it"):
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


def cut_off(remote: RemoteHost) -> None:
    """Close all connections to a host, and have none opened again before the next call."""

    def fail(*given: object) -> None:
        raise StateError("cut off by the test")

    remote._enter = fail  # type: ignore[method-assign]
    while stream := remote.take_idle():
        stream.close()
    assert remote._kept is not None
    remote._kept.shut()


def add_until_refused(parent: Parent) -> None:
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(4 * NUM_HOSTS, name="t")
        world.barrier()
        if world.worker_id == NUM_HOSTS - 1:
            for remote in world.remotes:
                cut_off(remote)
            assert parent.hear() == "add"
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
        lost.put("add")
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


def go_on_without_a_host(parent: Parent, host: int) -> None:
    with tables.join(timeout_s=SHORT_S) as world:
        table = world.array(4 * NUM_HOSTS, name="t")
        others = survivors_of(host)
        first, *_, last = (row for row in range(4 * NUM_HOSTS) if row // 4 != host)
        world.barrier()
        parent.tell("here")
        if world.worker_id not in others:
            parent.hear()
        assert parent.hear() == "killed"
        try:
            world.barrier()
        except PeerTimeout as exc:
            raise AssertionError(f"somebody waits for the dead: {exc}") from exc
        # Each host finds out for itself.
        assert wait_until(lambda: world.workers == others, SHORT_S), f"{world.workers} are here"
        table.add([1.0, 1.0], rows=[first, last])
        world.barrier()
        parent.tell(table.get([first, last]).tolist())
        for call in (table.get, lambda: table.add([1.0], rows=[4 * host])):
            with pytest.raises(PeerTimeout) as caught:
                call()
            parent.tell(str(caught.value))


def survivors_of(host: int) -> list[int]:
    return [worker for worker in range(CLIENTS) if worker * NUM_HOSTS // CLIENTS != host]


def a_host_is_killed(run: str, bug: str | None, folder: Path, host: int = 1) -> None:
    with workers(run, CLIENTS, go_on_without_a_host, bug, host) as started:
        for worker in started:
            assert worker.get() == "here"
        survivors = [started[number] for number in survivors_of(host)]
        for worker in started:
            if worker not in survivors:
                worker.kill()
        kill_server(run, host)
        for worker in survivors:
            worker.put("killed")
        for worker in survivors:
            assert worker.get() == [float(len(survivors))] * 2
            for asked in ("`get`", "`add`"):
                told = worker.get()
                assert told.startswith(f"Host {host} (")
                assert "(server at 127.0.0.1:" in told
                _, within = told.split(f"did not answer {asked} of table 't' within ")
                assert float(within.split()[0]) <= SHORT_S  # some of it may have gone before


# --- snapshots outlive a host -------------------------------------------------------------------


def lose_a_host(parent: Parent, folder: Path) -> None:
    """Add, with a snapshot after the first half; the master writes another when a host is lost."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        books = Books(world, CLIENTS, NUM_HOSTS)
        for q in range(1, 2 * ADDS + 1):
            add_line(books, world.worker_id, q)
            if q % ADDS == 0:
                world.barrier()
                write(books, folder, world)
                world.barrier()
        parent.tell("written")
        left = parent.hear()
        world.timeout_s = SHORT_S
        with pytest.raises(PeerTimeout, match="Host ") as caught:
            add_line(books, world.worker_id, 2 * ADDS + 1)
        assert wait_until(lambda: len(world.workers) == left, DEADLINE_S)
        with suppress(PeerTimeout):  # rows of the lost host
            write(books, folder, world)
        parent.tell((str(caught.value), world.is_master))
        parent.hear()


def add_line(books: Books, client: int, q: int) -> None:
    books.add("rows", client, q)
    books.add("keys", client, q)


def write(books: Books, folder: Path, world: tables.TableGroup) -> None:
    if world.is_master:
        books.rows.snapshot(folder)
        books.keys.snapshot(folder)


def go_on(parent: Parent, folder: Path) -> None:
    """Restore, see what is there, and go on adding."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        books, me = Books(world, CLIENTS, NUM_HOSTS), world.worker_id
        world.barrier()
        if world.is_master:
            for table in (books.rows, books.keys):
                table.restore(folder)
        world.barrier()
        for client in range(CLIENTS):
            found = [*books.count("rows", client), *books.count("keys", client)]
            assert min(found) >= 2 * ADDS, f"adds of client {client} are lost: {found}"
        world.barrier()
        books.keys.add(torch.ones(1, 3, dtype=torch.int64), rows=[1000 + me])
        before = books.keys.get([-1 - me])
        books.keys.add(torch.ones(1, 3, dtype=torch.int64), rows=[-1 - me])
        world.barrier()
        assert torch.equal(books.keys.get([-1 - me]), before + 1)
        assert books.keys.get([1000, 1001, 1002])[:, 0].tolist() == [1, 1, 1]
        world.barrier()


def a_host_is_lost(run: str, bug: str | None, folder: Path, host: int = 0) -> None:
    with workers(run, CLIENTS, lose_a_host, bug, folder) as started:
        for client in started:
            assert client.get() == "written"
        lost = [client for n, client in enumerate(started) if n * NUM_HOSTS // CLIENTS == host]
        for client in lost:
            client.kill()
        kill_server(run, host)
        others = [client for client in started if client not in lost]
        for client in others:
            client.put(len(others))
        told, is_master = zip(*(client.get() for client in others), strict=True)
        assert all(each.startswith(f"Host {host} (") for each in told)
        assert sum(is_master) == 1  # and leaves what is there
    with workers(f"{run}-again", 3, go_on, None, folder, num_hosts=NUM_HOSTS - 1) as started:
        for client in started:
            client.process.join(DEADLINE_S)
        for client in started:
            with suppress(EOFError):
                client.get()  # what it raised
            assert client.process.exitcode == 0


# --- a round is on all hosts, or on none ----------------------------------------------------------


def make_rounds(parent: Parent, folder: Path) -> None:
    """Add 1 to everything and get, over and over; the master writes each round, and says so."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(7, name="t", sync=True)
        while True:
            table.add(torch.ones(7))
            table.get()
            if world.is_master:
                table.snapshot(folder)
                parent.tell("written")


def rounds_are_whole(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, NUM_HOSTS, make_rounds, bug, folder) as started:
        for _ in range(3):
            assert started[0].get() == "written"
            with tables.join() as world:
                table = world.array(7, name="t")
                table.restore(folder)
                (seen, *others) = table.get().unique().tolist()
                assert not others, f"rounds of two moments: {[seen, *others]}"
                assert seen > 0
                assert seen % NUM_HOSTS == 0
        for worker in started:
            worker.kill()


# --- a lost host is why others stay away ----------------------------------------------------------


def miss_two(parent: Parent) -> None:
    """Worker 0 gets of table a, worker 1 of b; worker 2, who gets of both, is lost."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = {name: world.array(5, name=name, sync=True) for name in "ab"}
        mine = {0: "a", 1: "b", 2: "ab"}[world.worker_id]
        (number, *_) = [table[name]._storage.arrive(DEADLINE_S) for name in mine]
        world.barrier()
        parent.tell("arrived")
        assert parent.hear() == "go on"
        world.timeout_s = SHORT_S
        with pytest.raises(PeerTimeout) as raised:
            table[mine[0]]._storage.finish(number, SHORT_S)
        parent.tell(str(raised.value))
        parent.hear()


def survivors_are_not_blamed(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, NUM_HOSTS, miss_two, bug) as (*others, lost):
        for worker in (*others, lost):
            assert worker.get() == "arrived"
        lost.kill()
        kill_server(run, 2)
        for worker in others:
            worker.put("go on")
        for worker in others:
            said = worker.get()
            assert said.startswith("Host 2 ("), f"a survivor is blamed: {said}"
        for worker in others:
            worker.kill()


# --- a writer dies --------------------------------------------------------------------------------

ROWS = 3000


def write_one_after_the_other(parent: Parent, folder: Path, point: str) -> None:
    """Worker 0 writes, adds, and dies at a point of its next snapshot; then worker 1 writes."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.matrix(ROWS, 2, name="t", init=1.0)
        if world.worker_id == 0:
            table.snapshot(folder)
            table.add(torch.ones(ROWS, 2))
            inject(lambda where, worker: where == point and os.kill(os.getpid(), SIGKILL))
        world.barrier()
        parent.tell("ready")
        assert parent.hear() == "write"
        table.snapshot(folder)


def value_of_all(folder: Path) -> list[float]:
    with tables.join() as world:
        table = world.matrix(ROWS, 2, name="t")
        try:
            table.restore(folder)
        except CheckpointError as exc:
            raise AssertionError(f"half of a snapshot counts: {exc}") from exc
        return table.get().unique().tolist()


def a_writer_dies(run: str, bug: str | None, folder: Path, point: str = "snapshot begun") -> None:
    args = (write_one_after_the_other, bug, folder, point)
    with workers(run, 2, *args, num_hosts=1) as (first, second):
        for worker in (first, second):
            assert worker.get() == "ready"
        first.put("write")
        wait_for_exit(first.pid)
        assert value_of_all(folder) == [2.0 if point == "snapshot renamed" else 1.0]
        second.put("write")
        second.process.join(DEADLINE_S)
    assert value_of_all(folder) == [2.0]
    left = sorted(entry.name for entry in folder.iterdir())
    assert left == ["t.snapshot"], f"something is left: {left}"


# --- tests ----------------------------------------------------------------------------------------

SCENES: dict[str, tuple[Scene, str]] = {
    "never_asked_again": (requests_are_lost, "did not answer"),
    "add_counted_twice": (answers_are_lost, "an add is lost, or there twice"),
    "round_add_counted_twice": (answers_are_lost, "an add is lost, or there twice"),
    "undone_counts": (a_server_dies_within_an_add, "an add is lost, or there twice"),
    "stale_accepted": (a_worker_is_cut_off, "who was taken for dead w"),
    "lost_host_awaited": (a_host_is_killed, "somebody waits for the dead"),
    "connection_stays_broken": (a_server_is_killed, "a worker that lives counts as lost"),
    "one_at_a_time": (a_holder_is_halted, "the halted one holds others up"),
    "written_in_place": (a_writer_dies, "half of a snapshot counts"),
    "lost_rows_are_zeros": (a_host_is_lost, "are lost"),
    "first_copy_kept": (a_host_is_lost, "are lost"),
    "drafts_stay": (a_writer_dies, "something is left"),
    "silence_unheard": (survivors_are_not_blamed, "a survivor is blamed"),
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


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["rows", "blocks", pytest.param("keys", marks=pytest.mark.night)])
def test_an_add_counts_once_wherever_the_server_dies(tmp_path, kind, point):
    a_server_dies_within_an_add(a_run(), None, tmp_path, kind, point)


def test_keys_that_were_coming_when_the_server_died_come_once(tmp_path):
    a_server_dies_within_an_add(a_run(), None, tmp_path, "keys", "keys pending")


@pytest.mark.parametrize("host", [0, 2])
def test_whichever_host_is_lost_the_others_meet_at_barriers(tmp_path, host):
    a_host_is_killed(a_run(), None, tmp_path, host)


@pytest.mark.night
@pytest.mark.parametrize("host", [1, 2])
def test_a_lost_host_that_does_not_write_costs_no_more(tmp_path, host):
    a_host_is_lost(a_run(), None, tmp_path, host)


@pytest.mark.parametrize("point", ["snapshot written", "snapshot renamed"])
def test_a_writer_that_dies_leaves_the_older_snapshot_and_another_goes_on(tmp_path, point):
    a_writer_dies(a_run(), None, tmp_path, point)


def test_a_snapshot_holds_the_same_rounds_of_all_hosts(tmp_path):
    rounds_are_whole(a_run(), None, tmp_path)


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    scene, says = SCENES[bug]
    run = a_run()
    with pytest.raises(AssertionError, match=says):
        scene(run, bug, tmp_path)
    for host in range(NUM_HOSTS):  # whose workers were killed, some before they had come
        kill_server(run, host)

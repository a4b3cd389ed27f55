"""Tables outlive a host: `snapshot` by the master, and `restore` on the hosts that are left.

Three hosts, as in test_host_controls.py. A client adds lines that count themselves, (1, q, q²) for
its q-th add, to a row on each host: half of an add in a snapshot, or one twice, shows in the three
sums. Each scene goes well, and each planted bug makes one go wrong.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import torch

from phalanx import tables
from phalanx.errors import CheckpointError, PeerTimeout
from phalanx.ipc import inject, wait_until
from phalanx.tables import host_service, router, snapshots
from phalanx.tables import table as table_module
from phalanx.tables.remote_part import RemotePart
from phalanx.tables.snapshots import SNAPSHOT_POINTS
from tests.multiprocess.children import Child, Children, Parent, wait_for_exit
from tests.multiprocess.hosts import become_worker, free_port, kill_server, variables
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("adds-between-hosts-are-kept")

NUM_HOSTS = 3
CLIENTS = 5  # on hosts 0, 0, 1, 1 and 2
SHORT_S = 1.0
DEADLINE_S = 60.0
_numbers = count()

Scene = Callable[[str, "str | None", Path], None]


# --- bugs -----------------------------------------------------------------------------------------


def written_in_place() -> None:
    """What is written takes the place of the older snapshot as it is written."""

    @contextmanager
    def in_place(path: Path) -> Iterator[Path]:
        path.write_bytes(b"")
        yield path

    snapshots.written_whole = in_place


def lost_rows_are_zeros() -> None:
    """Where a host does not answer, zeros are written for its rows."""
    copy_all = RemotePart.copy_all

    def copy_what_is_there(self: RemotePart, timeout_s: float):
        try:
            return copy_all(self, timeout_s)
        except PeerTimeout:
            if self.spec.has_keys:
                return [torch.empty(0, dtype=torch.int64), torch.empty((0, 3), dtype=torch.int64)]
            return [torch.zeros((self.spec.rows, 3), dtype=torch.int64)]

    RemotePart.copy_all = copy_what_is_there  # type: ignore[method-assign]


def first_copy_kept() -> None:
    """Whatever is added, the first copy is written again."""
    copies: dict[str, list[torch.Tensor]] = {}

    def save_parts(spec, parts, directory: Path) -> Path:
        return save(spec, copies.setdefault(spec.name, parts), directory)

    save, table_module.save_parts = table_module.save_parts, save_parts


def drafts_stay() -> None:
    """Each writer has a name of its own for what it writes."""

    @contextmanager
    def with_a_name_of_its_own(path: Path) -> Iterator[Path]:
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_bytes(b"")
        yield draft
        draft.replace(path)

    snapshots.written_whole = with_a_name_of_its_own


def silence_unheard() -> None:
    """Who waits for a round looks at the workers on its own host's page only."""
    router.wait_for = lambda pendings: None


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        written_in_place,
        lost_rows_are_zeros,
        first_copy_kept,
        drafts_stay,
        silence_unheard,
    )
}


# --- workers --------------------------------------------------------------------------------------


@contextmanager
def workers(
    run: str,
    num_workers: int,
    num_hosts: int,
    body: Callable[..., None],
    bug: str | None,
    *args: object,
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
    host_service._BACK_S = 0.5
    if bug is not None:
        BUGS[bug]()
    body(parent, *args)


def written_again(path: Path, times: int) -> None:
    """Wait until a snapshot has come so many times."""
    for _ in range(times):
        before = identity(path)
        assert wait_until(lambda before=before: identity(path) != before, DEADLINE_S), (
            "no snapshot is written"
        )


def identity(path: Path) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


# --- a host is lost -------------------------------------------------------------------------------


class Books:
    """The tables of a client, with a row for each client on each of three hosts, and by key."""

    def __init__(self, world: tables.TableGroup) -> None:
        self.world = world
        self.rows = world.matrix(NUM_HOSTS * CLIENTS, 3, torch.int64, name="rows", init=0)
        self.keys = world.keys(3, torch.int64, name="keys", capacity=1)
        self.all = (self.rows, self.keys)

    def add(self, client: int, q: int) -> None:
        line = torch.tensor([[1, q, q * q]] * NUM_HOSTS)
        self.rows.add(line, rows=[host * CLIENTS + client for host in range(NUM_HOSTS)])
        self.keys.add(line, rows=[-1 - client, client + (q << 32), -1 - client])

    def write(self, folder: Path) -> None:
        for table in self.all:
            table.snapshot(folder)

    def counts(self, client: int) -> tuple[int, int]:
        """Return how many adds of a client are in the rows, at least, and in the keys."""
        rows = self.rows.get([host * CLIENTS + client for host in range(NUM_HOSTS)]).tolist()
        for row in rows:
            assert row == sums(row[0]), f"half of an add, or one twice: {row}"
        twice = self.keys.get([-1 - client])[0].tolist()
        assert twice == [2 * each for each in sums(twice[0] // 2)], f"half of an add: {twice}"
        return min(row[0] for row in rows), twice[0] // 2


def sums(n: int) -> list[int]:
    return [n, n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6]


def keep_books(parent: Parent, folder: Path) -> None:
    """Add, with snapshots, until a host is lost; say how many adds were taken when asked."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        books, q = Books(world), 0
        world.barrier()
        try:
            while True:
                books.add(world.worker_id, q + 1)
                q += 1
                if world.is_master:
                    books.write(folder)
                if parent.connection.poll():
                    assert parent.hear() == "how many"
                    world.timeout_s = SHORT_S
                    parent.tell(q)
        except PeerTimeout as exc:  # rows of the lost host
            parent.tell(str(exc))
        left = parent.hear()
        assert wait_until(lambda: len(world.workers) == left, DEADLINE_S)
        if world.is_master:
            with suppress(PeerTimeout):  # rows of the lost host
                books.write(folder)
        parent.tell(world.is_master)
        parent.hear()


def go_on(parent: Parent, folder: Path) -> None:
    """Restore, say what is there, and go on adding."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        books, me = Books(world), world.worker_id
        world.barrier()
        if world.is_master:
            for table in books.all:
                table.restore(folder)
        world.barrier()
        found = [books.counts(client) for client in range(CLIENTS)]
        world.barrier()
        parent.tell(found)
        books.keys.add(torch.ones(1, 3, dtype=torch.int64), rows=[1000 + me])
        before = books.keys.get([-1 - me])
        books.keys.add(torch.ones(1, 3, dtype=torch.int64), rows=[-1 - me])
        world.barrier()
        assert torch.equal(books.keys.get([-1 - me]), before + 1)
        assert books.keys.get([1000, 1001, 1002])[:, 0].tolist() == [1, 1, 1]
        world.barrier()


def a_host_is_lost(run: str, bug: str | None, folder: Path, host: int = 0) -> None:
    with workers(run, CLIENTS, NUM_HOSTS, keep_books, bug, folder) as started:
        for table in ("rows", "keys"):
            written_again(folder / f"{table}.snapshot", 1)
        for client in started:
            client.put("how many")
        taken = [client.get() for client in started]
        for table in ("rows", "keys"):
            written_again(folder / f"{table}.snapshot", 2)  # the second began when it was all there
        lost = [client for n, client in enumerate(started) if n * NUM_HOSTS // CLIENTS == host]
        for client in lost:
            os.kill(client.pid, signal.SIGKILL)
        for client in lost:
            client.process.join()
        kill_server(run, host)
        others = [client for client in started if client not in lost]
        for client in others:
            assert f"Host {host} (" in client.get()
        for client in others:
            client.put(len(others))
        assert sum(client.get() for client in others) == 1  # is master, and leaves what is there
    with workers(f"{run}-again", 3, NUM_HOSTS - 1, go_on, None, folder) as started:
        for client in started:
            found = client.get()
            for who, (acknowledged, counted) in enumerate(zip(taken, found, strict=True)):
                assert min(counted) >= acknowledged, f"adds of client {who} are lost: {counted}"
        for client in started:
            client.process.join(DEADLINE_S)
            assert client.process.exitcode == 0


# --- a round is on all hosts, or on none ----------------------------------------------------------


def make_rounds(parent: Parent, folder: Path) -> None:
    """Add 1 to everything, get, and so on; the master writes after each of its gets."""
    with tables.join(timeout_s=DEADLINE_S) as world:
        table = world.array(7, name="t", sync=True)
        while True:
            table.add(torch.ones(7))
            if table.get()[0] == NUM_HOSTS:
                parent.tell("begun")
            if world.is_master:
                table.snapshot(folder)


def rounds_are_whole(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, NUM_HOSTS, NUM_HOSTS, make_rounds, bug, folder) as started:
        for worker in started:
            assert worker.get() == "begun"
        for _ in range(3):
            written_again(folder / "t.snapshot", 1)
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
        gets = [table[name].async_get() for name in mine]
        world.barrier()
        parent.tell("arrived")
        assert parent.hear() == "go on"
        world.timeout_s = SHORT_S
        with pytest.raises(PeerTimeout) as raised:
            gets[0].wait()
        parent.tell(str(raised.value))
        parent.hear()


def survivors_are_not_blamed(run: str, bug: str | None, folder: Path) -> None:
    with workers(run, NUM_HOSTS, NUM_HOSTS, miss_two, bug) as (*others, lost):
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


def write_until_killed(parent: Parent, run: str, bug: str | None, folder: Path, point: str) -> None:
    """Write a snapshot, then add, and die at a point of the next one."""
    plant(bug)
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = world.matrix(ROWS, 2, name="t", init=1.0)
        table.snapshot(folder)
        table.add(torch.ones(ROWS, 2))

        def fault(where: str, worker: int) -> None:
            if where == point:
                os.kill(os.getpid(), signal.SIGKILL)

        inject(fault)
        parent.tell("ready")
        parent.hear()
        table.snapshot(folder)


def write_after_it(parent: Parent, run: str, bug: str | None, folder: Path) -> None:
    plant(bug)
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = world.matrix(ROWS, 2, name="t")
        parent.tell("ready")
        parent.hear()
        table.snapshot(folder)


def plant(bug: str | None) -> None:
    if bug is not None:
        BUGS[bug]()


def value_of_all(folder: Path) -> list[float]:
    with tables.join() as world:
        table = world.matrix(ROWS, 2, name="t")
        try:
            table.restore(folder)
        except CheckpointError as exc:
            raise AssertionError(f"half of a snapshot counts: {exc}") from exc
        return table.get().unique().tolist()


def a_writer_dies(run: str, bug: str | None, folder: Path, point: str = "snapshot begun") -> None:
    with Children() as children:
        first = children.start(write_until_killed, run, bug, folder, point)
        assert first.get() == "ready"
        second = children.start(write_after_it, run, bug, folder)
        assert second.get() == "ready"
        first.put("go on")
        wait_for_exit(first.pid)
        assert value_of_all(folder) == [2.0 if point == SNAPSHOT_POINTS[-1] else 1.0]
        second.put("go on")
        second.process.join(DEADLINE_S)
    assert value_of_all(folder) == [2.0]
    left = sorted(entry.name for entry in folder.iterdir())
    assert left == ["t.snapshot"], f"something is left: {left}"


# --- tests ----------------------------------------------------------------------------------------

SCENES: dict[str, tuple[Scene, str]] = {
    "written_in_place": (a_writer_dies, "half of a snapshot counts"),
    "lost_rows_are_zeros": (a_host_is_lost, "are lost"),
    "first_copy_kept": (a_host_is_lost, "are lost"),
    "drafts_stay": (a_writer_dies, "something is left"),
    "silence_unheard": (survivors_are_not_blamed, "a survivor is blamed"),
}


def a_run() -> str:
    return f"lh{os.getpid()}-{next(_numbers)}"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until_removed(f"lh{os.getpid()}-", sweep=True)


def test_a_lost_host_costs_what_was_added_since_the_last_snapshot(tmp_path):
    a_host_is_lost(a_run(), None, tmp_path)


@pytest.mark.night
@pytest.mark.parametrize("host", [1, 2])
def test_so_does_one_that_does_not_write(tmp_path, host):
    a_host_is_lost(a_run(), None, tmp_path, host)


def test_a_snapshot_holds_the_same_rounds_of_all_hosts(tmp_path):
    rounds_are_whole(a_run(), None, tmp_path)


def test_gets_that_miss_a_lost_host_name_it_and_not_who_survived(tmp_path):
    survivors_are_not_blamed(a_run(), None, tmp_path)


@pytest.mark.parametrize("point", SNAPSHOT_POINTS)
def test_a_writer_that_dies_leaves_the_older_snapshot_and_another_goes_on(tmp_path, point):
    a_writer_dies(a_run(), None, tmp_path, point)


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug, tmp_path):
    scene, says = SCENES[bug]
    with pytest.raises(AssertionError, match=says):
        scene(a_run(), bug, tmp_path)

"""Tables whose workers are killed: every acknowledged add is there, once and whole."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch

from phalanx import tables
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import fail_points
from phalanx.native import FUNCTIONS
from phalanx.tables import part, router
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.products import in_pairs

pytestmark = pytest.mark.promise("acknowledged-adds-are-kept")

DEADLINE_S = 60.0
ROWS, COLS = 9, 4


def open_table(world: tables.TableGroup, updater: str, num_shards: int = 1) -> tables.Table:
    return world.matrix(ROWS, COLS, name="t", init=1.0, updater=updater, num_shards=num_shards)


def die_at(point: str, times: int) -> None:
    """Kill this process at the given passing of a point."""
    left = times

    def fault(reached: str, worker: int) -> None:
        nonlocal left
        if reached == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    fail_points.inject(fault)


DELTA = torch.arange(1.0, 1 + ROWS * COLS).view(ROWS, COLS)
SOME = [7, 0, 3, 7, 8, 1]


def victim(
    parent: Parent, run: str, updater: str, whole: bool, blocks: bool, point: str, times: int
) -> None:
    if blocks:
        part.BLOCK_ROWS = 2
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, updater)
        table.add(DELTA[SOME], rows=SOME)
        parent.tell("ready")
        die_at(point, times)
        table.add(DELTA) if whole else table.add(DELTA[SOME], rows=SOME)


def everything(table: tables.Table) -> list[torch.Tensor]:
    """Return the values and the updater's states."""
    return table._storage.copy_all(DEADLINE_S)


def expected(updater: str, whole: bool, taken: bool) -> list[torch.Tensor]:
    with tables.join() as world:
        table = open_table(world, updater)
        table.add(DELTA[SOME], rows=SOME)
        if taken:
            table.add(DELTA) if whole else table.add(DELTA[SOME], rows=SOME)
        return everything(table)


PLACES = [
    ("before lock", 1, False),
    ("lock held", 1, False),
    ("undo written", 1, False),
    ("half the rows written", 1, False),
    ("before unlock", 1, True),
    ("after unlock", 1, True),
]
IN_BLOCKS = [*(place[:2] for place in PLACES), *(("half the rows written", n) for n in (2, 3))]


def look_after_a_death(table: tables.Table, world: tables.TableGroup, wanted: list) -> None:
    assert world.workers == [0]
    assert torch.equal(table.get(), wanted[0])
    for found, want in zip(everything(table), wanted, strict=True):
        assert torch.equal(found, want)


@in_pairs("place, updater, whole", PLACES, ["sum", "adam"], [False, True])
def test_an_add_that_a_death_interrupts_is_there_whole_or_not_at_all(run, place, updater, whole):
    point, times, taken = place
    with Children() as children, tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, updater)
        child = children.start(victim, run, updater, whole, False, point, times)
        assert child.get() == "ready"
        wait_for_exit(child.pid)
        wanted = expected(updater, whole, taken)
        look_after_a_death(table, world, wanted)
        assert table.stats().undone == int(point in ("undo written", "half the rows written"))
        table.add(DELTA)  # the shard serves on, and whatever the dead one left is no obstacle
        assert not torch.equal(table.get(), wanted[0])


@in_pairs("place, updater, whole", IN_BLOCKS, ["sum", "adam"], [False, True])
def test_an_add_of_several_blocks_that_a_death_interrupts_is_there_whole(
    run, place, updater, whole
):
    """It is in its worker's log before a row is changed."""
    point, times = place
    with Children() as children, tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, updater)
        child = children.start(victim, run, updater, whole, True, point, times)
        assert child.get() == "ready"
        wait_for_exit(child.pid)
        look_after_a_death(table, world, expected(updater, whole, True))
        assert table.stats().undone == int(point in ("undo written", "half the rows written"))


def victim_of_shards(parent: Parent, run: str) -> None:
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, "sum", num_shards=2)
        parent.tell("ready")
        die_at("lock held", 1)
        table.add(DELTA)


@pytest.mark.parametrize("has_successor", [False, True])
def test_a_get_waits_for_who_makes_the_rest_of_a_dead_workers_add(run, has_successor):
    """Else it would answer without an add that is there a moment later."""
    with (
        Children() as children,
        tables.join(run, timeout_s=DEADLINE_S) as world,
        world.thread_worker() as other,
        contextlib.ExitStack() as later,
    ):
        table, others = (open_table(each, "sum", num_shards=2) for each in (world, other))
        child = children.start(victim_of_shards, run)
        assert child.get() == "ready"
        wait_for_exit(child.pid)
        if has_successor:
            assert later.enter_context(world.thread_worker()).worker_id == 2
        begun, go_on = threading.Event(), threading.Event()

        def fault(reached: str, worker: int) -> None:
            if reached == "before lock":
                begun.set()
                assert go_on.wait(DEADLINE_S)

        fail_points.inject(fault)
        thread = threading.Thread(target=others.get)
        thread.start()
        try:
            assert begun.wait(DEADLINE_S)
            world.timeout_s = 0.2
            with pytest.raises(PeerTimeout, match="log of worker 2"):
                table.get()
        finally:
            world.timeout_s = DEADLINE_S
            go_on.set()
            thread.join(DEADLINE_S)
            fail_points.inject(None)
        assert torch.equal(table.get(), 1 + DELTA)


def reader(parent: Parent, run: str, kind: str, updater: str, point: str) -> None:
    FUNCTIONS["part_get"] = lambda *_: part.UNSETTLED  # so that it takes the lock
    with tables.join(run, num_workers=2, timeout_s=DEADLINE_S) as world:
        table = open_one(world, kind, updater)
        table.add(DELTA[SOME], rows=SOME)
        parent.tell("ready")
        die_at(point, 1)
        table.get([*SOME, 5])


def open_one(world: tables.TableGroup, kind: str, updater: str) -> tables.Table:
    if kind == "rows":
        return open_table(world, updater)
    return world.keys(COLS, name="t", init=1.0, updater=updater, capacity=1)


@in_pairs("kind, updater, point", ["rows", "keys"], ["adam", "sum"], router.READ_POINTS)
def test_a_death_within_a_get_holds_nobody_up_and_changes_nothing(run, kind, updater, point):
    with (
        Children() as children,
        tables.join(run, num_workers=2, timeout_s=DEADLINE_S) as world,
    ):
        table = open_one(world, kind, updater)
        child = children.start(reader, run, kind, updater, point)
        assert child.get() == "ready"
        wait_for_exit(child.pid)
        with tables.join(num_workers=2) as alone:  # which nobody else joins
            twin = open_one(alone, kind, updater)
            for each in (table, twin):
                if each is twin:
                    twin.add(DELTA[SOME], rows=SOME)
                each.add(DELTA[SOME], rows=SOME)
            assert torch.equal(table.get(SOME), twin.get(SOME))
        assert world.workers == [0]
        assert table.stats().undone == 0


def bulk_victim(parent: Parent, run: str, point: str, times: int) -> None:
    with tables.join(run, num_workers=2, sync=True, timeout_s=DEADLINE_S) as world:
        table = open_table(world, "sum", num_shards=2)
        for _ in range(3):
            table.add(DELTA)
            table.add(DELTA[SOME], rows=SOME)
            parent.tell("put")
            parent.hear()
            if point == "get":
                die_at("lock held", times)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
            table.get()


@pytest.mark.parametrize(("point", "times"), [("put", 0), *(("get", k) for k in range(1, 9))])
def test_what_a_worker_put_down_before_it_died_is_in_the_next_round(run, point, times):
    with (
        Children() as children,
        tables.join(run, num_workers=2, sync=True, timeout_s=DEADLINE_S) as world,
    ):
        child = children.start(bulk_victim, run, point, times)
        table = open_table(world, "sum", num_shards=2)
        assert child.get() == "put"
        table.add(DELTA)
        table.add(DELTA[SOME], rows=SOME)
        child.put()  # it goes on to its get, takes the round in, and dies of that
        if times:
            pending = table.async_get()
        wait_for_exit(child.pid) if times else None
        got = pending.wait() if times else table.get()
        once = torch.ones(ROWS, COLS)
        for _ in range(2):
            once = (once + DELTA).index_add(0, torch.tensor(SOME), DELTA[SOME])
        assert torch.equal(got, once)


def late_worker(parent: Parent, run: str) -> None:
    """Join, and add to the round that comes next."""
    with tables.join(run, sync=True, timeout_s=DEADLINE_S) as world:
        table = open_table(world, "sum", num_shards=2)
        table.add(torch.full((ROWS, COLS), 1000.0))
        parent.tell("put")
        parent.tell(table.get().tolist())


@pytest.mark.parametrize("times", [3, 5, 6])
def test_who_joins_after_the_death_of_a_rounds_taker_adds_to_the_next_round(run, times):
    with (
        Children() as children,
        tables.join(run, num_workers=2, sync=True, timeout_s=DEADLINE_S) as world,
    ):
        child = children.start(bulk_victim, run, "get", times)
        table = open_table(world, "sum", num_shards=2)
        assert child.get() == "put"
        table.add(DELTA)
        table.add(DELTA[SOME], rows=SOME)
        child.put()
        pending = table.async_get()
        wait_for_exit(child.pid)
        late = children.start(late_worker, run)
        assert late.get() == "put"
        once = torch.ones(ROWS, COLS)
        for _ in range(2):
            once = (once + DELTA).index_add(0, torch.tensor(SOME), DELTA[SOME])
        assert torch.equal(pending.wait(), once)
        assert torch.equal(table.get(), once + 1000)
        assert torch.equal(torch.tensor(late.get()), once + 1000)
        late.process.join(DEADLINE_S)


# --- a worker that is lost ------------------------------------------------------------------------

MODES = {"asynchronous": {}, "bulk": {"sync": True}, "bounded": {"staleness": 1}}


def go_rounds(parent: Parent, run: str, mode: str) -> None:
    torch.set_num_threads(1)
    with tables.join(run, num_workers=3, timeout_s=DEADLINE_S, **MODES[mode]) as world:
        table = world.array(1, torch.int64, name="t")
        by_key = world.keys(1, torch.int64, name="k", capacity=1)
        for number in range(8):
            table.add([1])
            by_key.add([[1]], rows=[-number])
            world.tick()
            table.get()
            by_key.get([-number])
            if number == 3:
                world.barrier("third")
                parent.tell((world.worker_id, world.num_workers))
                parent.hear()
        world.barrier("over")
        parent.tell((world.num_workers, table.get().item(), len(by_key)))


@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode_the_others_go_on_without_a_worker_that_is_killed(run, mode):
    with Children() as children:
        started = [children.start(go_rounds, run, mode) for _ in range(3)]
        assert sorted(child.get() for child in started) == [(0, 3), (1, 3), (2, 3)]
        started[1].kill()
        others = [started[0], started[2]]
        for child in others:
            child.put()
        for num_workers, adds, num_keys in [child.get() for child in others]:
            assert num_workers <= 2
            assert adds == 3 * 4 + 2 * 4
            assert num_keys == 8
        for child in others:
            child.process.join(DEADLINE_S)


# --- what is left ---------------------------------------------------------------------------------


def abandon(parent: Parent, run: str) -> None:
    world = tables.join(run)
    world.array(1000, name="left").add([1.0] * 1000)
    parent.tell("there")
    parent.hear()


def test_what_a_killed_run_left_is_swept_by_the_next_start(run):
    with Children() as children:
        child = children.start(abandon, run)
        assert child.get() == "there"
        assert [entry for entry in os.listdir("/dev/shm") if run in entry]
        child.kill()  # from here on any process that joins a run sweeps it away
    with tables.join(run) as world:
        assert world.worker_id == 0
        assert world.array(1000, name="left").get().sum().item() == 0


def waiter(parent: Parent, run: str) -> None:
    with tables.join(run, num_workers=3, timeout_s=DEADLINE_S) as world:
        parent.tell(world.worker_id)
        world.barrier("together")
        parent.tell("passed")
        parent.hear()


def stand(parent: Parent, run: str) -> None:
    with tables.join(run):
        parent.tell("there")
        parent.hear()


def test_a_barrier_goes_on_without_a_worker_that_dies(run):
    with Children() as children:
        started = [children.start(waiter, run) for _ in range(2)]
        away = children.start(stand, run)
        numbers = [child.get() for child in started]
        assert away.get() == "there"
        away.kill()
        assert [child.get() for child in started] == ["passed", "passed"]
        assert len(set(numbers)) == 2
        for child in started:
            child.put()
            child.process.join(DEADLINE_S)


def test_a_forked_child_is_told_that_it_has_not_joined():
    with tables.join() as world:
        table = world.array(2)
        pid = os.fork()
        if pid == 0:
            try:
                world.barrier()
            except StateError as exc:
                os._exit(17 if "forked" in str(exc) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
        assert table.get().tolist() == [0.0, 0.0]


def test_a_forked_child_changes_no_round_of_its_parent():
    with tables.join(sync=True) as world:
        table = world.array(1)
        table.add([1.0])
        pending = table.async_get()
        pid = os.fork()
        if pid == 0:
            refused = int(not world.is_master)
            calls = (
                lambda: table.add([5.0]),
                table.get,
                table.async_get,
                table.stats,
                pending.wait,
            )
            for call in calls:
                try:
                    call()
                except StateError as exc:
                    refused += "forked" in str(exc)
            os._exit(10 + refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 16
        assert pending.wait().tolist() == table.get().tolist() == [1.0]


# --- a lock that is held too long -----------------------------------------------------------------


def _hold_a_shard(parent: Parent, run: str, num_threads: int) -> None:
    with tables.join(run, timeout_s=DEADLINE_S) as world, contextlib.ExitStack() as others:
        for _ in range(num_threads - 1):
            others.enter_context(world.thread_worker())
        table = world.matrix(6, 2, name="x", num_shards=3)
        with table._storage.here.parts[1].lock.held(DEADLINE_S):
            parent.tell(world.worker_id)
            parent.hear()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_who_holds_a_shard_too_long_is_named_by_number(run, num_threads):
    with tables.join(run, timeout_s=0.1) as world, world.thread_worker(), Children() as children:
        table = world.matrix(6, 2, name="x", num_shards=3)
        holder = children.start(_hold_a_shard, run, num_threads)
        assert holder.get() == 2
        table.add(torch.ones(1, 2), rows=[0])
        with pytest.raises(PeerTimeout, match=f"process {holder.pid} holds it") as caught:
            table.add(torch.ones(6, 2))
        # which of a process's threads it is, a lock does not know
        assert caught.value.rank == (2 if num_threads == 1 else None)
        holder.put()
        holder.process.join(DEADLINE_S)


def _hold_a_lock(parent: Parent, run: str, which: str) -> None:
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = world.matrix(6, 2, name="x", sync=True)
        storage = table._storage.here
        lock = {
            "membership": world.membership.lock,
            "rounds": storage.lock,
            "shard": storage.parts[0].lock,
        }[which]
        with lock.held(DEADLINE_S):
            parent.tell(world.worker_id)
            parent.hear()


@pytest.mark.parametrize(
    ("which", "act"),
    [
        ("membership", lambda world, table: world.barrier()),
        ("membership", lambda world, table: world.leave()),
        ("rounds", lambda world, table: table.async_get().wait()),
        ("shard", lambda world, table: table.snapshot("never")),
        ("shard", lambda world, table: table.restore("snapshot")),
    ],
)
def test_whoever_holds_any_lock_of_a_run_too_long_is_named_by_number(
    run, which, act, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with tables.join(run, timeout_s=DEADLINE_S) as world, Children() as children:
        table = world.matrix(6, 2, name="x", sync=True)
        table.snapshot("snapshot")
        holder = children.start(_hold_a_lock, run, which)
        assert holder.get() == 1
        world.timeout_s = 0.1
        with pytest.raises(PeerTimeout) as caught:
            act(world, table)
        assert caught.value.rank == 1
        world.timeout_s = DEADLINE_S
        holder.put()
        holder.process.join(DEADLINE_S)

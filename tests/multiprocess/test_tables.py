"""Tables whose workers are killed: every acknowledged add is there, once and whole."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import torch

from phalanx import tables
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import fail_points
from phalanx.native import FUNCTIONS
from phalanx.tables import keys as key_tables
from phalanx.tables import part
from tests.chaos.table_bugs import Patch, plant
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.products import some_by_day

pytestmark = pytest.mark.promise("acknowledged-adds-are-kept")

DEADLINE_S = 60.0
ROWS, COLS = 9, 4
SOME = [7, 0, 3, 7, 8, 1]
OTHERS = [4, 2, 6]
MANY = [*range(100, 140), *SOME]  # more keys than there is room for
CHANGES: dict[str, list[int] | None] = {
    "rows": SOME,
    "whole": None,
    "keys": [7, 5_000_000_000, -3, 7, -9, (1 << 63) - 1],
    "many keys": MANY,
}
POINTS = (
    "before lock",
    "lock held",
    "undo written",
    "half the rows written",
    "before unlock",
    "after unlock",
)
"""Those that an add passes, in order."""
KEY_POINTS = ("room made", "keys written", "keys pending")
"""Those that an add of new keys passes first."""
DELTA = torch.arange(1.0, 1 + COLS * len(MANY)).view(-1, COLS)


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


def open_table(world: tables.TableGroup, updater: str, kind: str = "rows") -> tables.Table:
    if "keys" in kind:
        return world.keys(COLS, name="t", init=1.0, updater=updater)
    return world.matrix(ROWS, COLS, name="t", init=1.0, updater=updater)


def add(table: tables.Table, rows: list[int] | None) -> None:
    table.add(DELTA[: ROWS if rows is None else len(rows)], rows=rows)


def contents(table: tables.Table) -> tuple[list, list]:
    """Return its keys, if it has some, and the values of all rows."""
    keys = table.keys() if isinstance(table, tables.KeyTable) else None
    return [] if keys is None else keys.tolist(), table.get(keys).tolist()


def contents_after(adds: list, updater: str, kind: str) -> list[tuple[list, list]]:
    """Return what a table holds after each of some adds that nobody interrupts."""
    with tables.join() as world:
        table = open_table(world, updater, kind)
        return [(add(table, rows), contents(table))[1] for rows in adds]


def take_locks_to_read() -> None:
    """Have each get take the lock, as where adds overtake it."""
    get, is_first = FUNCTIONS["part_get"], itertools.cycle((True, False))
    FUNCTIONS["part_get"] = lambda *args: part.UNSETTLED if next(is_first) else get(*args)


# --- a death within a call ------------------------------------------------------------------------


def victim(
    parent: Parent,
    run: str,
    updater: str,
    kind: str,
    in_blocks: bool,
    point: str,
    bug: str | None,
) -> None:
    plant(bug)
    if in_blocks:
        part.BLOCK_ROWS = 2
    key_tables._LEAST_ROOM = 1  # so that each add of new keys takes memory
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, updater, kind=kind)
        add(table, SOME)
        parent.tell("ready")
        die_at(point, 1)
        add(table, CHANGES[kind])


PLACES = [
    (kind, point)
    for kind in CHANGES
    for point in (*POINTS, *(KEY_POINTS if "keys" in kind else ()))
]


def death_within_an_add(
    run: str,
    place: tuple[str, str],
    updater: str,
    in_blocks: bool,
    bug: str | None = None,
    patch: Patch = setattr,
    timeout_s: float = DEADLINE_S,
) -> None:
    """Kill a worker at a point of an add; compare with a table of nobody who dies."""
    kind, point = place
    is_there = point in ("before unlock", "after unlock")
    later = [OTHERS, SOME, CHANGES[kind]]
    adds = [SOME, *[CHANGES[kind]] * is_there, *later]
    expected = contents_after(adds, updater, kind)[-4:]
    plant(bug, patch)
    with Children() as children, tables.join(run, timeout_s=timeout_s) as world:
        table = open_table(world, updater, kind=kind)
        child = children.start(victim, run, updater, kind, in_blocks, point, bug)
        assert child.get() == "ready"
        wait_for_exit(child.pid)
        assert world.workers == [0]
        found = [contents(table)]
        for rows in later:  # by which states of the updater would be seen, too
            add(table, rows)
            found.append(contents(table))
        assert found == expected, "an add is lost, there twice or by half"


@some_by_day("place, updater, in_blocks", PLACES, ["adam", "sum"], [False, True])
def test_an_add_that_a_death_interrupts_is_there_whole_or_not_at_all(
    run, place, updater, in_blocks
):
    death_within_an_add(run, place, updater, in_blocks)


def restoring_victim(parent: Parent, run: str, kind: str, folder: str) -> None:
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = open_table(world, "adam", kind)
        add(table, SOME)
        table.snapshot(folder)
        add(table, SOME)
        parent.tell()
        parent.hear()  # until the other one has come
        die_at("restoring", 1)
        table.restore(folder)


@pytest.mark.parametrize("kind", ["rows", "keys"])
def test_a_restore_that_a_death_interrupts_must_be_made_again(run, tmp_path, kind):
    before, after = contents_after([SOME, SOME], "adam", kind)
    with Children() as children:
        child = children.start(restoring_victim, run, kind, str(tmp_path))
        child.get()
        with tables.join(run, timeout_s=DEADLINE_S) as world:
            table = open_table(world, "adam", kind)
            child.put()
            wait_for_exit(child.pid)
            for call in (lambda: table.get([7]), lambda: add(table, SOME)):
                with pytest.raises(StateError, match="Call `restore` again"):
                    call()
            table.restore(tmp_path)  # which the survivor does now as the master
            assert contents(table) == before
            add(table, SOME)
            assert contents(table) == after


# --- a worker that is lost ------------------------------------------------------------------------

MODES = {"asynchronous": {}, "bulk": {"sync": True}, "bounded": {"staleness": 1}}


def go_rounds(parent: Parent, run: str, mode: str) -> None:
    torch.set_num_threads(1)
    with tables.join(run, num_workers=3, timeout_s=DEADLINE_S, **MODES[mode]) as world:
        table = world.array(1, torch.int64, name="t")
        by_key = world.keys(1, torch.int64, name="k")
        for number in range(8):
            table.add([1])
            by_key.add([[1]], rows=[-number])
            world.tick()
            table.get()
            by_key.get([-number])
            if number == 3:
                world.barrier()
                parent.tell((world.worker_id, world.num_workers))
                parent.hear()
        world.barrier()
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


def test_a_forked_child_changes_no_round_of_its_parent():
    with tables.join(sync=True) as world:
        table = world.array(1)
        table.add([1.0])
        pid = os.fork()
        if pid == 0:
            refused = int(not world.is_master)
            for call in (world.barrier, lambda: table.add([5.0]), table.get):
                try:
                    call()
                except StateError as exc:
                    refused += "forked" in str(exc)
            os._exit(10 + refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 14
        assert table.get().tolist() == [1.0]


# --- a lock that is held too long -----------------------------------------------------------------


def _hold_a_lock(parent: Parent, run: str, which: str) -> None:
    with tables.join(run, timeout_s=DEADLINE_S) as world:
        table = world.matrix(6, 2, name="x", sync=True)
        storage = table._storage.here
        lock = {
            "membership": world.membership.lock,
            "rounds": storage.memory.lock,
            "rows": storage.part.lock,
        }[which]
        with lock.held(DEADLINE_S):
            parent.tell(world.worker_id)
            parent.hear()


@pytest.mark.parametrize(
    ("which", "act"),
    [
        ("membership", lambda world, table: world.barrier()),
        ("rows", lambda world, table: table.get()),
        ("rounds", lambda world, table: table.get()),
        ("rows", lambda world, table: table.snapshot("never")),
        ("rows", lambda world, table: table.restore("snapshot")),
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

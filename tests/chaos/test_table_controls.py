"""Planted bugs in parameter tables: each scene goes well, and each bug makes one go wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import tables
from phalanx.errors import PeerTimeout
from phalanx.ipc import fail_points
from phalanx.tables import keys, part
from tests.chaos.table_bugs import BUGS, plant
from tests.multiprocess.children import Children, Parent, wait_for_exit
from tests.multiprocess.test_tables import death_within_an_add
from tests.run_directories import wait_until_removed

pytestmark = pytest.mark.promise("acknowledged-adds-are-kept")

DEADLINE_S = 60.0
SHORT_S = 0.5
ROWS = 8
_numbers = count()

Scene = Callable[[str, "str | None", Path], None]


@pytest.fixture(autouse=True)
def small_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(part, "BLOCK_ROWS", 2)
    monkeypatch.setattr(keys, "_LEAST_ROOM", 1)
    yield
    fail_points.inject(None)


# --- scenes ---------------------------------------------------------------------------------------


def open_all(world: tables.TableGroup) -> tuple[tables.Table, tables.KeyTable]:
    rows = world.matrix(ROWS, 2, torch.int64, name="rows")
    return rows, world.keys(2, torch.int64, name="keys")


def ones(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, 2, dtype=torch.int64)


def an_add_that_takes_its_time(act: Callable[[tables.Table], Any]) -> Any:
    """Return what ``act`` finds while another worker is in the middle of an add."""
    half, go_on = threading.Event(), threading.Event()

    def fault(point: str, worker: int) -> None:
        if point == "half the rows written" and not half.is_set():
            half.set()
            assert go_on.wait(DEADLINE_S)

    with tables.join(num_workers=2, timeout_s=SHORT_S) as one, one.thread_worker() as two:
        slow, quick = (w.matrix(ROWS, 2, torch.int64, name="rows") for w in (one, two))
        fail_points.inject(fault)
        slow.add(ones(0), rows=[])
        thread = threading.Thread(target=slow.add, args=(ones(ROWS), range(ROWS)))
        thread.start()
        try:
            assert half.wait(DEADLINE_S)
            return act(quick)
        finally:
            go_on.set()
            thread.join()
            fail_points.inject(None)


def a_get_within_an_add(run: str, bug: str | None, folder: Path) -> None:
    try:
        seen = an_add_that_takes_its_time(lambda table: table.get())
    except PeerTimeout:
        return  # it could not be answered yet
    assert len(seen.unique()) == 1, "half of an add is seen"


def an_add_within_an_add(run: str, bug: str | None, folder: Path) -> None:
    with pytest.raises(PeerTimeout):
        an_add_that_takes_its_time(lambda table: table.add(ones(2), rows=[0, 1]))


def a_snapshot_within_an_add(run: str, bug: str | None, folder: Path) -> None:
    try:
        an_add_that_takes_its_time(lambda table: table.snapshot(folder))
    except PeerTimeout:
        return
    with tables.join() as world:
        table = world.matrix(ROWS, 2, torch.int64, name="rows")
        table.restore(folder)
        assert len(table.get().unique()) == 1, "half of an add is in the snapshot"


def a_worker_too_far_ahead(run: str, bug: str | None, folder: Path) -> None:
    with (
        tables.join(num_workers=2, staleness=1, timeout_s=SHORT_S) as one,
        one.thread_worker(),
    ):
        table = one.array(1)
        one.tick()
        table.get()
        one.tick()
        with pytest.raises(PeerTimeout):
            table.get()


def bulk_victim(parent: Parent, run: str) -> None:
    with tables.join(run, num_workers=2, sync=True, timeout_s=DEADLINE_S) as world:
        table = world.array(2, torch.int64, name="bulk")
        table.add([1, 1])
        table.add([1, 1])
        parent.tell("put")
        parent.hear()
        left = iter(range(2))  # it has taken one add in, and dies of the next

        def fault(point: str, worker: int) -> None:
            if point == "lock held" and next(left) == 1:
                os.kill(os.getpid(), 9)

        fail_points.inject(fault)
        table.get()


def death_within_a_round(run: str, bug: str | None, folder: Path) -> None:
    with (
        Children() as children,
        tables.join(run, num_workers=2, sync=True, timeout_s=DEADLINE_S) as world,
    ):
        child = children.start(bulk_victim, run)
        table = world.array(2, torch.int64, name="bulk")
        assert child.get() == "put"
        table.add([1, 1])
        world.timeout_s = 0.0
        with pytest.raises(PeerTimeout):  # it has arrived, and makes no add of the round
            table.get()
        child.put()
        wait_for_exit(child.pid)
        world.timeout_s = 4 * SHORT_S
        assert table.get().tolist() == [3, 3], "an add of the round is there twice"
        world.barrier()


def adds_of_new_keys_by_two(run: str, bug: str | None, folder: Path) -> None:
    with tables.join(run, timeout_s=DEADLINE_S) as one, tables.join(run) as two:
        (_, ours), (_, theirs) = open_all(one), open_all(two)
        ours.add(ones(1), rows=[1])
        theirs.add(ones(1), rows=[1])
        ours.add(ones(40), rows=range(40))
        theirs.add(ones(1), rows=[1])
        assert ours.get([1, 39]).tolist() == [[4, 4], [1, 1]], "an add is lost"
        assert theirs.get([1, 39]).tolist() == [[4, 4], [1, 1]], "an add is not seen"


SCENES: dict[str, tuple[Scene, str]] = {
    "lock_ignored": (an_add_within_an_add, "DID NOT RAISE"),
    "half_row_visible": (a_get_within_an_add, "half of an add is seen"),
    "snapshot_torn": (a_snapshot_within_an_add, "half of an add is in the snapshot"),
    "clock_not_advanced": (a_worker_too_far_ahead, "DID NOT RAISE"),
    "dead_still_counted": (death_within_a_round, "Worker 1 .* did not come"),
    "round_taken_twice": (death_within_a_round, "an add of the round is there twice"),
    "index_not_followed": (adds_of_new_keys_by_two, "an add is "),
}


def a_run() -> str:
    return f"c{os.getpid()}-{next(_numbers)}"


@pytest.mark.parametrize("scene", {scene: 0 for scene, _ in SCENES.values()})
def test_each_scene_goes_well(scene: Scene, tmp_path: Path) -> None:
    run = a_run()
    scene(run, None, tmp_path)
    wait_until_removed(run)


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize("bug", SCENES)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scene, says = SCENES[bug]
    plant(bug, monkeypatch.setattr)
    with pytest.raises((AssertionError, PeerTimeout, pytest.fail.Exception), match=says):
        scene(a_run(), bug, tmp_path)


DEATHS = {
    "undo_not_applied": (("rows", "half the rows written"), True),
    "undo_applied_twice": (("rows", "after unlock"), False),
    "lock_outlives_its_holder": (("rows", "lock held"), False),
    "ack_before_effect": (("rows", "after unlock"), False),
    "key_before_its_add": (("keys", "half the rows written"), False),
    "key_without_its_add": (("keys", "half the rows written"), False),
}
"""Bugs that a worker's death within an add shows, and where it dies."""
assert BUGS.keys() == SCENES.keys() | DEATHS.keys()


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize("bug", DEATHS)
def test_a_bug_that_a_death_shows_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, in_blocks = DEATHS[bug]
    patch = monkeypatch.setattr
    with pytest.raises((AssertionError, PeerTimeout), match=r"an add is lost|Lock 'rows"):
        death_within_an_add(a_run(), place, "sum", in_blocks, bug, patch, SHORT_S)

"""Bugs planted in the backend `phalanx`: each scene goes well, and each bug makes one go wrong."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.clock import now_s
from phalanx.distributed import lane
from phalanx.distributed.status_pages import WORDS_PER_PAGE, StatusPages
from phalanx.errors import PeerLost, StateError
from phalanx.ipc import Waiting, inject
from tests.chaos.calls import Call
from tests.chaos.collective_bugs import BUGS
from tests.chaos.native_bugs import NATIVE_BUGS, can_be_planted, plant_in_native
from tests.chaos.ranks import held, join_group
from tests.multiprocess.children import DEADLINE_S, Child, Parent

SIZE = 3
VICTIM = 2
SHORT_S = 5.0  # for whom nobody tells of a death
SLEEP_S = 5.0  # of whom nobody wakes
SPIN_NS = 5  # a word of `SharedMemory`
AWAITED, WANTED = 3, 4  # words of a page

Scene = Callable[[Parent, int], None]


# --- scenes, as each rank plays them --------------------------------------------------------------


def a_death_is_told(parent: Parent, rank: int) -> None:
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        dist.all_reduce(torch.ones(3))
    assert caught.value.rank == VICTIM


def news_travel(parent: Parent, rank: int) -> None:
    """Rank 0 waits for rank 1, which waits for somebody who dies."""
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        dist.recv(torch.empty(3), rank + 1)
    assert caught.value.rank == VICTIM


def sums_are_right(parent: Parent, rank: int) -> None:
    for number, length in enumerate([1, 3_000_001, 5000, 77, 0, 800_000, 4096, 4097]):
        call = Call("all_reduce", number, length, SIZE)
        assert call.is_right(rank), f"a wrong result of {call}"


def a_reader_falls_behind(parent: Parent, rank: int) -> None:
    """The root of a broadcast of many pieces runs ahead of rank 0 until it waits."""
    pages = dist.group.WORLD._memory.pages
    pieces = iter(range(3))

    def fault(point: str, worker: int) -> None:
        if point == "piece published" and next(pieces, None) == 1:
            _await(lambda: _sleeps_for_next_progress_of(pages, 1))

    if rank == 0:
        inject(fault)
    right = Call("broadcast", 0, 3_000_001, SIZE).is_right(rank)
    assert right, "a slot is overwritten"


def calls_differ(parent: Parent, rank: int) -> None:
    with pytest.raises(StateError, match="same calls in the same order"):
        dist.all_reduce(torch.ones(3 + rank))


def sleepers_are_woken(parent: Parent, rank: int) -> None:
    sleep_often(rank, dist.barrier)


def sleep_often(rank: int, call: Callable[[], object]) -> None:
    """Rank 0 comes late each time, when the others sleep for it, and sees that they come again."""
    lane._PATIENCE_S = SLEEP_S
    pages, came_s = dist.group.WORLD._memory.pages, None
    for _ in range(10):
        if rank == 0:
            _await(lambda: all(_sleeps_for_next_progress_of(pages, r) for r in pages.others))
            assert came_s is None or now_s() - came_s < 0.9 * SLEEP_S, "nobody was woken"
        came_s = now_s()
        call()


def progress_comes_before_sleep(parent: Parent, rank: int) -> None:
    """Ranks that never spin are about to sleep when what they wait for comes: they are woken."""
    lane._PATIENCE_S = SLEEP_S
    dist.group.WORLD._memory._words[SPIN_NS] = 0
    for number in range(20):
        began_s = now_s()
        assert Call("all_reduce", number, 9000, SIZE).is_right(rank)
        assert now_s() - began_s < 0.9 * SLEEP_S, "somebody slept in vain"


def _await(ready: Callable[[], bool]) -> None:
    waiting = Waiting(DEADLINE_S)
    while not ready():
        assert not waiting.over()
        waiting.rest()


def _sleeps_for_next_progress_of(pages: StatusPages, rank: int) -> bool:
    """Tell whether ``rank`` sleeps for what this one has not posted."""
    page = pages._words[rank * WORDS_PER_PAGE : (rank + 1) * WORDS_PER_PAGE]
    return page[AWAITED] == pages.rank + 1 and page[WANTED] > pages.progress_of(pages.rank)


def nothing_is_left(parent: Parent, rank: int) -> None:
    dist.barrier()
    before = held()
    group = dist.new_group(backend="phalanx")
    dist.all_reduce(torch.ones(300_000), group=group)
    dist.destroy_process_group(group)
    del group
    assert held() == before, "something is left open"


# --- playing them ---------------------------------------------------------------------------------


def play(parent: Parent, scene: Scene, bug: str | None, store: str, rank: int) -> None:
    torch.set_num_threads(1)
    if bug in NATIVE_BUGS:
        plant_in_native(bug)
    elif bug is not None:
        BUGS[bug](setattr)
    deadly = scene in (a_death_is_told, news_travel)
    join_group(store, rank, SIZE, DEADLINE_S)
    dist.barrier()  # nobody is still to come
    if deadly and bug:
        dist.group.WORLD._timeout_s = SHORT_S
    scene(parent, rank)
    parent.tell("well")
    parent.hear()  # who ends would be missed


@contextmanager
def on_stage(scene: Scene, bug: str | None) -> Iterator[list[Child]]:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [Child(play, scene, bug, store, rank) for rank in range(SIZE)]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.end()


def perform(scene: Scene, bug: str | None) -> None:
    """Let all ranks play; fail if one of them says that it went wrong."""
    with on_stage(scene, bug) as ranks:
        dead = [VICTIM] if scene in (a_death_is_told, news_travel) else []
        for rank in sorted(set(range(SIZE)) - set(dead)):
            assert ranks[rank].get() == "well"


SCENES: dict[str, tuple[Scene, str]] = {
    "deaths_unseen": (a_death_is_told, "PeerTimeout: Rank 2 of 3 did not come to all_reduce"),
    "deaths_not_told": (news_travel, "The connection to rank 1 of 3 is lost"),
    "memory_kept": (nothing_is_left, "something is left open"),
    "results_not_awaited": (sums_are_right, "a wrong result of"),
    "posted_before_data": (sums_are_right, "a wrong result of"),
    "posted_before_result": (sums_are_right, "a wrong result of"),
    "one_slot_for_all_pieces": (a_reader_falls_behind, "a slot is overwritten"),
    "fingerprints_not_compared": (calls_differ, "DID NOT RAISE"),
    "wake_ups_lost": (sleepers_are_woken, "nobody was woken"),
    "said_too_late": (progress_comes_before_sleep, "somebody slept in vain"),
}


@pytest.mark.parametrize("scene", {scene: 0 for scene, _ in SCENES.values()})
def test_each_scene_goes_well(scene: Scene) -> None:
    perform(scene, None)


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize("bug", [*BUGS, *NATIVE_BUGS])
def test_a_planted_bug_is_caught(bug: str) -> None:
    if bug in NATIVE_BUGS and not can_be_planted():
        pytest.skip("it is planted in C, for which there is no compiler here")
    scene, says = SCENES[bug]
    with pytest.raises(AssertionError, match=says):
        perform(scene, bug)

"""Bugs planted in the backend `phalanx`: each scene goes well, and each bug makes one go wrong."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.clock import now_s
from phalanx.distributed import engine, status_pages
from phalanx.distributed.contention import ContentionVerdict
from phalanx.distributed.wake_up_pipes import WakeUpPipe
from phalanx.errors import PeerLost, StateError
from phalanx.ipc import Waiting, inject
from tests.chaos.calls import Call, draw
from tests.chaos.collective_bugs import BUGS
from tests.chaos.native_bugs import NATIVE_BUGS, can_be_planted, plant_in_native
from tests.chaos.ranks import held, join_group
from tests.multiprocess.children import DEADLINE_S, Child, Parent

SIZE = 3
VICTIM = 2
SHORT_S = 5.0  # for whom nobody tells of a death
SLEEP_S = 5.0  # of whom nobody wakes

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


def results_are_right(parent: Parent, rank: int) -> None:
    chance = random.Random(0)
    for number in range(30):
        call = draw(chance, number, SIZE)
        assert call.is_right(rank), f"a wrong result of {call}"


def sums_are_right(parent: Parent, rank: int) -> None:
    for number, length in enumerate([1, 3_000_001, 5000, 77, 0, 800_000, 4096, 4097]):
        call = Call("all_reduce", number, length, SIZE)
        assert call.is_right(rank), f"a wrong result of {call}"


def a_reader_falls_behind(parent: Parent, rank: int) -> None:
    """The root of a broadcast of many pieces runs ahead of rank 0 until it waits, or is done."""
    pages, store = dist.group.WORLD._buffers.pages, dist.distributed_c10d._get_default_store()
    root = dict(pages.offsets).get(1, 0)  # where its page is
    pieces = iter(range(3))

    def fault(point: str, worker: int) -> None:
        if point == "piece ended" and next(pieces, None) == 1:
            waiting = Waiting(DEADLINE_S)
            while not _sleeps_for_next_progress_of(pages, root) and not store.check(
                ["root is done"]
            ):
                assert not waiting.over()
                waiting.rest()

    if rank == 0:
        inject(fault)
    right = Call("broadcast", 0, 3_000_001, SIZE).is_right(rank)
    if rank == 1:
        store.set("root is done", "")
    assert right, "a slot is overwritten"


def calls_differ(parent: Parent, rank: int) -> None:
    with pytest.raises(StateError, match="same calls in the same order"):
        dist.all_reduce(torch.ones(3 + rank))


def somebody_leaves_early(parent: Parent, rank: int) -> None:
    """Rank 1 has given its part and is gone; rank 0 looks for the dead before rank 2 comes."""
    dist.barrier()
    tensor = torch.full((5,), float(rank))
    if rank == 0:
        assert parent.hear() == "go on"
        examine = engine.CallEngine.examine

        def examine_and_tell(self: engine.CallEngine) -> None:
            examine(self)
            engine.CallEngine.examine = examine  # type: ignore[method-assign]
            parent.tell("looked")

        engine.CallEngine.examine = examine_and_tell  # type: ignore[method-assign]
    if rank == 2:
        assert parent.hear() == "go on"
    dist.reduce(tensor, 0)
    if rank == 1:
        dist.destroy_process_group()
        parent.tell("gone")
    elif rank == 0:
        assert tensor.tolist() == [3.0] * 5


def sleepers_are_woken(parent: Parent, rank: int) -> None:
    sleep_often(rank, dist.barrier)


def sleepers_are_woken_by_sums(parent: Parent, rank: int) -> None:
    sleep_often(rank, lambda: dist.all_reduce(torch.ones(9000)))


def sleep_often(rank: int, call: Callable[[], object]) -> None:
    """Rank 0 comes late each time, when the others sleep for it, and sees that they come again."""
    engine._FIRST_SLEEP_S = engine._LONGEST_SLEEP_S = SLEEP_S
    pages, came_s = dist.group.WORLD._buffers.pages, None
    for _ in range(10):
        if rank == 0:
            waiting = Waiting(DEADLINE_S)
            while not all(_sleeps_for_next_progress_of(pages, at) for _, at in pages.offsets):
                assert not waiting.over()
                waiting.rest()
            assert came_s is None or now_s() - came_s < 0.9 * SLEEP_S, "nobody was woken"
        came_s = now_s()
        call()


def progress_comes_before_sleep(parent: Parent, rank: int) -> None:
    """Ranks that never spin are about to sleep when what they wait for comes: they are woken."""
    ContentionVerdict.holds = lambda self, now_s: True
    pages, doze = dist.group.WORLD._buffers.pages, WakeUpPipe.sleep
    slept_in_vain = []

    def sleep(pipe: WakeUpPipe, timeout_s: float) -> None:
        at = pages.rank * status_pages.WORDS_PER_PAGE
        awaited = pages._words[at + status_pages._AWAITED]
        wanted = pages._words[at + status_pages._WANTED]
        if awaited and wanted > 0 and pages.reached([awaited - 1], wanted) and not slept_in_vain:
            slept_in_vain.extend([] if pipe._poll.poll(SLEEP_S * 1e3) else [wanted])
        doze(pipe, timeout_s)

    WakeUpPipe.sleep = sleep  # type: ignore[method-assign]
    for number in range(20):
        assert Call("all_reduce", number, 9000, SIZE).is_right(rank)
    assert not slept_in_vain, "somebody slept in vain"


def progress_comes_before_rest(parent: Parent, rank: int) -> None:
    """A rank that lost its core before it fell asleep finds that nothing is left to wait for."""
    engine._FIRST_SLEEP_S = engine._LONGEST_SLEEP_S = SLEEP_S
    pages = dist.group.WORLD._buffers.pages

    def spin_in_vain(self: engine.CallEngine, need: engine.Need) -> bool:
        waiting = Waiting(DEADLINE_S)
        while not pages.reached(*need):
            assert not waiting.over()
            waiting.rest()
        return False

    engine.CallEngine._spin = spin_in_vain  # type: ignore[method-assign]
    began_s = now_s()
    dist.barrier()
    assert now_s() - began_s < 0.9 * SLEEP_S, "somebody slept though all had come"


def one_rank_is_contended(parent: Parent, rank: int) -> None:
    """All others do as it does, and sums have the same bits as before."""
    ContentionVerdict.holds = lambda self, now_s: False
    draw_bits = torch.Generator().manual_seed(rank)
    given = [
        torch.randn(length, generator=draw_bits).to(dtype)
        for length in (3, 5001, 70_001, 800_003)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    ]
    before = [sum_of(each) for each in given]
    if rank == 1:
        ContentionVerdict.holds = lambda self, now_s: True
    dist.all_reduce(torch.ones(3))
    for each, expected in zip(given, before, strict=True):
        assert torch.equal(sum_of(each), expected), "a wrong result of a contended all_reduce"


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    dist.all_reduce(result)
    return result


def _sleeps_for_next_progress_of(pages: status_pages.StatusPages, at: int) -> bool:
    """Tell whether the rank whose page is at ``at`` sleeps for what this one has not posted."""
    awaited = pages._words[at + status_pages._AWAITED]
    wanted = pages._words[at + status_pages._WANTED]
    return awaited == pages.rank + 1 and wanted > pages.progress_of(pages.rank)


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
        if scene is somebody_leaves_early:
            assert ranks[1].get() == "gone"
            ranks[0].put("go on")
            assert ranks[0].get() == "looked"
            ranks[2].put("go on")
        dead = [VICTIM] if scene in (a_death_is_told, news_travel) else []
        for rank in sorted(set(range(SIZE)) - set(dead)):
            assert ranks[rank].get() == "well"


SCENES: dict[str, tuple[Scene, str]] = {
    "deaths_unseen": (a_death_is_told, "PeerTimeout: Rank 2 of 3 did not come to all_reduce"),
    "deaths_not_told": (news_travel, "PeerTimeout: Rank 1 of 3 did not come to recv"),
    "progress_unread": (results_are_right, "a wrong result of"),
    "posted_before_data": (results_are_right, "a wrong result of"),
    "done_before_reading": (a_reader_falls_behind, "a slot is overwritten"),
    "slot_taken_early": (a_reader_falls_behind, "a slot is overwritten"),
    "fingerprints_not_compared": (calls_differ, "DID NOT RAISE"),
    "leavers_missed": (
        somebody_leaves_early,
        "PeerLost: Rank 1 of 3 has destroyed its group",
    ),
    "wake_ups_lost": (sleepers_are_woken, "nobody was woken"),
    "said_too_late": (progress_comes_before_sleep, "somebody slept in vain"),
    "looked_no_more": (progress_comes_before_rest, "somebody slept though all had come"),
    "contention_not_agreed": (one_rank_is_contended, "a wrong result of"),
    "pipes_kept": (nothing_is_left, "something is left open"),
    "native_progress_unread": (sums_are_right, "a wrong result of"),
    "native_posted_before_data": (sums_are_right, "a wrong result of"),
    "native_posted_before_result": (sums_are_right, "a wrong result of"),
    "native_fingerprints_not_compared": (calls_differ, "DID NOT RAISE"),
    "native_wake_ups_lost": (sleepers_are_woken_by_sums, "nobody was woken"),
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

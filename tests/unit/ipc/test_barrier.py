"""The barrier among threads: rounds, the late, the dead, those who gave up."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from phalanx.errors import ConfigError, GroupAborted, PeerLost, PeerTimeout
from phalanx.ipc import Region, SharedBarrier

LONG_S = 60.0


def make(num_members: int, **options) -> SharedBarrier:
    region = Region.create(SharedBarrier.needed_bytes(num_members))
    return SharedBarrier(region, num_members, **options)


def run(num_members: int, work: Callable[[int], object]) -> list[Future]:
    with ThreadPoolExecutor(num_members) as pool:
        return [pool.submit(work, member) for member in range(num_members)]


def overtaken(barrier, num_members: int, num_rounds: int) -> list[tuple[int, list[int]]]:
    """Run rounds, and list what a member saw after the barrier that was not this round's."""
    seen = [0] * num_members
    wrong = []

    def work(member: int) -> None:
        for number in range(1, num_rounds + 1):
            seen[member] = number
            barrier.wait(member, timeout_s=LONG_S)
            if any(other != number for other in seen):
                wrong.append((number, list(seen)))
            barrier.wait(member, timeout_s=LONG_S)

    for future in run(num_members, work):
        future.result()
    return wrong


@pytest.mark.parametrize("num_members", [1, 2, 3, 7])
def test_nobody_goes_on_before_all_have_come(num_members):
    assert overtaken(make(num_members), num_members, 30) == []


def test_a_barrier_that_forgets_its_last_member_is_caught():
    barrier = make(3)
    barrier._rounds = barrier._rounds[:16]  # the planted bug: line 2 is never looked at
    barrier.wait = lambda member, timeout_s: (  # and member 2 does not wait
        SharedBarrier.wait(barrier, member, timeout_s=timeout_s)
        if member < 2
        else gate.wait(LONG_S)
    )
    gate = threading.Event()
    seen = [0, 0, 0]

    def work(member: int) -> None:
        if member == 2:
            gate.wait(LONG_S)
        seen[member] = 1
        barrier.wait(member, timeout_s=LONG_S)
        if member == 0:
            seen.append(list(seen))
            gate.set()

    for future in run(3, work):
        future.result()
    assert seen[3] == [1, 1, 0]


def test_sixty_four_threads_meet():
    barrier = make(64)
    rounds = run(64, lambda member: barrier.wait(member, timeout_s=LONG_S))
    assert {future.result() for future in rounds} == {1}


def test_two_barriers_lie_in_one_region():
    region = Region.create(4096)
    region.buffer[:64] = b"\xff" * 64
    first = SharedBarrier(region, 2, offset_bytes=64)
    second = SharedBarrier(region, 1, offset_bytes=192)
    assert second.wait(0) == 1
    results = run(2, lambda member: first.wait(member, timeout_s=LONG_S))
    assert [future.result() for future in results] == [1, 1]
    assert bytes(region.buffer[:64]) == b"\xff" * 64
    assert not any(region.buffer[256:])


def test_objects_over_the_same_lines_are_one_barrier():
    region = Region.create(128)
    results = run(2, lambda member: SharedBarrier(region, 2).wait(member, timeout_s=LONG_S))
    assert [future.result() for future in results] == [1, 1]


def test_who_did_not_come_is_named():
    barrier = make(5, name="epoch")
    come = (0, 1, 4)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(barrier.wait, member, timeout_s=LONG_S) for member in come[1:]]
        while any(barrier._rounds[8 * member] == 0 for member in come[1:]):
            pass
        with pytest.raises(PeerTimeout) as caught:
            barrier.wait(0, timeout_s=0.05)
    assert str(caught.value) == (
        "Members 2–3 of 5 did not come to barrier 'epoch' (round 1) within 0.05 s; "
        "members 0–1 and 4 did."
    )
    assert caught.value.rank == 2
    for other in others:
        with pytest.raises(GroupAborted, match=re.escape("Member 0 of 5 gave up barrier 'epoch'")):
            other.result()


def test_a_dead_member_is_named_long_before_the_deadline():
    barrier = make(2, name="step", alive=lambda member: member != 1)
    with pytest.raises(PeerLost) as caught:
        barrier.wait(0, timeout_s=LONG_S)
    assert str(caught.value) == (
        "Member 1 of 2 did not come to barrier 'step' (round 1) and is dead; member 0 did."
    )
    assert caught.value.rank == 1


def test_all_who_wait_for_the_dead_name_the_dead():
    """Whoever is not the first to look sees that another gave up, and says why."""
    barrier = make(4, alive=lambda member: member != 2)
    come = (0, 1, 3)
    results = run(4, lambda m: m in come and barrier.wait(m, timeout_s=LONG_S))
    errors = [results[member].exception() for member in come]
    assert [(type(error), error.rank) for error in errors] == [(PeerLost, 2)] * 3


def test_the_dead_are_forgotten_when_nobody_asks():
    barrier = make(2)
    with pytest.raises(PeerTimeout, match="Member 1 of 2 did not come"):
        barrier.wait(0, timeout_s=0.05)


def test_who_came_and_then_died_has_come():
    barrier = make(3)
    barrier._rounds[8] = 1  # member 1 came

    def alive(member: int) -> bool:
        if member == 2:
            barrier._rounds[16] = 1  # member 2 comes, and is dead when it is asked about
            return False
        return member != 1

    barrier._alive = alive
    assert barrier.wait(0, timeout_s=LONG_S) == 1


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_broken_barrier_stays_broken_for_all(again):
    barrier = make(3, name="step")
    with pytest.raises(PeerTimeout):
        barrier.wait(0, timeout_s=0.0)
    with pytest.raises(GroupAborted, match="Member 0 of 3 gave up barrier 'step'") as caught:
        barrier.wait(1, timeout_s=LONG_S)
    assert caught.value.rank == 0
    with pytest.raises(GroupAborted, match=r"gave up barrier 'step' \(round 1\)"):
        barrier.wait(again, timeout_s=LONG_S)


def test_whoever_is_interrupted_gives_up_for_all():
    interrupts = [KeyboardInterrupt]

    def alive(member: int) -> bool:
        if interrupts:
            raise interrupts.pop()
        return True

    barrier = make(2, alive=alive)
    with pytest.raises(KeyboardInterrupt):
        barrier.wait(0, timeout_s=LONG_S)
    with pytest.raises(GroupAborted, match="Member 0 of 2 gave up"):
        barrier.wait(1, timeout_s=LONG_S)


@pytest.mark.parametrize(
    ("num_members", "offset_bytes", "message"),
    [
        (0, 0, "`num_members` must be at least 1, but is 0."),
        (2, 8, "`offset_bytes` must be a multiple of 64, but is 8."),
        (2, -64, "`offset_bytes` must be a multiple of 64, but is -64."),
        (2, 64, "`region` must have 192 bytes for barrier 'barrier' of 2 members, but has 128."),
    ],
)
def test_a_place_without_room_is_refused(num_members, offset_bytes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        SharedBarrier(Region.create(128), num_members, offset_bytes=offset_bytes)


@pytest.mark.parametrize("member", [-1, 2])
def test_a_stranger_is_refused(member):
    with pytest.raises(ConfigError, match=f"at least 0 and below 2, but is {member}"):
        make(2).wait(member)

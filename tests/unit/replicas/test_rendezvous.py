"""Threads meet, in order and again; and nobody waits for one that does not come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from phalanx.errors import GroupAborted, PeerTimeout, UnsupportedError
from phalanx.execution import ThreadPool
from phalanx.replicas.rendezvous import ReplicaRendezvous

DEADLINE_S = 30


class Watched(threading.Condition):
    """Tells the test that somebody waits: who takes its lock then, finds them asleep."""

    def __init__(self) -> None:
        super().__init__()
        self.somebody_waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.somebody_waits.set()
        return super().wait(timeout)


def watch(rendezvous: ReplicaRendezvous) -> threading.Event:
    rendezvous._changed = watched = Watched()
    return watched.somebody_waits


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(3, intra_op=1)
    yield pool
    pool.close()


def attend(
    pool: ThreadPool,
    rendezvous: ReplicaRendezvous,
    work: Callable[[int], object],
    members: tuple[int, ...] = (0, 1, 2),
) -> list[object]:
    """Run ``work`` in the members' threads; return what each returned or raised."""

    def task(index: int) -> object:
        if index not in members:
            return None
        try:
            with rendezvous.attending(index):
                return work(index)
        except Exception as error:  # looked at by the test
            return error

    with rendezvous.open(members):
        return pool.each(task)


def test_all_get_all_values_in_member_order_round_after_round(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)

    def work(index: int) -> list[list[int]]:
        return [rendezvous.exchange(index, 10 * turn + index, "here") for turn in range(50)]

    expected = [[10 * turn, 10 * turn + 1, 10 * turn + 2] for turn in range(50)]
    assert attend(pool, rendezvous, work) == [expected] * 3
    assert attend(pool, rendezvous, work) == [expected] * 3


def test_values_come_in_the_order_of_the_numbers_whoever_is_last(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)
    others = threading.Event()

    def work(index: int) -> list[str]:
        if index == 0:
            others.wait(DEADLINE_S)
        else:
            others.set()
        return rendezvous.exchange(index, "abc"[index], "here")

    assert attend(pool, rendezvous, work, members=(2, 0)) == [["a", "c"], None, ["a", "c"]]


def test_rounds_number_the_exchanges_alike_for_all_members(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)

    def work(index: int) -> list[int]:
        seen = []
        for _ in range(20):
            rendezvous.exchange(index, None, "here")
            seen.append(rendezvous.rounds)
        return seen

    assert attend(pool, rendezvous, work) == [list(range(1, 21))] * 3
    assert attend(pool, rendezvous, work) == [list(range(21, 41))] * 3


def test_members_are_those_of_the_run_and_nobody_between_runs(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)
    assert rendezvous.members == ()
    assert attend(pool, rendezvous, lambda _: rendezvous.members, (0, 2)) == [(0, 2), None, (0, 2)]
    assert rendezvous.members == ()


def test_a_failure_reaches_who_waits_and_who_comes_later(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)
    waits, failed = watch(rendezvous), threading.Event()

    def work(index: int) -> object:
        if index == 1:
            waits.wait(DEADLINE_S)
            raise ZeroDivisionError("of its own")
        if index == 2:
            failed.wait(DEADLINE_S)
        try:
            return rendezvous.exchange(index, None, "the corner")
        finally:
            failed.set()

    waiting, cause, late = attend(pool, rendezvous, work)
    assert isinstance(cause, ZeroDivisionError)
    for index, echo in ((0, waiting), (2, late)):
        assert isinstance(echo, GroupAborted)
        assert echo.rank == 1
        assert str(echo) == (
            f"Replica {index} must meet replica 1 at the corner, but cannot: "
            "ZeroDivisionError: of its own"
        )


def test_the_first_to_fail_is_named_and_not_its_echoes(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)
    echoed = threading.Event()

    def work(index: int) -> object:
        if index == 1:
            raise ZeroDivisionError
        if index == 2:
            echoed.wait(DEADLINE_S)
            return rendezvous.exchange(index, None, "here")
        try:
            with rendezvous.attending(index):
                return rendezvous.exchange(index, None, "here")
        finally:
            echoed.set()

    *_, late = attend(pool, rendezvous, work)
    assert isinstance(late, GroupAborted)
    assert late.rank == 1


def test_a_member_that_ends_without_coming_is_no_hang(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)

    def work(index: int) -> object:
        rendezvous.exchange(index, None, "the first corner")
        return "done" if index == 1 else rendezvous.exchange(index, None, "the second corner")

    first, ended, second = attend(pool, rendezvous, work)
    assert ended == "done"
    for index, error in ((0, first), (2, second)):
        assert isinstance(error, UnsupportedError)
        assert str(error).startswith(
            f"Replica 1 must come to the second corner like replica {index}, but ended its pass"
        )


def test_after_a_run_that_failed_the_next_one_meets(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)

    def fail(index: int) -> object:
        if index == 2:
            raise ZeroDivisionError
        return rendezvous.exchange(index, None, "here")

    attend(pool, rendezvous, fail)
    assert (
        attend(pool, rendezvous, lambda index: rendezvous.exchange(index, index, "here"))
        == [[0, 1, 2]] * 3
    )


def test_a_deadline_names_who_did_not_come(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(timeout_s=0.02)
    over = threading.Event()

    def work(index: int) -> object:
        if index:
            over.wait(DEADLINE_S)
        try:
            return rendezvous.exchange(index, None, "here")
        finally:
            over.set()

    timeout, *late = attend(pool, rendezvous, work)
    assert isinstance(timeout, PeerTimeout)
    assert timeout.rank == 1
    assert str(timeout) == "Replicas 1–2 of 3 did not come to here within 0.02 s; replica 0 did."
    assert [type(error) for error in late] == [GroupAborted] * 2
    assert "PeerTimeout: Replicas 1–2 of 3 did not come" in str(late[0])


def test_members_at_different_places_are_told_so(pool: ThreadPool) -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)

    def work(index: int) -> object:
        return rendezvous.exchange(index, None, "the left" if index < 2 else "the right")

    for error in attend(pool, rendezvous, work):
        assert isinstance(error, UnsupportedError)
        assert "replica 0 came to the left and replica 2 to the right" in str(error)


def test_runs_of_two_callers_follow_each_other() -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)
    seen: list[tuple[int, ...]] = []

    def other_caller() -> None:
        with rendezvous.open([1]):
            seen.append(rendezvous.members)

    thread = threading.Thread(target=other_caller)
    with rendezvous.open([0]):
        thread.start()
        thread.join(0.1)
        assert rendezvous.members == (0,)
        assert seen == []
    thread.join(DEADLINE_S)
    assert seen == [(1,)]


def test_a_thread_left_behind_does_not_wait_for_the_deadline() -> None:
    rendezvous = ReplicaRendezvous(DEADLINE_S)
    waits = watch(rendezvous)
    heard: list[BaseException] = []

    def stay() -> None:
        try:
            rendezvous.exchange(0, None, "here")
        except GroupAborted as error:
            heard.append(error)

    thread = threading.Thread(target=stay)
    with rendezvous.open([0, 1]):
        thread.start()
        waits.wait(DEADLINE_S)
    thread.join(DEADLINE_S)
    assert "the run was given up" in str(heard[0])

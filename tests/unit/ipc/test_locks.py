"""Range locks within one process: two openings of a file exclude each other as processes do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from phalanx.clock import now_s
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import LockFile, RangeLock, Region
from phalanx.ipc.lock_owners import LockOwner, find_lock_owners

LONG_S = 60.0
SHORT_S = 0.02
TURNSTILE = 1 << 62


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(4096) as region:
        yield region


@pytest.fixture
def pair(region: Region) -> Iterator[tuple[RangeLock, RangeLock]]:
    """The same range through two openings, as two processes see it."""
    with LockFile(region) as one, LockFile(region) as other:
        yield one.range(0, 64, label="rows"), other.range(0, 64, label="rows")


@pytest.fixture(params=["threads", "processes"])
def locks(request: pytest.FixtureRequest, pair) -> tuple[RangeLock, RangeLock]:
    return (pair[0], pair[0]) if request.param == "threads" else pair


def hold(lock: RangeLock, kind: str, timeout_s: float = SHORT_S) -> AbstractContextManager[None]:
    return getattr(lock, kind)(timeout_s)


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_a_lock_that_is_held_does_not_look_free(locks, kind):
    first, second = locks
    assert second.looks_free()
    with hold(first, kind):
        assert not second.looks_free()
        assert not first.looks_free()
    assert second.looks_free()


def test_who_holds_a_lock_too_long_is_named_by_rank(region):
    told: list[int] = []

    def rank_of(pid: int) -> int:
        told.append(pid)
        return 7

    with LockFile(region, rank_of=rank_of) as one, LockFile(region) as other:
        with hold(other.range(0, 64), "exclusive"), pytest.raises(PeerTimeout) as caught:
            hold(one.range(0, 64), "exclusive").__enter__()
        assert caught.value.rank is None  # it is this process, of which one of its ranks may wait
        assert told == []


@pytest.mark.parametrize(
    ("held", "asked", "granted"),
    [
        ("shared", "shared", True),
        ("shared", "exclusive", False),
        ("exclusive", "shared", False),
        ("exclusive", "exclusive", False),
    ],
)
def test_readers_share_and_writers_do_not(locks, held, asked, granted):
    first, second = locks
    with hold(first, held):
        if granted:
            with hold(second, asked):
                pass
        else:
            with pytest.raises(PeerTimeout), hold(second, asked):
                pass
    with hold(second, "exclusive"):  # whatever was granted or refused is gone
        pass
    with hold(first, "exclusive"):
        pass


def test_the_last_reader_of_a_process_frees_the_range(pair):
    ours, theirs = pair
    with ours.shared():
        with ours.shared():
            pass
        with pytest.raises(PeerTimeout), theirs.exclusive(SHORT_S):
            pass
    with theirs.exclusive(SHORT_S):
        pass


def test_openings_that_share_an_open_file_would_not_exclude_each_other(region, monkeypatch):
    """The planted bug: a descriptor that is passed on is the same open file, with its locks."""
    monkeypatch.setattr("phalanx.ipc.locks.os.open", lambda path, flags: os.dup(region.fd))
    with (
        LockFile(region) as one,
        LockFile(region) as other,
        one.range(0, 64).exclusive(),
        other.range(0, 64).exclusive(SHORT_S),
    ):
        pass


def test_ranges_are_apart_to_the_byte(region):
    with LockFile(region) as one, LockFile(region) as other, one.range(64, 64).exclusive():
        with other.range(0, 64).exclusive(SHORT_S), other.range(128, 1).exclusive(SHORT_S):
            pass
        with pytest.raises(PeerTimeout), other.range(127, 1).exclusive(SHORT_S):
            pass


def test_a_range_may_lie_beyond_the_end_of_the_file(region):
    with LockFile(region) as one, LockFile(region) as other, one.range(1 << 40, 8).exclusive():
        far = other.range(1 << 40, 8)
        with pytest.raises(PeerTimeout), far.shared(SHORT_S):
            pass


def test_an_exception_frees_the_range(locks):
    first, second = locks
    for kind in ("shared", "exclusive"):
        with pytest.raises(ZeroDivisionError), hold(first, kind):
            raise ZeroDivisionError
        with second.exclusive(SHORT_S):
            pass


def test_the_holders_number_is_in_the_error(pair):
    ours, theirs = pair
    me = f"process {os.getpid()} (this one)"
    with theirs.exclusive():
        with pytest.raises(PeerTimeout) as caught, ours.shared(SHORT_S):
            pass
        assert str(caught.value) == (
            f"Lock 'rows' did not become free of writers within 0.02 s: {me} writes."
        )
    with theirs.shared(), pytest.raises(PeerTimeout) as caught, ours.exclusive(SHORT_S):
        pass
    assert str(caught.value) == f"Lock 'rows' did not become free within 0.02 s: {me} reads."


def test_a_wait_is_as_long_as_it_says(pair):
    ours, theirs = pair
    with theirs.exclusive():
        start = now_s()
        with pytest.raises(PeerTimeout), ours.exclusive(0.05):
            pass
        assert now_s() - start >= 0.05
        with pytest.raises(PeerTimeout), ours.exclusive(0.0):
            pass


# --- who comes first ------------------------------------------------------------------------------


def wait_for_line(region: Region, writing: bool) -> None:
    """Wait until somebody stands in the turnstile of bytes 0 to 63."""
    deadline = now_s() + LONG_S
    while LockOwner(os.getpid(), writing) not in find_lock_owners(
        region.fd, TURNSTILE, TURNSTILE + 64
    ):
        assert now_s() < deadline


def test_a_reader_goes_behind_a_writer_that_waits(region, pair):
    ours, theirs = pair
    with LockFile(region) as third, ThreadPoolExecutor(1) as pool:
        lock = third.range(0, 64)
        with ours.shared():
            came = threading.Event()
            writer = pool.submit(write_once, theirs, came)
            wait_for_line(region, writing=True)
            with pytest.raises(PeerTimeout), lock.shared(SHORT_S):  # a new process
                pass
            with pytest.raises(PeerTimeout), ours.shared(SHORT_S):  # a thread of the reader's own
                pass
            with pytest.raises(PeerTimeout), theirs.shared(SHORT_S):  # one of the writer's own
                pass
            assert not came.is_set()
        writer.result(LONG_S)
        with lock.shared(SHORT_S):
            pass


def test_without_the_turnstile_the_reader_would_overtake(region, pair, monkeypatch):
    """The planted bug: nobody looks whether somebody waits."""
    monkeypatch.setattr(RangeLock, "_is_free", lambda self, request: True)
    ours, theirs = pair
    with LockFile(region) as third, ThreadPoolExecutor(1) as pool:
        with ours.shared():
            writer = pool.submit(write_once, theirs, threading.Event())
            wait_for_line(region, writing=True)
            with third.range(0, 64).shared(SHORT_S):
                pass
        writer.result(LONG_S)


def test_a_writer_goes_behind_a_reader_that_waits(region, pair):
    ours, theirs = pair
    with LockFile(region) as third, ThreadPoolExecutor(1) as pool:
        came = threading.Event()
        with ours.exclusive():
            reader = pool.submit(read_until, theirs, came)
            wait_for_line(region, writing=False)
        with pytest.raises(PeerTimeout), third.range(0, 64).exclusive(SHORT_S):
            pass  # whichever of the two it met, the line or the reader
        came.set()
        reader.result(LONG_S)


def write_once(lock: RangeLock, came: threading.Event) -> None:
    with lock.exclusive(LONG_S):
        came.set()


def read_until(lock: RangeLock, told: threading.Event) -> None:
    with lock.shared(LONG_S):
        assert told.wait(LONG_S)


def test_who_gives_up_leaves_the_line(region, pair):
    ours, theirs = pair
    with ours.shared(), pytest.raises(PeerTimeout), theirs.exclusive(SHORT_S):
        pass
    assert find_lock_owners(region.fd, 0, 1 << 63) == []


# --- files ----------------------------------------------------------------------------------------


def test_a_range_is_one_lock_per_process(region):
    with LockFile(region) as file:
        lock = file.range(0, 64, label="a")
        assert file.range(0, 64, label="b") is lock
        file.range(64, 64)  # which nobody keeps
        assert repr(lock) == "RangeLock('a', bytes 0 to 63)"
        assert repr(file) == "LockFile(1 ranges)"
    assert repr(file) == "LockFile(1 ranges, closed)"


def test_the_region_may_be_closed_first():
    region = Region.create(64)
    file = LockFile(region)
    region.close()
    with file.range(0, 64).exclusive():
        pass


def test_no_descriptor_is_left_behind(region):
    before = set(os.listdir("/proc/self/fd"))
    lock = LockFile(region).range(0, 64)
    with lock.exclusive():  # which keeps its file open
        pass
    del lock
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_is_told_and_leaves_the_parents_lock_alone(region):
    with LockFile(region) as file, LockFile(region) as other:
        lock = file.range(0, 64)
        with lock.exclusive():
            pid = os.fork()
            if pid == 0:
                try:
                    for hold in list(lock._guards):
                        lock.release(hold)
                    lock.shared().__enter__()
                except StateError:
                    os._exit(7)
                os._exit(8)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            with pytest.raises(PeerTimeout), other.range(0, 64).shared(SHORT_S):
                pass


def test_threads_that_write_lose_nothing(pair):
    """Six threads over two openings: the count, and never half of an addition."""
    count = [0, 0]

    def work(lock: RangeLock) -> None:
        for _ in range(100):
            with lock.exclusive(LONG_S):
                first, second = count
                count[0] = first + 1
                count[1] = second + 1
            with lock.shared(LONG_S):
                assert count[0] == count[1]

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, pair[index % 2]) for index in range(6)]:
            future.result(LONG_S)
    assert count == [600, 600]

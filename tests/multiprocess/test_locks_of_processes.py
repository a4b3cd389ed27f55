"""Locks among real processes and their threads, some of which are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from phalanx.clock import now_s
from phalanx.errors import PeerTimeout
from phalanx.ipc import LockFile, Region
from phalanx.ipc.lock_owners import find_lock_owners
from tests.multiprocess.children import DEADLINE_S, Children, Parent, wait_for_exit

NUM_WORKERS = 3
SHORT_S = 0.05
SOON_S = 20.0  # far below DEADLINE_S: what ends by then did not end by a deadline


@pytest.fixture
def start() -> Iterator[Children]:
    with Children() as children:
        yield children


def pass_through(hold: AbstractContextManager[None]) -> None:
    with hold:
        pass


def hold(parent: Parent, region: Region, kind: str) -> None:
    with getattr(LockFile(region).range(0, 64), kind)():
        parent.tell()
        parent.hear()
    parent.tell("released")
    parent.hear()


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_processes_exclude_each_other_and_the_error_names_the_holder(start, kind):
    region = Region.create(4096)
    holder = start.start(hold, region, kind)
    holder.get()
    with LockFile(region) as file:
        lock = file.range(0, 64, label="rows")
        verb = "reads" if kind == "shared" else "writes"
        with pytest.raises(PeerTimeout, match=f": process {holder.pid} {verb}") as caught:
            pass_through(lock.exclusive(SHORT_S))
        assert "Lock 'rows' did not become free within 0.05 s" in str(caught.value)
        if kind == "shared":
            with lock.shared(SHORT_S):
                pass
        else:
            with pytest.raises(PeerTimeout, match=f": process {holder.pid} writes"):
                pass_through(lock.shared(SHORT_S))
        holder.put()
        assert holder.get() == "released"
        with lock.exclusive(SHORT_S):
            pass


def in_line(region: Region) -> bool:
    return bool(find_lock_owners(region.fd, 1 << 62, 1 << 63))


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_a_lock_is_free_when_its_holder_is_killed(start, kind):
    region = Region.create(4096)
    holder = start.start(hold, region, kind)
    holder.get()
    with LockFile(region) as file, ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(pass_through, file.range(0, 64).exclusive(DEADLINE_S))
        deadline = now_s() + DEADLINE_S
        while not in_line(region):
            assert now_s() < deadline
        assert not waiter.done()
        holder.kill()
        waiter.result(SOON_S)


def wait_in_line(parent: Parent, region: Region) -> None:
    parent.tell()
    pass_through(LockFile(region).range(0, 64).exclusive(DEADLINE_S))


def test_who_is_killed_in_the_line_holds_nobody_up(start):
    region = Region.create(4096)
    with LockFile(region) as one, LockFile(region) as other, one.range(0, 64).shared():
        waiter = start.start(wait_in_line, region)
        waiter.get()
        deadline = now_s() + DEADLINE_S
        while not in_line(region):
            assert now_s() < deadline
        with pytest.raises(PeerTimeout):
            pass_through(other.range(0, 64).shared(0.0))
        waiter.kill()
        pass_through(other.range(0, 64).shared(0.0))


def hold_and_fork(parent: Parent, region: Region, buggy: bool) -> None:
    if buggy:
        LockFile.forget = lambda self: None  # the planted bug: the child keeps the open file
    LockFile.__del__ = lambda self: None
    file = LockFile(region)
    with file.range(0, 64).exclusive(SHORT_S):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        parent.tell(pid)
        signal.pause()


@pytest.mark.parametrize("buggy", [False, True])
def test_a_forked_child_does_not_keep_a_dead_holders_lock(start, buggy):
    region = Region.create(4096)
    holder = start.start(hold_and_fork, region, buggy)
    forked = holder.get()
    holder.kill()
    try:
        with LockFile(region) as file:
            if buggy:
                with pytest.raises(PeerTimeout, match=f"process {forked} writes"):
                    pass_through(file.range(0, 64).exclusive(SHORT_S))
            else:
                pass_through(file.range(0, 64).exclusive(SHORT_S))
    finally:
        os.kill(forked, signal.SIGKILL)
        wait_for_exit(forked)


def count(parent: Parent, region: Region, times: int) -> None:
    lock = LockFile(region).range(0, 64)
    counts = region.buffer.cast("q")
    parent.tell()
    parent.hear()

    def work() -> None:
        for _ in range(times):
            with lock.exclusive(DEADLINE_S):
                first, second = counts[8], counts[64]
                counts[8] = first + 1
                counts[64] = second + 1
            with lock.shared(DEADLINE_S):
                assert counts[8] == counts[64]

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work) for _ in range(2)]:
            future.result()
    parent.tell("done")


def test_threads_of_three_processes_lose_nothing_and_see_nothing_half_done(start):
    region = Region.create(4096)
    times = 150
    workers = [start.start(count, region, times) for _ in range(NUM_WORKERS)]
    for worker in workers:
        worker.get()
    for worker in workers:
        worker.put()
    assert [worker.get() for worker in workers] == ["done"] * NUM_WORKERS
    counts = region.buffer.cast("q")
    assert counts[8] == counts[64] == 2 * NUM_WORKERS * times


def read_on(parent: Parent, region: Region, rank: int) -> None:
    """Read again and again, so that somebody reads at every moment, until told to stop."""
    lock = LockFile(region).range(0, 64)
    reading = region.buffer.cast("q")[64:]
    while not parent.connection.poll(0):
        if reading[8 * rank] == 1:
            parent.tell()
        with lock.shared(DEADLINE_S):
            reading[8 * rank] += 1
            seen = list(reading[: 8 * NUM_WORKERS : 8])
            until = now_s() + 0.002
            while now_s() < until and list(reading[: 8 * NUM_WORKERS : 8]) == seen:
                pass  # until another reads as well
    parent.tell(reading[8 * rank])


def test_a_writer_comes_in_among_readers_that_never_pause(start):
    region = Region.create(4096)
    readers = [start.start(read_on, region, rank) for rank in range(NUM_WORKERS)]
    for reader in readers:
        reader.get()
    with LockFile(region) as file:
        for _ in range(20):
            with file.range(0, 64).exclusive(SOON_S):
                pass
    for reader in readers:
        reader.put()
    for reader in readers:
        reader.get()

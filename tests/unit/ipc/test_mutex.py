"""A lock in shared memory has one holder at a time, and does not outlive it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.ipc import Mutex, Region, mutex
from tests.interrupts import interrupt_at

LONG_S = 60.0
SHORT_S = 0.05


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(4096) as region:
        yield region


@pytest.fixture
def lock(region: Region) -> Mutex:
    return Mutex(region.buffer, "rows", rank_of=lambda pid: 7)


def pass_through(lock: Mutex, timeout_s: float = LONG_S) -> None:
    with lock.held(timeout_s):
        pass


def elsewhere(lock: Mutex, timeout_s: float = SHORT_S) -> None:
    """Pass through in another thread; raise what that raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pass_through, lock, timeout_s).result(LONG_S)


def test_a_forked_child_does_not_keep_a_dead_holders_lock(lock):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock.take(LONG_S)
        grandchild = os.fork()
        if grandchild == 0:
            signal.pause()
        os.write(write, str(grandchild).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        pass_through(lock, SHORT_S)
    finally:
        os.kill(int(os.read(read, 100)), signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_who_lets_go_and_comes_again_is_behind_who_waits(lock):
    """Without the turnstile a loop of long blocks would keep a waiter out for ever."""
    came = threading.Event()

    def wait() -> None:
        with lock.held(LONG_S):
            came.set()

    turns = 0
    with ThreadPoolExecutor(1) as pool:
        with lock.held():
            waiter = pool.submit(wait)
            threading.Event().wait(SHORT_S)  # it stands in line by now
        while not came.is_set():
            with lock.held():
                turns += 1
                threading.Event().wait(SHORT_S)
        waiter.result(LONG_S)
    assert turns <= 2


@pytest.mark.promise("interrupts-leave-whole-steps")
def test_wherever_an_interrupt_comes_its_thread_finds_the_lock_free(lock):
    for number in range(100):
        try:
            with interrupt_at(number, mutex):
                pass_through(lock)
        except KeyboardInterrupt:
            pass_through(lock, 0.0)
            elsewhere(lock)
        else:
            assert number > 5
            return
    raise AssertionError("the block never ended without an interrupt")

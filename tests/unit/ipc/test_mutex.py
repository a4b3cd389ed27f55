"""A lock in shared memory: who waits is next."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.ipc import Mutex, Region

LONG_S = 60.0
SHORT_S = 0.05


@pytest.fixture
def lock() -> Mutex:
    return Mutex(Region.create(4096).buffer, "rows")


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

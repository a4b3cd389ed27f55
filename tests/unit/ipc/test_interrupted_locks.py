"""Ctrl-C and range locks: wherever it comes, nothing stays held by a process that lives on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.clock import now_s
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import LockFile, RangeLock, Region, locks
from phalanx.ipc.lock_owners import find_lock_owners
from tests.interrupts import interrupt_at

pytestmark = pytest.mark.promise("interrupts-leave-whole-steps")

LONG_S = 60.0
SHORT_S = 0.05
MOST_PLACES = 200


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(4096) as region:
        yield region


def pass_through(lock: RangeLock, kind: str, timeout_s: float = LONG_S) -> None:
    with getattr(lock, kind)(timeout_s):
        pass


def interrupted(lock: RangeLock, kind: str, number: int) -> KeyboardInterrupt | None:
    """Pass through with an interrupt at that place; return it, with all that its frames keep."""
    try:
        with interrupt_at(number, locks):
            pass_through(lock, kind)
    except KeyboardInterrupt as exc:
        return exc
    return None


def leaks(region: Region, kind: str, in_line: bool) -> list[int]:
    """Return at which places an interrupt leaves something held."""
    found, kept = [], []
    for number in range(MOST_PLACES):
        file = LockFile(region)
        lock = file.range(0, 64)
        other = locks._Guard(lock, lock._try_shared, LONG_S)
        if in_line:
            lock._waiting[other] = None  # so whoever comes stands in line, and passes at once
        exc = interrupted(lock, kind, number)
        lock._waiting.pop(other, None)
        if exc is None:
            file.close()
            assert number > 5
            return found
        kept.append(exc)
        with ThreadPoolExecutor(1) as pool:
            turn = pool.submit(lock._turn.acquire, False).result(LONG_S)
        if find_lock_owners(region.fd, 0, 1 << 63) or lock._guards or lock._waiting or not turn:
            found.append(number)
        file.forget()
    raise AssertionError("the block never ended without an interrupt")


@pytest.mark.parametrize("in_line", [False, True])
@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_no_interrupt_leaves_a_lock_held(region, kind, in_line):
    assert leaks(region, kind, in_line) == []


@pytest.mark.parametrize("in_line", [False, True])
@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_without_the_token_some_would(region, kind, in_line, monkeypatch):
    """The planted bug: nobody notices that a block was left."""
    monkeypatch.setattr(locks._Guard, "lost", lambda self, token: None)
    assert leaks(region, kind, in_line)


def entry_of_release() -> int:
    """Return the number of the place where a free lock's release begins."""
    with Region.create(64) as region, LockFile(region) as file:
        lock = file.range(0, 64)
        for number in range(MOST_PLACES):
            exc = interrupted(lock, "exclusive", number)
            assert exc is not None
            tb = exc.__traceback__
            while tb is not None and tb.tb_next is not None:
                tb = tb.tb_next
                if tb.tb_frame.f_code is RangeLock.release.__code__:
                    return number
    raise AssertionError


@pytest.mark.parametrize("mended", [True, False])
@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_a_second_interrupt_is_made_good_by_whoever_asks_next(region, kind, mended, monkeypatch):
    """The second stops `lost`. The planted bug: nobody looks whether a holder is still there."""
    number = entry_of_release()
    monkeypatch.setattr(locks._Guard, "lost", lambda self, token: None)
    if not mended:
        monkeypatch.setattr(locks._Guard, "left", lambda self: False)
    file = LockFile(region)
    lock = file.range(0, 64)
    exc = interrupted(lock, "exclusive", number)
    assert exc is not None
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pass_through, lock, kind, LONG_S if mended else SHORT_S)
        if mended:
            asked.result(LONG_S)
            assert find_lock_owners(region.fd, 0, 1 << 63) == []
            file.close()
        else:
            with pytest.raises(PeerTimeout):
                asked.result(LONG_S)
            file.forget()


# --- closing --------------------------------------------------------------------------------------


def hold_until(lock: RangeLock, came: threading.Event, told: threading.Event) -> None:
    with lock.exclusive(LONG_S):
        came.set()
        assert told.wait(LONG_S)


def wait_until_refusing(lock: RangeLock) -> None:
    deadline = now_s() + LONG_S
    while lock._fd >= 0:
        assert now_s() < deadline


@pytest.mark.parametrize("buggy", [False, True])
def test_close_waits_for_the_threads_that_hold(region, buggy, monkeypatch):
    """The planted bug: it does not wait, and somebody else comes in beside the holder."""
    if buggy:
        monkeypatch.setattr(RangeLock, "await_free", lambda self, waiting: None)
    came, told = threading.Event(), threading.Event()
    with LockFile(region) as other, ThreadPoolExecutor(2) as pool:
        file, theirs = LockFile(region), other.range(0, 64)
        ours = file.range(0, 64)
        holder = pool.submit(hold_until, ours, came, told)
        assert came.wait(LONG_S)
        closer = pool.submit(file.close, LONG_S)
        wait_until_refusing(ours)
        if buggy:
            closer.result(LONG_S)
            pass_through(theirs, "exclusive", SHORT_S)
        else:
            with pytest.raises(PeerTimeout):
                pass_through(theirs, "exclusive", SHORT_S)
            with pytest.raises(StateError, match="its file is closed"):
                pass_through(ours, "shared", SHORT_S)
            assert not closer.done()
        told.set()
        holder.result(LONG_S)
        closer.result(LONG_S)
        pass_through(theirs, "exclusive", SHORT_S)

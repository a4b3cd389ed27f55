"""Threads that run one function at a time, and end."""

from __future__ import annotations

import contextvars
import gc
import signal
import threading

import pytest
import torch

from phalanx.errors import OutOfSpace, StateError
from phalanx.execution import ThreadPool

DEADLINE_S = 30


def names() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("phalanx")]


def test_each_runs_at_once_in_named_threads() -> None:
    barrier = threading.Barrier(3)

    def meet(index: int) -> tuple[int, str]:
        barrier.wait(DEADLINE_S)  # three must be here together
        return index, threading.current_thread().name

    pool = ThreadPool(3, intra_op=1)
    assert pool.each(meet) == [(i, f"phalanx-replica-{i}") for i in range(3)]
    pool.close()


def test_context_variables_are_the_callers() -> None:
    scale = contextvars.ContextVar("scale", default=1.0)
    pool = ThreadPool(2, intra_op=1)
    token = scale.set(3.0)
    assert pool.each(lambda _: scale.get()) == [3.0, 3.0]
    scale.reset(token)
    assert pool.each(lambda _: scale.get()) == [1.0, 1.0]
    pool.close()


def test_the_first_failure_keeps_its_type_and_the_others_are_notes() -> None:
    def fail(index: int) -> None:
        raise (KeyError if index else ZeroDivisionError)(f"of {index}")

    pool = ThreadPool(2, intra_op=1)
    with pytest.raises(ZeroDivisionError, match="of 0") as caught:
        pool.each(fail)
    assert "KeyError" in caught.value.__notes__[0]
    assert pool.each(lambda index: index) == [0, 1]
    pool.close()


def test_threads_go_when_the_team_is_dropped() -> None:
    before = names()
    pool = ThreadPool(2, intra_op=1)
    threads = pool._threads
    del pool
    gc.collect()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert names() == before


def test_closing_twice_is_fine_and_working_afterwards_is_not() -> None:
    pool = ThreadPool(1, intra_op=1)
    pool.close()
    pool.close()
    with pytest.raises(StateError, match="needs open threads"):
        pool.each(lambda index: index)


def test_intra_op_belongs_to_the_threads_and_not_to_the_caller() -> None:
    torch.set_num_threads(2)
    pool = ThreadPool(2, intra_op=1)
    assert pool.each(lambda _: torch.get_num_threads()) == [1, 1]
    assert torch.get_num_threads() == 2
    born_later: list[int] = []
    thread = threading.Thread(target=lambda: born_later.append(torch.get_num_threads()))
    thread.start()
    thread.join(DEADLINE_S)
    assert born_later == [2]
    pool.close()


def test_a_second_interrupt_does_not_wait_for_a_thread_that_hangs() -> None:
    release = threading.Event()

    def hang(index: int) -> None:
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            heard.acquire(timeout=DEADLINE_S)
        release.wait(DEADLINE_S)

    heard = threading.Semaphore(0)

    def hear(*_: object) -> None:
        heard.release()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    pool = ThreadPool(1, intra_op=1)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.each(hang)
    finally:
        signal.signal(signal.SIGINT, before)
        release.set()
    with pytest.raises(StateError):
        pool.each(lambda index: index)
    for thread in pool._threads:
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("round_", range(20))
def test_an_interrupt_waits_for_the_threads(round_: int) -> None:
    """Whenever it strikes: the tasks end, it is raised once, and the pool goes on."""
    finished: list[int] = []

    def task(index: int) -> None:
        if index == round_ % 2:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        finished.append(index)

    pool = ThreadPool(2, intra_op=1)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come after the last wait
        pool.each(task)
        pool.each(lambda index: index)
    assert sorted(finished) == [0, 1]
    assert pool.each(lambda index: index) == [0, 1]
    pool.close()


def test_threads_that_cannot_be_had_are_told_and_the_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(OutOfSpace, match=r"room for 3 more threads.*ulimit -u"):
        ThreadPool(3, intra_op=1)
    for thread in started:
        thread.join(DEADLINE_S)
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)

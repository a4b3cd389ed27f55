"""Thread pools that are closed, forked or called again at a bad moment."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

import phalanx
from phalanx import StateError
from phalanx.execution import ThreadPool

DEADLINE_S = 60.0


def test_closing_from_another_thread_waits_for_the_call() -> None:
    pool = ThreadPool(2, intra_op=1)
    inside, go_on = threading.Barrier(3), threading.Event()

    def task(index: int) -> int:
        inside.wait(DEADLINE_S)
        assert go_on.wait(DEADLINE_S)
        return index

    results: list[list[int]] = []
    caller = threading.Thread(target=lambda: results.append(pool.each(task)))
    caller.start()
    inside.wait(DEADLINE_S)
    closer = threading.Thread(target=pool.close)
    closer.start()
    go_on.set()
    caller.join(DEADLINE_S)
    closer.join(DEADLINE_S)
    assert results == [[0, 1]]
    assert pool.closed
    assert not closer.is_alive()


def test_calls_and_closings_from_two_threads_never_hang() -> None:
    for _ in range(200):
        pool = ThreadPool(2, intra_op=1)
        closer = threading.Thread(target=pool.close)
        closer.start()
        try:
            while True:
                assert pool.each(lambda index: index) == [0, 1]
        except StateError:
            pass
        closer.join(DEADLINE_S)
        assert not closer.is_alive()


def test_closing_from_inside_a_call_ends_it_first() -> None:
    pool = ThreadPool(2, intra_op=1)

    def task(index: int) -> int:
        pool.close()
        return index

    assert pool.each(task) == [0, 1]
    assert pool.closed
    with pytest.raises(StateError, match="were closed"):
        pool.each(task)


def test_a_signals_handler_cannot_call_in_the_middle_of_a_call() -> None:
    pool = ThreadPool(2, intra_op=1)
    errors: list[BaseException] = []

    def again(*_: object) -> None:
        try:
            pool.each(lambda index: index)
        except StateError as error:
            errors.append(error)
        pool.close()

    handled = threading.Event()

    def task(index: int) -> int:
        if index == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert handled.wait(DEADLINE_S)
        return index

    def handler(*_: object) -> None:
        again()
        handled.set()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert pool.each(task) == [0, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "handler" in str(errors[0])
    assert pool.closed


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_leaves_the_parents_replicas_alone() -> None:
    with phalanx.DataParallel(nn.Linear(4, 3), devices=2) as model:
        model(torch.ones(4, 4))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                model(torch.ones(4, 4))
            except StateError as error:
                code = 0 if "fork" in str(error) else 2
            model.close()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert model(torch.ones(4, 4)).shape == (4, 3)

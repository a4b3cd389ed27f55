"""Thread pools that are interrupted, closed, forked or called again at a bad moment."""

from __future__ import annotations

import contextvars
import os
import signal
import threading

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import StateError
from phalanx.execution.thread_pool import ThreadPool

DEADLINE_S = 30


def test_context_variables_are_the_callers() -> None:
    scale = contextvars.ContextVar("scale", default=1.0)
    pool = ThreadPool(2, intra_op=1)
    token = scale.set(3.0)
    assert pool.each(lambda _: scale.get()) == [3.0, 3.0]
    scale.reset(token)
    assert pool.each(lambda _: scale.get()) == [1.0, 1.0]
    pool.close()


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


def test_a_signals_handler_cannot_call_in_the_middle_of_a_call() -> None:
    pool = ThreadPool(2, intra_op=1)
    errors: list[BaseException] = []
    handled = threading.Event()

    def handler(*_: object) -> None:
        try:
            pool.each(lambda index: index)
        except StateError as error:
            errors.append(error)
        pool.close()
        handled.set()

    def task(index: int) -> int:
        if index == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert handled.wait(DEADLINE_S)
        return index

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

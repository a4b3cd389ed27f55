"""Calls of a group that are refused: in a fork, after its end, and in the middle of another."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import phalanx  # noqa: F401
from phalanx.distributed import SharedGroup, make_group
from phalanx.errors import GroupAborted, StateError
from phalanx.ipc import inject
from tests.multiprocess.ranks import Ranks


def in_fork(function: Callable[[], object]) -> str:
    """Call ``function`` in a fork, and return what it raised there."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException as exc:
            os.write(write, f"{type(exc).__name__}: {exc}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def use_it_in_forks(rank: int) -> list[str]:
    group = dist.new_group(backend="phalanx", timeout=datetime.timedelta(seconds=20))
    dist.all_reduce(torch.ones(3), group=group)
    pending = dist.all_reduce(torch.ones(3), group=group, async_op=True) if rank else None
    said = [
        in_fork(lambda: dist.all_reduce(torch.ones(3), group=group)),
        in_fork(lambda: dist.send(torch.ones(3), 1 - rank, group=group)),
        in_fork(pending.wait) if pending is not None else "",
        in_fork(lambda: dist.destroy_process_group(group)),
    ]
    dist.barrier()  # rank 0 comes to the second all_reduce only when the forks are over
    if pending is not None:
        pending.wait()
    else:
        dist.all_reduce(torch.ones(3), group=group)
    ones = torch.ones(300_001)
    dist.all_reduce(ones, group=group)
    said.append(str(ones.unique().item()))
    dist.destroy_process_group(group)
    return said


def test_a_fork_cannot_speak_for_its_parent():
    with Ranks(2) as ranks:
        first, second = ranks.run(use_it_in_forks)
    refused = "must be used by the process that made it, but this is a fork"
    assert all(refused in said for said in (*first[:2], *second[:3]))
    assert first[3:] == second[3:] == ["", "2.0"]


@pytest.fixture
def alone() -> Iterator[SharedGroup]:
    group = make_group(dist.HashStore(), 0, 1, datetime.timedelta(minutes=1))
    yield group
    group.shutdown()


def test_a_group_that_is_left_says_so(alone: SharedGroup):
    alone.shutdown()
    with pytest.raises(StateError, match="before it is destroyed, but all_reduce comes after"):
        alone.allreduce([torch.ones(1)])


def interrupt(call: Callable[[], object]) -> None:
    """Call ``call`` in the middle of the next operation, where a signal's handler may run."""

    def fault(point: str, worker: int) -> None:
        inject(None)
        call()

    inject(fault)


def test_a_call_of_a_handler_in_the_middle_of_another_is_refused(alone: SharedGroup):
    def handler() -> None:
        with pytest.raises(StateError, match="a signal's handler calls in the middle of one"):
            alone.barrier()

    interrupt(handler)
    alone.allreduce([torch.ones(3)]).wait()
    alone.barrier().wait()


def test_an_asynchronous_call_that_was_interrupted_breaks_its_group(monkeypatch, request):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # it runs where it is made
    alone = request.getfixturevalue("alone")

    def handler() -> None:
        raise KeyboardInterrupt

    interrupt(handler)
    with pytest.raises(KeyboardInterrupt):
        alone.allreduce([torch.ones(3)])
    with pytest.raises(GroupAborted, match="gave up all_reduce"):
        alone.barrier()

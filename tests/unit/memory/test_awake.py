"""Watchers of cores: where they are, how little they take, and that they sleep."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from phalanx import Trainer
from phalanx.clock import now_s, pause
from phalanx.execution.thread_pool import ThreadPool
from phalanx.ipc import Waiting
from phalanx.memory import awake, compiled, keep_awake
from tests.multiprocess.children import Children, Parent
from tests.multiprocess.forked_workers import forked_by_day

DEADLINE_S = 30.0
KEEP_AWAKE = "PHALANX_KEEP_AWAKE"
NUM_CORES = len(os.sched_getaffinity(0))
can_watch = pytest.mark.skipif(
    not awake.cores_to_watch(NUM_CORES) or not compiled.is_compiled(),
    reason="cores are limited or many here, or nothing is compiled",
)


def watchers(pid: int | str = "self") -> list[int]:
    """Return the threads of a process that are of the lowest class."""
    found = []
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended since it was listed
            if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                found.append(thread)
    return found


def sleeps(thread: int) -> bool:
    text = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="ascii")
    return text.rpartition(")")[2].split()[0] == "S"


def ticks(thread: int) -> int:
    text = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="ascii")
    return sum(map(int, text.rpartition(")")[2].split()[11:13]))


def until(condition) -> None:
    waiting = Waiting(DEADLINE_S)
    while not condition():
        assert not waiting.over()
        waiting.rest()


def watch(parent: Parent) -> None:
    """See in a process of its own, where no test before has had a pool."""
    os.environ[KEEP_AWAKE] = "1"
    assert watchers() == []
    with_few = ThreadPool(NUM_CORES, intra_op=2)
    if NUM_CORES > 1:
        ThreadPool(NUM_CORES - 1, intra_op=1).close()
    assert watchers() == []  # operators' own threads fill the cores, or there are cores left
    pools = [ThreadPool(NUM_CORES, intra_op=1), ThreadPool(NUM_CORES + 1, intra_op=1)]
    until(lambda: len(watchers()) == NUM_CORES)
    found = watchers()
    on = sorted(core for thread in found for core in os.sched_getaffinity(thread))
    assert on == sorted(os.sched_getaffinity(0))  # one each
    until(lambda: all(map(sleeps, found)))  # when nobody has come for a while
    for pool in (*pools, with_few):
        pool.close()
    before = sum(map(ticks, found))
    for _ in range(3):
        pools = [ThreadPool(NUM_CORES, intra_op=1)]
        pools[0].each(lambda index: index)
        pools[0].close()
        until(lambda: all(map(sleeps, found)))
    assert watchers() == found
    assert sum(map(ticks, found)) - before < 50  # of 10 ms
    parent.tell("well")


@pytest.mark.alone  # watchers run when no other process wants their cores
@can_watch
def test_where_threads_have_all_cores_each_is_watched_and_watchers_sleep():
    with Children() as children:
        assert children.start(watch).get() == "well"


def burn_a_little(parent: Parent, core: int) -> None:
    """Use a core for a moment again and again, as something in the background does."""
    os.sched_setaffinity(0, {core})
    parent.tell("on")
    for _ in range(50_000):  # it is ended before
        until_s = now_s() + 100e-6
        while now_s() < until_s:
            pass
        pause(1e-3)


def watch_beside_others(parent: Parent) -> None:
    os.environ[KEEP_AWAKE] = "1"
    pool = ThreadPool(NUM_CORES, intra_op=1)
    until(lambda: len(watchers()) == NUM_CORES)
    pool.each(lambda index: index)
    parent.tell("watched")
    for thread in watchers():
        until(lambda thread=thread: sleeps(thread))
    pool.close()
    parent.tell("well")


@pytest.mark.alone
@can_watch
def test_what_others_do_keeps_no_watcher_from_its_sleep():
    with Children() as children:
        burner = children.start(burn_a_little, min(os.sched_getaffinity(0)))
        assert burner.get() == "on"
        child = children.start(watch_beside_others)
        assert child.get() == "watched"
        assert child.get() == "well"


def fork(parent: Parent) -> None:
    os.environ[KEEP_AWAKE] = "1"
    pool = ThreadPool(NUM_CORES, intra_op=1)
    child = os.fork()
    if child == 0:
        own = ThreadPool(NUM_CORES, intra_op=1)  # the fork has none of its parent's
        own.each(lambda index: index)
        until(lambda: len(watchers()) == NUM_CORES)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    pool.close()
    parent.tell("well")


@can_watch
def test_a_fork_has_watchers_of_its_own():
    with Children() as children:
        assert children.start(fork).get() == "well"


def share(parent: Parent) -> None:
    os.environ[KEEP_AWAKE] = "1"
    keep_awake(NUM_CORES, place=1, sharers=2)
    until(lambda: len(watchers()) == max(1, NUM_CORES // 2))
    parent.tell("well")


@can_watch
def test_processes_share_the_cores():
    with Children() as children:
        assert children.start(share).get() == "well"


def stay_as_they_are(parent: Parent) -> None:
    """Neither watch nor tie anything in a process of the user's own."""
    os.environ.pop(KEEP_AWAKE, None)  # the fork server may have begun after a test of a command
    every = os.sched_getaffinity(0)
    pool = ThreadPool(NUM_CORES, intra_op=1)
    assert pool.each(lambda _: os.sched_getaffinity(0)) == [every] * NUM_CORES
    assert watchers() == []
    pool.close()
    keep_awake(NUM_CORES, ours=True)
    until(lambda: len(watchers()) == NUM_CORES)
    parent.tell("well")


@can_watch
def test_no_core_is_watched_in_a_process_that_is_not_ours():
    with Children() as children:
        assert children.start(stay_as_they_are).get() == "well"


@can_watch
@pytest.mark.parametrize(
    ("value", "watched"),
    [
        (None, True),
        *(pytest.param(*each, marks=pytest.mark.night) for each in [("0", False), ("1", True)]),
    ],
)
def test_worker_processes_watch_the_cores_and_may_use_them_all(
    monkeypatch, pytestconfig, value, watched
):
    if value is None:
        monkeypatch.delenv(KEEP_AWAKE, raising=False)
    else:
        monkeypatch.setenv(KEEP_AWAKE, value)
    with (
        forked_by_day(pytestconfig),
        Trainer(
            torch.nn.Linear(3, 2),
            torch.nn.functional.mse_loss,
            lambda params: torch.optim.SGD(params, lr=0.1),
            replicas=NUM_CORES,
            intra_op=1,
            executor="processes",
        ) as trainer,
    ):
        trainer.step((torch.ones(4, 3), torch.ones(4, 2)))
        cores = [os.sched_getaffinity(pid) for pid in trainer.worker_pids]
        pids = trainer.worker_pids
        # A watcher that has begun a moment ago may not have its class yet.
        until(lambda: [len(watchers(pid)) for pid in pids] == [int(watched)] * NUM_CORES)
    assert cores == [os.sched_getaffinity(0)] * NUM_CORES


def test_without_compiled_code_it_does_nothing(monkeypatch):
    monkeypatch.setattr(compiled, "FUNCTIONS", {})
    before = os.sched_getaffinity(0)
    assert not keep_awake(NUM_CORES, ours=True)()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("limited", [False, True])
def test_where_the_cores_are_limited_none_is_watched(monkeypatch, limited):
    monkeypatch.setattr(awake, "cores_allowed", lambda: 1.5 if limited else None)
    monkeypatch.setattr(awake, "_MOST_CORES", NUM_CORES)
    assert awake.cores_to_watch(NUM_CORES) == ([] if limited else sorted(os.sched_getaffinity(0)))


def test_with_many_cores_or_threads_to_spare_none_is_watched(monkeypatch):
    assert awake.cores_to_watch(NUM_CORES - 1) == []
    monkeypatch.setattr(awake, "_MOST_CORES", NUM_CORES - 1)
    assert awake.cores_to_watch(NUM_CORES) == []

"""Watchers of cores: where they are, how little they take, and that they sleep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from phalanx import Trainer
from phalanx.clock import now_s, pause
from phalanx.execution.thread_pool import ThreadPool
from phalanx.ipc import Waiting
from phalanx.memory import awake, compiled, keep_awake, tie_to_core
from tests.multiprocess.children import Children, Parent

DEADLINE_S = 30.0
NUM_CORES = len(os.sched_getaffinity(0))
can_watch = pytest.mark.skipif(
    not awake.cores_to_watch(NUM_CORES) or not compiled.is_compiled(),
    reason="cores are limited or many here, or nothing is compiled",
)


def watchers() -> list[int]:
    """Return the threads of this process that are of the lowest class."""
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    return [thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_IDLE]


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
    """See in a process of its own, where no test before has had a team."""
    assert watchers() == []
    with_few = ThreadPool(NUM_CORES, intra_op=2)
    if NUM_CORES > 1:
        ThreadPool(NUM_CORES - 1, intra_op=1).close()
    assert watchers() == []  # operators' own threads fill the cores, or there are cores left
    teams = [ThreadPool(NUM_CORES, intra_op=1), ThreadPool(NUM_CORES + 1, intra_op=1)]
    until(lambda: len(watchers()) == NUM_CORES)
    found = watchers()
    on = sorted(core for thread in found for core in os.sched_getaffinity(thread))
    assert on == sorted(os.sched_getaffinity(0))  # one each
    until(lambda: all(map(sleeps, found)))  # when nobody has come for a while
    for team in (*teams, with_few):
        team.close()
    before = sum(map(ticks, found))
    for _ in range(3):
        teams = [ThreadPool(NUM_CORES, intra_op=1)]
        teams[0].each(lambda index: index)
        teams[0].close()
        until(lambda: all(map(sleeps, found)))
    assert watchers() == found
    assert sum(map(ticks, found)) - before < 50  # of 10 ms
    parent.tell("well")


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
    team = ThreadPool(NUM_CORES, intra_op=1)
    until(lambda: len(watchers()) == NUM_CORES)
    team.each(lambda index: index)
    parent.tell("watched")
    for thread in watchers():
        until(lambda thread=thread: sleeps(thread))
    team.close()
    parent.tell("well")


@can_watch
def test_what_others_do_keeps_no_watcher_from_its_sleep():
    with Children() as children:
        burner = children.start(burn_a_little, min(os.sched_getaffinity(0)))
        assert burner.get() == "on"
        child = children.start(watch_beside_others)
        assert child.get() == "watched"
        assert child.get() == "well"


def fork(parent: Parent) -> None:
    team = ThreadPool(NUM_CORES, intra_op=1)
    child = os.fork()
    if child == 0:
        own = ThreadPool(NUM_CORES, intra_op=1)  # the fork has none of its parent's
        own.each(lambda index: index)
        until(lambda: len(watchers()) == NUM_CORES)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    team.close()
    parent.tell("well")


@can_watch
def test_a_fork_has_watchers_of_its_own():
    with Children() as children:
        assert children.start(fork).get() == "well"


def share(parent: Parent) -> None:
    keep_awake(NUM_CORES, place=1, sharers=2)
    until(lambda: len(watchers()) == max(1, NUM_CORES // 2))
    parent.tell("well")


@can_watch
def test_processes_share_the_cores():
    with Children() as children:
        assert children.start(share).get() == "well"


def cores_of_threads(team: ThreadPool) -> list[set[int]]:
    return team.each(lambda _: os.sched_getaffinity(0))


def tie(parent: Parent) -> None:
    every = os.sched_getaffinity(0)
    one_each, with_pools, more = (
        ThreadPool(NUM_CORES, intra_op=1),
        ThreadPool(NUM_CORES, intra_op=2),
        ThreadPool(NUM_CORES + 1, intra_op=1),
    )
    assert cores_of_threads(one_each) == [{core} for core in sorted(every)]
    assert cores_of_threads(with_pools) == [every] * NUM_CORES
    assert cores_of_threads(more) == [every] * (NUM_CORES + 1)  # two on one would be half as fast
    assert os.sched_getaffinity(0) == every  # the caller stays as it was
    for team in (one_each, with_pools, more):
        team.close()
    parent.tell("well")


@can_watch
def test_threads_that_have_a_core_each_are_tied_to_it():
    with Children() as children:
        assert children.start(tie).get() == "well"


@can_watch
def test_worker_processes_stay_on_the_cores_of_their_threads():
    with Trainer(
        torch.nn.Linear(3, 2),
        torch.nn.functional.mse_loss,
        lambda params: torch.optim.SGD(params, lr=0.1),
        replicas=NUM_CORES,
        executor="processes",
    ) as trainer:
        trainer.step((torch.ones(4, 3), torch.ones(4, 2)))
        cores = [os.sched_getaffinity(pid) for pid in trainer.worker_pids]
    assert cores == [{core} for core in sorted(os.sched_getaffinity(0))]


def test_without_compiled_code_it_does_nothing(monkeypatch):
    monkeypatch.setattr(compiled, "FUNCTIONS", {})
    before = os.sched_getaffinity(0)
    assert not keep_awake(NUM_CORES)()
    tie_to_core(0, NUM_CORES)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("text", "limited"), [("max 100000", False), ("150000 100000", True), ("", False)]
)
def test_where_the_cores_are_limited_none_is_watched(monkeypatch, tmp_path, text, limited):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(awake, "_QUOTAS", ((tmp_path / "no such", "-1"), (quota, "max")))
    monkeypatch.setattr(awake, "_MOST_CORES", NUM_CORES)
    assert awake.cores_to_watch(NUM_CORES) == ([] if limited else sorted(os.sched_getaffinity(0)))


def test_with_many_cores_or_threads_to_spare_none_is_watched(monkeypatch):
    assert awake.cores_to_watch(NUM_CORES - 1) == []
    monkeypatch.setattr(awake, "_MOST_CORES", NUM_CORES - 1)
    assert awake.cores_to_watch(NUM_CORES) == []

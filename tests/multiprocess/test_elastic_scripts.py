"""Ranks that survive, as users' scripts come to them: other loaders, other calls, other endings."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.distributed.elastic_membership import Member, RankMembership
from phalanx.errors import ConfigError, PeerTimeout
from phalanx.ipc import wait_until
from tests.contracts.test_executors_same_bits import (
    Run,
    assert_same_bits,
    made,
    result,
    trainer,
)
from tests.multiprocess.children import DEADLINE_S, Child, Children, Parent, wait_for_exit
from tests.multiprocess.test_elastic_ranks import Job, Plan, elastic_of, outcome
from tests.multiprocess.two_epochs import batches

pytestmark = pytest.mark.promise("launchers-change-no-bit", "killed-ranks-cost-no-bit")


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


def undisturbed(body: Callable) -> Any:
    """Return what ``body`` gives in one process."""
    losses: list[float] = []
    with trainer("threads", 1, losses, made()) as trained:
        return body(None, trained, losses)


def await_newcomer(trained: phalanx.Trainer, step: int) -> None:
    """Let the ranks wait after ``step`` until another wants to come in."""

    def note(event: object) -> None:
        if isinstance(event, phalanx.StepDone) and event.step == step:
            assert wait_until(lambda: elastic_of(trained).newcomers_wait, DEADLINE_S)

    if trained._choice.elastic is not None:
        trained._events._callbacks += (note,)


def start_with_a_late_one(job: Job, body: Callable) -> list[Child]:
    """Start ranks; the last one dies in step 7, after which the others wait for the next one."""
    ranks = job.start_all({job.size - 1: Plan("before the slices", step=7)}, body)
    wait_for_exit(ranks[-1].pid)
    ranks[-1] = job.start(job.size - 1, None, body)
    return ranks


def shuffled(parent: Parent | None, trained: phalanx.Trainer, losses: list[float]) -> Run:
    """A newcomer is let in before the first step of an epoch, whose batch is read by then."""
    inputs, targets = (torch.cat(each) for each in zip(*batches(), strict=True))
    loader = DataLoader(TensorDataset(inputs[:52], targets[:52]), 13, shuffle=True)
    await_newcomer(trained, 7)
    torch.manual_seed(0)
    trained.fit(loader, epochs=3)
    return result(trained, losses[-3:])


def test_a_rank_that_comes_at_the_first_step_of_an_epoch_shuffles_alike(children: Children) -> None:
    expected = undisturbed(shuffled)
    for each in start_with_a_late_one(Job(children), shuffled):
        assert_same_bits(outcome(each), expected)


def saved_first(parent: Parent | None, trained: phalanx.Trainer, losses: list[float]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        trained.save(folder)
    await_newcomer(trained, 7)
    trained.fit(batches(12), steps=10)
    return result(trained, losses[-2:])


def counted(parent: Parent | None, trained: phalanx.Trainer, losses: list[float]) -> Run:
    await_newcomer(trained, 7)
    trained.fit(batches(12), steps=10)
    return result(trained, losses[-2:])


@pytest.mark.parametrize("body", [counted, saved_first])
def test_a_rank_that_comes_ends_at_the_step_where_the_others_do(
    body: Callable, children: Children
) -> None:
    expected = undisturbed(body)
    for each in start_with_a_late_one(Job(children), body):
        assert_same_bits(outcome(each), expected)


def closed_at_last(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> str:
    try:
        trained.fit(batches() if parent.hear() else (1 / 0 for _ in batches()))
    except ZeroDivisionError as error:
        return f"{error}"
    finally:
        trained.close()
    return f"{trained.steps}"


def test_who_closes_because_of_an_error_has_not_finished(children: Children) -> None:
    job = Job(children, size=2)
    ranks = job.start_all({}, closed_at_last)
    for each in ranks:
        each.put(False)
    assert [outcome(each) for each in ranks] == ["division by zero"] * 2
    for each in ranks:
        wait_for_exit(each.pid)
    ranks = job.start_all({}, closed_at_last)
    for each in ranks:
        each.put(True)
    assert [outcome(each) for each in ranks] == [f"{len(batches())}"] * 2


def tried_again(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> int | str:
    with pytest.raises(PeerTimeout):
        trained.fit(batches())
    parent.tell("refused")
    parent.hear()
    try:
        trained.fit(batches())
    except PeerTimeout as error:
        return f"{error}"
    return trained.steps


def test_a_fit_whose_ranks_did_not_come_trains_nothing_alone(children: Children) -> None:
    rank = Job(children, size=2).start(0, None, tried_again, 1.0)
    assert rank.get() == "refused"
    rank.put()
    assert "2 ranks must come" in outcome(rank)


def told_of_the_timeout(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> str:
    try:
        trained.fit(batches())
    except PeerTimeout as error:
        return f"{error}"
    return ""


def dies_at_the_group(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> None:
    elastic_of(trained)._open_group = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    trained.fit(batches())


def test_who_begins_does_not_wait_for_ever_for_one_that_died_then(children: Children) -> None:
    job = Job(children)
    ranks = [job.start(rank, None, told_of_the_timeout, 3.0) for rank in range(2)]
    job.start(2, None, dies_at_the_group)
    for each in ranks:
        assert "3 ranks must come" in outcome(each)


def dies_at_the_second_group(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> None:
    elastic = elastic_of(trained)
    trained.join()
    elastic._open_group = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    trained.fit(batches(9))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.night), 1])
def test_who_dies_as_the_next_group_is_made_is_not_waited_for(
    rank: int, children: Children
) -> None:
    job, told = Job(children), 2 * DEADLINE_S  # before that nobody gives up
    job.start(rank, None, dies_at_the_second_group, told)
    job.start(2, Plan("before the slices", step=3), one_epoch, told)
    assert_same_bits(outcome(job.start(1 - rank, None, one_epoch, told)), undisturbed(one_epoch))


def one_epoch(parent: Parent | None, trained: phalanx.Trainer, losses: list[float]) -> Run:
    trained.fit(batches(9))
    return result(trained, losses)


def test_one_of_another_host_that_never_showed_life_is_lost_too() -> None:
    store = HashStore()
    membership = RankMembership(store, 0, 2, 1.0, 0.05)
    try:
        elsewhere = Member(rank=1, host="elsewhere", process=(1, 1))
        assert wait_until(lambda: membership._is_gone(2, elsewhere), DEADLINE_S)
    finally:
        membership.leave()


def test_who_was_let_in_since_the_last_beat_is_no_newcomer() -> None:
    """Such a one made the ranks form another group, in which a rank that stops goes unnoticed."""
    has_read, goes_on = threading.Event(), threading.Event()

    class SlowBeat(HashStore):
        def get(self, key: str) -> bytes:
            found: bytes = super().get(key)
            if key == "member/1" and threading.current_thread() is not threading.main_thread():
                has_read.set()
                assert goes_on.wait(DEADLINE_S)
                found = json.dumps({**json.loads(found), "asks": 1}).encode()  # before the beat
            return found

    store = SlowBeat()
    membership = RankMembership(store, 0, 1, DEADLINE_S, DEADLINE_S)
    try:
        assert has_read.wait(DEADLINE_S)
        membership.next_epoch(None, admits=True)
    finally:
        goes_on.set()
        membership.leave()  # after the beat
    assert not membership.newcomers_wait


def stopped_in_one(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> str:
    folder, stops = parent.hear()

    def stop(event: object) -> None:
        if isinstance(event, phalanx.StepDone) and event.step == 5 and stops:
            trained.stop()

    trained._events._callbacks += (stop,)
    try:
        trained.fit(batches())
        trained.save(folder)
    except ConfigError as error:
        return f"{error}"
    return "saved"


def test_a_rank_that_stops_and_saves_alone_is_told_what_the_others_do(
    children: Children, tmp_path: Path
) -> None:
    ranks = Job(children).start_all({}, stopped_in_one)
    for rank, each in enumerate(ranks):
        each.put((tmp_path / "checkpoint", rank == 1))
    expected = "rank 1 is about to save while rank 0 is about to run a batch"
    for each in ranks:
        assert expected in outcome(each)

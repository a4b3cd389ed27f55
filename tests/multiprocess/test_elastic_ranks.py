"""Ranks that survive the loss of others: the bits of an undisturbed run, wherever one dies."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import TCPStore

import phalanx
from phalanx.distributed import ElasticExchange, SharedGroup, elastic_exchange
from phalanx.distributed.elastic_membership import Member, decide
from phalanx.errors import PeerError, PeerLost, PeerTimeout, PhalanxError, StateError
from phalanx.execution import RankSums
from phalanx.ipc import wait_until
from phalanx.train import trainer as trainer_module
from tests.contracts.test_executors_same_bits import (
    Everything,
    Run,
    assert_same_bits,
    made,
    result,
    trainer,
)
from tests.multiprocess.children import DEADLINE_S, Child, Children, Parent, wait_for_exit
from tests.multiprocess.two_epochs import EPOCHS, STEPS, batches, train_in_one_process

SIZE = 3
TIMEOUT_S = 30.0
PLACES = [
    "before the messages",
    "after the messages",
    "before the slices",
    "after the slices",
    "before sharing",
    "after sharing",
    "committed",
]
DIES_AT = 8  # whose step ends with a comparison of all weights
DONE_AT = 7  # whose step ends with the sharing of the sums

pytestmark = pytest.mark.promise("killed-ranks-cost-no-bit")


class Plan(NamedTuple):
    """What happens in a rank: at a place of step `step`, something is done."""

    place: str
    act: str = "die"
    step: int = DIES_AT


def plant(plan: Plan, trained: phalanx.Trainer) -> None:
    """Let this rank die, or find a peer lost, at a place."""

    def act(exchange: ElasticExchange | None = None) -> None:
        if trained.steps + 1 == plan.step or (plan.place == "committed" and trained.steps == 8):
            if plan.act == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if plan.act == "halt":
                os.kill(os.getpid(), signal.SIGSTOP)
            plans.clear()
            if plan.act == "fail":
                raise PeerLost("planted")

    plans = [plan]
    when, _, where = plan.place.partition(" ")
    calls: dict[str, tuple[type, str]] = {
        "the messages": (ElasticExchange, "gather"),
        "the slices": (ElasticExchange, "start_all_to_all"),
        "sharing": (RankSums, "receive"),  # of all buckets
    }
    if where:
        owner, name = calls[where]
        real = getattr(owner, name)

        def collective(self: Any, *args: Any) -> Any:
            if when == "before" and plans:
                act()
            found = real(self, *args)
            if not callable(found):
                return acting(found)
            return lambda: acting(found())

        def acting(found: Any) -> Any:
            if when == "after" and plans:
                with elastic_of(trained)._translating_errors():
                    act()
            return found

        setattr(owner, name, collective)
    else:
        done = ElasticExchange.mark_done

        def mark_done(self: ElasticExchange) -> None:
            done(self)
            if plans:
                act()

        ElasticExchange.mark_done = mark_done  # type: ignore[method-assign]


def rank_main(
    parent: Parent, given: dict[str, str], plan: Plan | None, body: Callable, *more: Any
) -> None:
    os.environ.update(given)
    torch.set_num_threads(1)
    losses: list[float] = []
    net = made() if given["RANK"] == "0" else Everything()  # rank 0's weights count
    executor = phalanx.Ranks(timeout_s=TIMEOUT_S if not more else more[0], lost_after_s=3.0)
    with trainer(executor, 1, losses, net) as trained:  # type: ignore[arg-type]
        if plan is not None:
            plant(plan, trained)
        parent.tell(pickle.dumps(body(parent, trained, losses)))  # tensors by value


def fit(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> Run:
    trained.fit(batches(), epochs=EPOCHS)
    assert trained.steps == STEPS
    return result(trained, losses)


class Job:
    """Ranks, each to be started and killed by itself, with a store as a launcher keeps one."""

    def __init__(self, children: Children, hosts: int = 1, size: int = SIZE) -> None:
        self._children = children
        self.size = size
        self._hosts = hosts
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)

    def start(self, rank: int, plan: Plan | None = None, body: Callable = fit, *more: Any) -> Child:
        given = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PHALANX_HOST": f"host-{rank * self._hosts // self.size}",
        }
        child = self._children.start(rank_main, given, plan, body, *more)
        child.job = self  # so that the store lives as long as its ranks
        return child

    def start_all(self, plans: dict[int, Plan], body: Callable = fit, *more: Any) -> list[Child]:
        return [self.start(rank, plans.get(rank), body, *more) for rank in range(self.size)]


@pytest.fixture(scope="module")
def expected() -> Run:
    return train_in_one_process()


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


def outcome(child: Child) -> Any:
    return pickle.loads(child.get())


# --- a rank is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "rank", "hosts"),
    [
        pytest.param(place, rank, 1, marks=[pytest.mark.night] * (at % 4 != rank))
        for at, place in enumerate(PLACES)
        for rank in (0, 2)
    ]
    + [
        ("after the messages", 2, 2),  # alone on its host
        pytest.param("after sharing", 2, 2, marks=pytest.mark.night),
    ],
)
def test_those_left_finish_with_the_bits_of_an_undisturbed_run(
    place: str, rank: int, hosts: int, children: Children, expected: Run
) -> None:
    ranks = Job(children, hosts).start_all({rank: Plan(place)})
    lost = ranks.pop(rank)
    for each in ranks:
        assert_same_bits(outcome(each), expected)
    lost.process.join(TIMEOUT_S)
    assert lost.process.exitcode == -signal.SIGKILL


def test_the_last_one_goes_on_alone(children: Children, expected: Run) -> None:
    plans = {0: Plan("before the slices"), 1: Plan("after sharing", step=11)}
    ranks = Job(children).start_all(plans)
    assert_same_bits(outcome(ranks[2]), expected)


def test_a_rank_that_missed_what_the_others_have_does_it_alone(
    children: Children, expected: Run
) -> None:
    plans = {1: Plan("after sharing", "fail", DONE_AT), 2: Plan("after sharing", step=DONE_AT)}
    ranks = Job(children).start_all(plans)
    for each in ranks[:2]:
        assert_same_bits(outcome(each), expected)


def failing(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> list[str]:
    """Return what this rank hears of a step that fails in one, a checkpoint, and another call."""
    trained.fit(batches(), steps=DIES_AT)
    is_third = os.environ["RANK"] == "2"
    batch, target = batches()[0]
    step = partial(trained.step, (batch, target + 99 * is_third))  # targets that are no classes
    save = partial(trained.save, "/dev/null/checkpoint")
    heard = []
    for call in (step, save, save if is_third else step):
        with pytest.raises((IndexError, PhalanxError)) as caught:
            call()
        heard.append(str(caught.value))
    return heard


def test_errors_name_ranks_as_before_a_loss(children: Children) -> None:
    _, *others = Job(children).start_all({0: Plan("after the messages")}, failing)
    heard, of_third = [outcome(each) for each in others]
    assert "but rank 2 raised IndexError" in heard[0]
    assert "Rank 1 must write for all ranks" in of_third[1]
    for each in (heard, of_third):
        assert "rank 2 is about to save while rank 1 is about to run a batch" in each[2]


def evaluated(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> list[float]:
    trained.fit(batches(), steps=DIES_AT - 1)
    with torch.autocast("cpu", enabled=False):  # torch's fused attention does not work with it
        return [trained.evaluate(batches())["loss"] for _ in range(2)]


@pytest.mark.parametrize(
    "plans", [pytest.param({}, marks=pytest.mark.night), {2: Plan("after the messages")}]
)
def test_an_evaluation_is_finished(plans: dict[int, Plan], children: Children) -> None:
    with trainer("threads", 1, [], made()) as trained:
        trained.fit(batches(), steps=DIES_AT - 1)
        with torch.autocast("cpu", enabled=False):
            wanted = trained.evaluate(batches())["loss"]
    behind = {1: Plan("after the messages", "fail")} if plans else {}
    ranks = Job(children).start_all({**plans, **behind}, evaluated)
    for each in ranks[:2]:
        assert outcome(each) == [wanted] * 2


def saved(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> Run:
    trained.fit(batches(), steps=DIES_AT - 1)
    trained.save(parent.hear())
    return fit(parent, trained, losses)


@pytest.mark.parametrize(
    "plans",
    [
        {0: Plan("before the messages")},
        {0: Plan("after the messages"), 1: Plan("after the messages", "fail")},
    ],
    ids=["in it", "when another has left it"],
)
def test_a_checkpoint_is_written_though_the_writer_dies(
    plans: dict[int, Plan], children: Children, tmp_path: Path, expected: Run
) -> None:
    ranks = Job(children).start_all(plans, saved)
    for each in ranks:
        each.put(tmp_path / "checkpoint")
    for each in ranks[1:]:
        assert_same_bits(outcome(each), expected)
    with trainer("threads", 2, [], made()) as trained:
        trained.resume(tmp_path / "checkpoint")
        assert trained.steps == DIES_AT - 1


# --- a rank comes --------------------------------------------------------------------------------


def meeting(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> Run:
    """After the step in which one died, before any can come in, wait for one that wants to."""

    def note(event: object) -> None:
        if isinstance(event, phalanx.StepDone) and event.step == DIES_AT:
            assert wait_until(lambda: elastic_of(trained).newcomers_wait, DEADLINE_S)

    trained._events._callbacks += (note,)
    return fit(parent, trained, losses)


def elastic_of(trained: phalanx.Trainer) -> ElasticExchange:
    found = trained._choice.elastic
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("hosts", "rank"),
    [(2, 1), *(pytest.param(*each, marks=pytest.mark.night) for each in [(1, 0), (1, 1), (2, 0)])],
)
def test_a_rank_that_is_started_again_is_given_the_state(
    hosts: int, rank: int, children: Children, expected: Run
) -> None:
    job = Job(children, hosts)
    ranks = job.start_all({rank: Plan("after the messages")}, meeting)
    wait_for_exit(ranks[rank].pid)
    ranks[rank] = job.start(rank)
    runs = [outcome(each) for each in ranks]
    late = runs.pop(rank)
    for run in runs:
        assert_same_bits(run, expected)
    assert late.losses == expected.losses[-len(late.losses) :]
    assert 0 < len(late.losses) <= STEPS - DIES_AT
    assert_same_bits(dataclasses.replace(late, losses=expected.losses), expected)


def lost_in_the_hand_over(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> Run:
    """Die while the state is given to a rank that comes."""
    elastic = elastic_of(trained)
    real = elastic._pass_state

    def pass_state() -> bytes:
        if elastic.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real()

    elastic._pass_state = pass_state  # type: ignore[method-assign]
    return meeting(parent, trained, losses)


def test_the_giver_dies_while_it_gives(children: Children, expected: Run) -> None:
    """The first rank gives at the start, so it is the second's turn to die."""
    job = Job(children)
    ranks = [
        job.start(0, Plan("after the messages")),
        job.start(1, None, lost_in_the_hand_over),
        job.start(2, None, meeting),
    ]
    wait_for_exit(ranks[0].pid)
    ranks[0] = job.start(0)
    wait_for_exit(ranks[1].pid)
    assert_same_bits(outcome(ranks[2]), expected)
    late = dataclasses.replace(outcome(ranks[0]), losses=expected.losses)
    assert_same_bits(late, expected)


def looped(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> Run:
    """A loop of the user's own."""
    data = batches()[:-1] * 3  # the last batch has too few rows
    if not parent.hear():
        with pytest.raises(StateError, match=r"Call `join\(\)` first"):
            trained.step(data[0])
    trained.join()
    for step in range(trained.steps, STEPS):
        trained.step(data[step])
        if trained.steps == DIES_AT and elastic_of(trained).rank == 0:
            assert wait_until(lambda: elastic_of(trained).newcomers_wait, DEADLINE_S)
    return result(trained, losses)


def test_a_loop_of_the_users_own(children: Children) -> None:
    job = Job(children)
    ranks = job.start_all({2: Plan("before the slices")}, looped)
    for each in ranks:
        each.put(True)
    wait_for_exit(ranks[2].pid)
    ranks[2] = job.start(2, None, looped)
    ranks[2].put(False)
    losses: list[float] = []
    with trainer("threads", 1, losses, made()) as trained:
        for batch in (batches()[:-1] * 3)[:STEPS]:
            trained.step(batch)
        expected = result(trained, losses)
    *runs, late = [outcome(each) for each in ranks]
    for run in runs:
        assert_same_bits(run, expected)
    assert 0 < len(late.losses) <= STEPS - DIES_AT
    assert_same_bits(dataclasses.replace(late, losses=losses), expected)


def test_a_run_whose_ranks_have_all_died_begins_anew(children: Children, expected: Run) -> None:
    job = Job(children)
    ranks = job.start_all(dict.fromkeys(range(SIZE), Plan("committed")))
    for each in ranks:
        wait_for_exit(each.pid)
    for each in job.start_all({}):
        assert_same_bits(outcome(each), expected)


def told_to_go(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> str:
    try:
        trained.fit(batches(), epochs=EPOCHS)
    except (PeerError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def killed_afterwards(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> None:
    parent.tell(pickle.dumps(told_to_go(parent, trained, losses)))
    trained.close()
    os.kill(os.getpid(), signal.SIGKILL)


def test_who_comes_after_the_end_is_told(children: Children) -> None:
    job = Job(children)
    others = [job.start(0, None, told_to_go), job.start(1, None, killed_afterwards)]
    lost = job.start(2, Plan("committed"), told_to_go)
    assert [outcome(each) for each in others] == [""] * 2
    for each in (others[1], lost):
        wait_for_exit(each.pid)
    told = outcome(job.start(2, None, told_to_go))
    assert told.startswith("RunEnded: The run that this rank would join has ended: nothing is left")
    told = outcome(job.start(1, None, told_to_go))
    assert told.startswith("StateError: The run that this rank would join has ended, and")
    assert "its process before had finished it" in told


def another(parent: Parent, trained: phalanx.Trainer, losses: list[float]) -> str:
    trained.module.out.weight.requires_grad_(False)
    return told_to_go(parent, trained, losses)


def test_who_comes_with_another_model_is_refused_alone(children: Children, expected: Run) -> None:
    job = Job(children)
    ranks = job.start_all({2: Plan("before the slices")}, meeting)
    wait_for_exit(ranks[2].pid)
    told = outcome(job.start(2, None, another))
    assert told.startswith("StateError: A rank that comes later must train what the others train")
    assert "frozen" in told
    for each in ranks[:2]:
        assert_same_bits(outcome(each), expected)


def test_a_rank_that_was_halted_too_long_is_told(children: Children, expected: Run) -> None:
    job = Job(children)
    ranks = [
        job.start(0, None, fit, 2.0),
        job.start(1, Plan("before the slices", "halt"), told_to_go, 2.0),
        job.start(2, None, fit, 2.0),
    ]
    for rank in (0, 2):
        assert_same_bits(outcome(ranks[rank]), expected)
    os.kill(ranks[1].pid, signal.SIGCONT)
    assert outcome(ranks[1]).startswith("PeerLost: This rank gave no sign of life in time")


def timed_out(parent: Parent, trained: phalanx.Trainer, losses: list[float], call: str = "") -> str:
    def fail(*_: object) -> None:
        raise PeerTimeout("planted")

    if call == "allreduce":
        trained.fit(batches(), steps=1)
    setattr(SharedGroup if call == "allreduce" else elastic_exchange, call, fail)
    return told_to_go(parent, trained, losses)


@pytest.mark.parametrize(
    ("call", "words"),
    [("make_group", "PeerLost: All ranks live, but twice"), ("allreduce", "PeerTimeout: planted")],
)
def test_ranks_that_live_and_are_late_again_give_up(call: str, words: str, children: Children):
    for each in Job(children, size=2).start_all({}, partial(timed_out, call=call)):
        assert outcome(each).startswith(words)


# --- the decision, and bugs that must be caught --------------------------------------------------


def test_who_decides_waits_for_all_that_live() -> None:
    first = Member(rank=0, done=4, admits=True)
    third = Member(rank=2, done=4, admits=True)
    waiting = {7: Member(rank=1, admits=True), 8: Member(rank=0, admits=True)}
    assert decide([1, 3], {1: first, **waiting}, 3) is None
    assert decide([1, 3], {1: first, 3: third, **waiting}, 3) == [1, 3, 8, 7]
    behind = Member(rank=2, done=3)
    assert decide([1, 3], {1: first, 3: behind, **waiting}, 3) == [1, 3]
    assert decide([], waiting, 3) is None
    assert decide([], {**waiting, 2: Member(rank=1, admits=True)}, 3) == [8, 2, 7]


def nobody_is_behind() -> None:
    """A rank that missed a step goes on with the next."""
    real = ElasticExchange._regroup

    def regroup(self: ElasticExchange, *, admits: bool) -> bytes | None:
        found = real(self, admits=admits)
        if self.is_behind:
            self.mark_done()
        return found

    ElasticExchange._regroup = regroup  # type: ignore[method-assign]


def moments_are_forgotten() -> None:
    """A rank that comes is given the weights, and not what the optimizer keeps."""
    real = trainer_module.to_bytes

    def forgetful(message: Any) -> bytes:
        for each in message["content"]["optimizer"]["state"].values():
            each["exp_avg"] = torch.zeros_like(each["exp_avg"])
        return real(message)

    trainer_module.to_bytes = forgetful  # type: ignore[attr-defined]


BUGS = {each.__name__: each for each in (nobody_is_behind, moments_are_forgotten)}


def with_bug(
    parent: Parent, trained: phalanx.Trainer, losses: list[float], bug: str = ""
) -> Run | str:
    BUGS[bug]()
    try:
        return (
            meeting(parent, trained, losses)
            if bug == "moments_are_forgotten"
            else fit(parent, trained, losses)
        )
    except Exception as error:  # whatever such a bug leads to
        return f"{type(error).__name__}: {error}"


def assert_right(rank: Child, expected: Run) -> None:
    run = outcome(rank)
    assert isinstance(run, Run)
    assert_same_bits(dataclasses.replace(run, losses=expected.losses), expected)


@pytest.mark.night  # it is about the tests
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_caught(bug: str, children: Children, expected: Run) -> None:
    job = Job(children)
    plans = {2: Plan("after sharing")}
    if bug == "nobody_is_behind":
        plans = {
            rank: Plan("after sharing", act, DONE_AT) for rank, act in ((1, "fail"), (2, "die"))
        }
    ranks = job.start_all(plans, partial(with_bug, bug=bug))
    if bug == "moments_are_forgotten":
        wait_for_exit(ranks[2].pid)
        ranks[1:] = [job.start(2)]
    with pytest.raises(AssertionError):
        assert_right(ranks[1], expected)

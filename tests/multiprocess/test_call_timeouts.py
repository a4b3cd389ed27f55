"""A call's own timeout counts, and not the group's: in every collective, on one host and on two."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

import phalanx  # noqa: F401
from phalanx.errors import PeerTimeout
from tests.multiprocess.ranks import Ranks

CALL_S, GRACE_S = 0.2, 1.0
SHORT = datetime.timedelta(seconds=CALL_S)


@pytest.fixture(scope="module", params=["", "ab"], ids=["one host", "two hosts"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(2, hosts=request.param) as ranks:
        yield ranks


def told(kind: Callable[[], Any], root: int | None = None, timeout: datetime.timedelta = SHORT):
    options = kind()
    options.timeout = timeout
    if root is not None:
        options.rootRank = root
    return options


def one() -> torch.Tensor:
    return torch.ones(4)


def two() -> list[torch.Tensor]:
    return [one(), one()]


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda g: g.allreduce([one()], told(dist.AllreduceOptions)),
    "reduce": lambda g: g.reduce([one()], told(dist.ReduceOptions)),
    "reduce_scatter": lambda g: g.reduce_scatter([one()], [two()], told(dist.ReduceScatterOptions)),
    "broadcast": lambda g: g.broadcast([one()], told(dist.BroadcastOptions, root=1)),
    "all_gather": lambda g: g.allgather([two()], [one()], told(AllgatherOptions)),
    "all_gather of one tensor": lambda g: g._allgather_base(
        torch.ones(8), one(), told(AllgatherOptions)
    ),
    "gather": lambda g: g.gather([two()], [one()], told(dist.GatherOptions)),
    "scatter": lambda g: g.scatter([one()], [[]], told(dist.ScatterOptions, root=1)),
    "all_to_all": lambda g: g.alltoall(two(), two(), told(dist.AllToAllOptions)),
    "all_to_all of one tensor": lambda g: g.alltoall_base(
        one(), one(), [], [], told(dist.AllToAllOptions)
    ),
    "all_to_all, by position": lambda g: g.alltoall_base(one(), one(), [], [], SHORT),
    "all_to_all, by name": lambda g: g.all_to_all_single(one(), one(), [], [], timeout=SHORT),
    "barrier": lambda g: g.barrier(told(dist.BarrierOptions)),
}


def alone(rank: int, call: Callable[[Any], Any]) -> tuple[str, int | None] | None:
    """Rank 0 calls and rank 1 does not; return what rank 0 is told."""
    group = dist.new_group(None, datetime.timedelta(seconds=15), "phalanx")
    group.barrier().wait()
    said = None
    if rank == 0:
        with pytest.raises(PeerTimeout) as caught:
            call(group).wait()
        said = str(caught.value), caught.value.rank
    dist.barrier()  # of gloo: rank 1 stays until the other has given up
    dist.destroy_process_group(group)
    return said


def named(rank: int, name: str) -> tuple[str, int | None] | None:
    return alone(rank, CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_a_timeout_of_its_own_ends_at_that(ranks, name):
    text, late = ranks.run(named, name)[0]
    assert f"within {CALL_S + GRACE_S * bool(ranks.hosts):g} s" in text
    assert late == 1


def short_before_long(rank: int) -> tuple[str, int | None] | None:
    def call(group: Any) -> Any:
        first = group.reduce([one()], told(dist.ReduceOptions))
        group.reduce([one()], told(dist.ReduceOptions, timeout=datetime.timedelta(seconds=10)))
        return first

    return alone(rank, call)


def test_a_later_call_does_not_change_the_timeout_of_an_earlier_one(ranks):
    text, _ = ranks.run(short_before_long)[0]
    assert f"within {CALL_S + GRACE_S * bool(ranks.hosts):g} s" in text


def short_behind_long(rank: int) -> tuple[str, int | None] | None:
    def call(group: Any) -> Any:
        group.reduce([one()], told(dist.ReduceOptions, timeout=datetime.timedelta(seconds=10)))
        return group.reduce([one()], told(dist.ReduceOptions))

    return alone(rank, call)


def waited_for_a_moment(rank: int) -> tuple[str, int | None] | None:
    def call(group: Any) -> None:
        group.reduce([one()], dist.ReduceOptions()).wait(SHORT)

    return alone(rank, call)


@pytest.mark.parametrize("function", [short_behind_long, waited_for_a_moment])
def test_time_counts_behind_others_and_in_wait_too(ranks, function):
    text, late = ranks.run(function)[0]
    assert f"within {CALL_S + GRACE_S * bool(ranks.hosts):g} s" in text
    assert late == 1


MESSAGES: dict[str, Callable[[Any], Any]] = {
    "send": lambda g: g.send([torch.ones(1 << 20)], 1, 5),
    "recv": lambda g: g.recv([one()], 1, 5),
    "recv from any": lambda g: g.recv_anysource([one()], 5),
}


def message_alone(rank: int, name: str) -> tuple[str, int | None] | None:
    def call(group: Any) -> None:
        MESSAGES[name](group).wait(SHORT)

    return alone(rank, call)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_nobody_takes_or_sends_ends_at_the_timeout_of_its_wait(ranks, name):
    text, late = ranks.run(message_alone, name)[0]
    assert f"within {CALL_S + GRACE_S * bool(ranks.hosts):g} s" in text
    assert late == (None if ranks.hosts and name == "recv from any" else 1)

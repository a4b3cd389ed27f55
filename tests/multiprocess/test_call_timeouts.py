"""A call's own timeout counts, and not the group's: in every collective, on one host and on two."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

import phalanx  # noqa: F401
from phalanx.errors import PeerTimeout
from tests.multiprocess.ranks import Ranks

pytestmark = pytest.mark.promise("every-wait-ends")

CALL_S, GRACE_S = 0.2, 1.0
SHORT, LONG = datetime.timedelta(seconds=CALL_S), datetime.timedelta(seconds=10)


@pytest.fixture(scope="module", params=["", "ab"], ids=["one host", "two hosts"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(2, hosts=request.param) as ranks:
        yield ranks


def told(kind: Callable[[], Any], root: int | None = None):
    options = kind()
    options.timeout = SHORT
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
    "barrier": lambda g: g.barrier(told(dist.BarrierOptions)),
}


SHORT_AND_LONG: dict[str, Callable[[Any], Any]] = {
    "before a longer one": lambda g: [reduce(g, SHORT), reduce(g, LONG)][0],
    "behind a longer one": lambda g: [reduce(g, LONG), reduce(g, SHORT)][1],
}
WAITS: dict[str, Callable[[Any], Any]] = {
    "reduce": lambda g: reduce(g, None),
    "send": lambda g: g.send([torch.ones(1 << 20)], 1, 5),
    "recv": lambda g: g.recv([one()], 1, 5),
    "recv from any": lambda g: g.recv_anysource([one()], 5),
}


def reduce(group: Any, timeout: datetime.timedelta | None) -> Any:
    options = dist.ReduceOptions()
    if timeout is not None:
        options.timeout = timeout
    return group.reduce([one()], options)


def alone(
    rank: int, begin: Callable[[Any, str], Any], names: Sequence[str], *wait: datetime.timedelta
) -> dict[str, tuple[str, int | None]]:
    """Rank 0 makes calls, all at once and each in a group of its own, and rank 1 none.

    Returns:
        What rank 0 is told of each.
    """
    groups = [dist.new_group(None, datetime.timedelta(seconds=15), "phalanx") for _ in names]
    for group in groups:
        group.barrier().wait()

    def call(name: str, group: Any) -> tuple[str, int | None]:
        with pytest.raises(PeerTimeout) as caught:
            begin(group, name).wait(*wait)
        return str(caught.value), caught.value.rank

    said = {}
    if rank == 0:
        with ThreadPoolExecutor(len(names)) as pool:
            said = dict(zip(names, pool.map(call, names, groups), strict=True))
    dist.barrier()  # of gloo: rank 1 stays until the other has given up
    for group in groups:
        dist.destroy_process_group(group)
    return said


def called(group: Any, name: str) -> Any:
    return CALLS[name](group)


def test_a_call_with_a_timeout_of_its_own_ends_at_that(ranks):
    check(ranks, ranks.run(alone, called, [*CALLS])[0])


def called_twice(group: Any, name: str) -> Any:
    return SHORT_AND_LONG[name](group)


def test_time_counts_behind_others_and_a_later_call_does_not_change_it(ranks):
    check(ranks, ranks.run(alone, called_twice, [*SHORT_AND_LONG])[0])


def begun(group: Any, name: str) -> Any:
    return WAITS[name](group)


def test_a_call_or_a_message_that_nobody_takes_or_sends_ends_at_the_timeout_of_its_wait(ranks):
    said = ranks.run(alone, begun, [*WAITS], SHORT)[0]
    check(ranks, {"reduce": said.pop("reduce")})
    for name, (text, late) in said.items():
        assert "did not answer over the network within 0.2 s" in text, name
        assert late == (None if name == "recv from any" else 1), name


def check(ranks: Ranks, said: dict[str, tuple[str, int | None]]) -> None:
    """See that each call has ended at its own time, and has named who was late."""
    assert said
    words = f"within {CALL_S + GRACE_S * bool(ranks.hosts):g} s"
    for name, (text, late) in said.items():
        assert words in text, name
        assert late == 1, name

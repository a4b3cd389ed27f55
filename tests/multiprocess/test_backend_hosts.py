"""Messages between hosts, played on one machine, at the end of their group."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import phalanx  # noqa: F401
from phalanx.errors import PeerLost, PeerTimeout, StateError
from tests.multiprocess.ranks import Ranks
from tests.multiprocess.test_backend_calls import make

pytestmark = pytest.mark.promise("backend-carries-other-libraries")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, hosts="aab") as ranks:
        yield ranks


def broken_by_a_wait(rank: int) -> float:
    """Rank 2 gives a message up while rank 0 waits for another of it; return how long it waits."""
    group = make()
    dist.barrier(group)
    begin = datetime.datetime.now()
    if rank == 2:
        with pytest.raises(PeerTimeout):
            dist.irecv(torch.ones(3), 0, group, 1).wait(datetime.timedelta(seconds=0.1))
    elif rank == 0:
        with pytest.raises((PeerLost, PeerTimeout)):
            dist.recv(torch.ones(3), 2, group, 2)
    seconds = (datetime.datetime.now() - begin).total_seconds()
    dist.barrier()
    dist.destroy_process_group(group)
    return seconds


def test_a_group_that_a_wait_has_broken_fails_on_the_other_host_at_once(ranks):
    assert max(ranks.run(broken_by_a_wait)) < 10.0


def after_the_end(rank: int) -> list[str]:
    group, told = make(), []
    dist.barrier(group)
    dist.destroy_process_group(group)
    for call in (
        lambda: group.send([torch.ones(3)], 1, 0),
        lambda: group.recv([torch.ones(3)], 1, 0),
        lambda: group.recv_anysource([torch.ones(3)], 0),
    ):
        with pytest.raises(StateError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_a_message_after_the_end_of_the_group_is_refused(ranks):
    for told in ranks.run(after_the_end):
        assert all("must be used before it is destroyed" in text for text in told)

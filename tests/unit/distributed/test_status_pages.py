"""What ranks are told about each other, on status pages of one region."""

from __future__ import annotations

import pytest
import torch

from phalanx.distributed.fingerprint import Fingerprint, pack
from phalanx.distributed.status_pages import StatusPages
from phalanx.errors import GroupAborted, PeerLost, PeerTimeout
from phalanx.ipc import Region

SIZE = 3


@pytest.fixture
def all_pages() -> list[StatusPages]:
    region = Region.create(StatusPages.needed_bytes(SIZE))
    return [StatusPages(region, rank, range(SIZE), SIZE) for rank in range(SIZE)]


def begin(pages: StatusPages, number: int) -> None:
    pages.publish(Fingerprint(number, pack("all_reduce", torch.float32), 9))


def post(pages: StatusPages, progress: int) -> None:
    """Do what native/collectives.c does."""
    pages._words[pages._mine] = progress


def test_second_hand_news_name_the_dead_and_what_it_was_in(all_pages):
    for rank, number in enumerate((8, 8, 7)):
        begin(all_pages[rank], number)
    all_pages[1].stop(PeerLost("", 2))
    error = all_pages[0].find_error([1], 4, "all_reduce of group 'x'")
    assert isinstance(error, PeerLost)
    assert error.rank == 2
    assert str(error) == (
        "Rank 2 of 3 has died, as rank 1 has found during all_reduce of group 'x'. The last "
        "operation of each: rank 2: all_reduce #7 (SUM of 9 × float32); rank 0: all_reduce #8 (SUM "
        "of 9 × float32). Destroy the group and make a new one."
    )


def test_who_is_here_or_came_before_it_left_is_not_missed(all_pages):
    assert all_pages[0].find_error([1, 2], 4) is None
    post(all_pages[1], 4)
    assert all_pages[0].timeout_error([1], 4, "reduce", 0.5) is None
    all_pages[1].stop(None)
    assert all_pages[0].find_error([1], 4) is None
    assert isinstance(all_pages[0].find_error([1], 5), PeerLost)


def test_who_gave_up_is_an_echo_of_its_cause(all_pages):
    all_pages[1].stop(PeerTimeout("", 2))
    error = all_pages[0].find_error([1], 4)
    assert isinstance(error, GroupAborted)
    assert error.rank == 2


def test_of_several_who_are_late_the_one_behind_is_named(all_pages):
    for rank, number in enumerate((3, 3, 2)):
        begin(all_pages[rank], number)
    error = all_pages[0].timeout_error([1, 2], 4, "reduce of group 'x'", 0.5)
    assert isinstance(error, PeerTimeout)
    assert error.rank == 2  # rank 1 is in the third call already, and may wait for rank 2
    assert str(error).startswith("Ranks 1–2 of 3 did not come to reduce of group 'x' within 0.5 s")

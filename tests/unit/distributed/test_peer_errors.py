"""What ranks are told about each other, on boards of one region."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phalanx.distributed.board import GAVE_UP, LEFT, LOST, Board, Signature
from phalanx.distributed.peer_errors import look, out_of_time
from phalanx.distributed.signature import pack
from phalanx.errors import GroupAborted, PeerLost, PeerTimeout
from phalanx.ipc import Region

SIZE = 3


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    with Region.create(Board.needed_bytes(SIZE)) as region:
        boards = [Board(region, rank, range(SIZE), SIZE) for rank in range(SIZE)]
        yield boards
        for board in boards:
            board.close()


def begin(board: Board, number: int) -> None:
    board.sign(Signature(number, pack("all_reduce", torch.float32), 9))


def test_who_is_here_is_not_missed(boards):
    assert look(boards[0], [1, 2], 4) is None


def test_second_hand_news_name_the_dead_and_what_it_was_in(boards):
    for rank, number in enumerate((8, 8, 7)):
        begin(boards[rank], number)
    boards[1].stop(LOST, 2)
    error = look(boards[0], [1], 4, "all_reduce of group 'x'")
    assert isinstance(error, PeerLost)
    assert error.rank == 2
    assert str(error) == (
        "Rank 2 of 3 has died, as rank 1 has found during all_reduce of group 'x'. The last "
        "operation of each: rank 2: all_reduce #7 (SUM of 9 × float32); rank 0: all_reduce #8 (SUM "
        "of 9 × float32). Destroy the group and make a new one."
    )


def test_who_has_left_is_missed_until_the_mark_that_it_reached(boards):
    boards[1].post(4)
    boards[1].stop(LEFT, 1)
    assert look(boards[0], [1], 4) is None
    assert isinstance(look(boards[0], [1], 5), PeerLost)


def test_who_gave_up_is_an_echo_of_its_cause(boards):
    boards[1].stop(GAVE_UP, 2)
    error = look(boards[0], [1], 4)
    assert isinstance(error, GroupAborted)
    assert error.rank == 2


def test_of_several_who_are_late_the_one_behind_is_named(boards):
    for rank, number in enumerate((3, 3, 2)):
        begin(boards[rank], number)
    error = out_of_time(boards[0], [1, 2], 4, "reduce of group 'x'", 0.5)
    assert isinstance(error, PeerTimeout)
    assert error.rank == 2  # rank 1 is in the third call already, and may wait for rank 2
    assert str(error).startswith("Ranks 1–2 of 3 did not come to reduce of group 'x' within 0.5 s")


def test_who_came_after_all_is_not_late(boards):
    boards[1].post(4)
    assert out_of_time(boards[0], [1], 4, "reduce", 0.5) is None

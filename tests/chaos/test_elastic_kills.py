"""Ranks that survive are killed at random moments; all bits are those of one process."""

from __future__ import annotations

import random

import pytest

from tests.chaos.elastic_kills import kill_ranks

pytestmark = pytest.mark.promise("killed-ranks-cost-no-bit")


@pytest.mark.night  # each rank that is started again imports torch: seconds
def test_ranks_that_are_killed_and_started_again_come_to_the_bits_of_one_process() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    result = kill_ranks(3, seed)
    assert result.wrong == []
    assert result.moments.total() == 3

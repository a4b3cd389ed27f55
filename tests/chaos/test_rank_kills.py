"""Ranks of `phalanx` groups are killed at random moments; the survivors go on in new groups."""

from __future__ import annotations

import os
import random
import statistics

import pytest

from tests.chaos.rank_kills import PROMISED_S, kill_ranks


def check(kills: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    kill_ranks(1, seed)  # the first children of a run of tests start a server, which stays
    descriptors = len(os.listdir("/proc/self/fd"))
    result = kill_ranks(kills, seed)
    assert result.wrong == []
    assert result.kills == kills
    assert statistics.median(result.told_after_s) < PROMISED_S
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_survivors_of_a_kill_at_a_random_moment_are_told_and_go_on():
    check(15)


@pytest.mark.night
def test_survivors_of_many_kills_are_told_and_go_on():
    check(100)  # `make chaos` kills more

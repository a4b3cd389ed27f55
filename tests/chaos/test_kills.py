"""Workers, servers and ranks are killed at random moments, and frames mutated."""

from __future__ import annotations

import os
import random
import statistics

import pytest

from tests.chaos import elastic_kills, frames_fuzz, ledger, rank_kills, server_kills


@pytest.fixture
def seed() -> int:
    seed = random.randrange(2**32)
    print("seed", seed)
    return seed


@pytest.mark.promise("acknowledged-adds-are-kept")
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.night)])
def test_the_books_are_right_after_kills_of_workers(kills: int, seed: int) -> None:
    result = ledger.soak(kills, seed)
    print(result)
    assert sum(result.deaths.values()) == kills
    assert min(result.adds[book] for book in ledger.BOOKS) > kills
    assert result.undone > 0 or kills < 100  # few kills may all miss the midst of an add


@pytest.mark.promise("adds-between-hosts-are-kept")
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.night)])
def test_the_books_of_three_hosts_are_right_after_kills_of_servers(kills: int, seed: int) -> None:
    result = server_kills.soak(kills, seed)
    print(result)
    assert sum(result.kills.values()) == kills
    assert len(result.kills) == server_kills.HOSTS
    assert result.p50_s <= 1.0


@pytest.mark.promise("files-and-messages-hold-no-code")
@pytest.mark.parametrize("frames", [20_000, pytest.param(1_000_000, marks=pytest.mark.night)])
def test_mutated_frames_do_no_harm(frames: int, seed: int) -> None:
    result = frames_fuzz.fuzz(frames, seed)
    print(result)
    assert result.read + result.asked == frames
    assert 0 < result.taken < result.read
    assert result.adds > frames_fuzz.CLIENTS


@pytest.mark.parametrize("kills", [15, pytest.param(100, marks=pytest.mark.night)])
def test_ranks_that_survive_a_kill_are_told_and_go_on(kills: int, seed: int) -> None:
    rank_kills.kill_ranks(1, seed)  # the first children of a run start a server, which stays
    descriptors = len(os.listdir("/proc/self/fd"))
    result = rank_kills.kill_ranks(kills, seed)
    assert result.kills == kills
    assert statistics.median(result.told_after_s) < rank_kills.PROMISED_S
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.night  # each rank that is started again imports torch: seconds
@pytest.mark.promise("killed-ranks-cost-no-bit")
def test_elastic_ranks_that_are_killed_come_to_the_bits_of_one_process(seed: int) -> None:
    assert elastic_kills.kill_ranks(3, seed).moments.total() == 3

"""Workers and servers are killed, frames mutated: each acknowledged add is there once, whole."""

from __future__ import annotations

import random

import pytest

from tests.chaos import frames_fuzz, ledger, server_kills


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

"""A hundred thousand mutated frames: only our errors, only our sizes, and books that are right."""

from __future__ import annotations

import random

import pytest

from tests.chaos import frames_fuzz

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")

FRAMES = 100_000


def test_mutated_frames_do_no_harm() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    result = frames_fuzz.fuzz(FRAMES, seed)
    print(result)
    assert result.read + result.asked == FRAMES
    assert 0 < result.taken < result.read
    assert result.adds > frames_fuzz.CLIENTS

"""The small form of the soak: nothing grows with calls or groups."""

from __future__ import annotations

import pytest

from tests.chaos.collectives_soak import growths, weigh

pytestmark = pytest.mark.alone  # counts what anybody has in /dev/shm


@pytest.mark.parametrize(("deed", "times"), [("calls", 10_000), ("groups", 100)])
def test_nothing_grows(deed, times):
    assert growths(deed, weigh(deed, times)) == []


@pytest.mark.night
@pytest.mark.parametrize(("deed", "times"), [("calls", 1_000_000), ("groups", 10_000)])
def test_nothing_grows_in_the_long_run(deed, times):
    assert growths(deed, weigh(deed, times)) == []

"""A thread whose core was taken looks for others more briefly, for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.distributed import turns
from phalanx.distributed.turns import Turns


def test_a_turn_lost_counts_for_a_while_and_in_its_thread_alone(monkeypatch: pytest.MonkeyPatch):
    now, count, thread = 100.0, 7, 1
    monkeypatch.setattr(turns, "now_s", lambda: now)
    monkeypatch.setattr(turns.threading, "get_ident", lambda: thread)
    monkeypatch.setattr(turns.resource, "getrusage", lambda _: SimpleNamespace(ru_nivcsw=count))
    asked = Turns()
    assert not asked.lost_lately()  # what was before the first look does not count
    count = 8
    assert asked.lost_lately()
    now = 100.01
    assert asked.lost_lately()
    now = 100.03
    assert not asked.lost_lately()
    thread, count = 2, 50
    assert not asked.lost_lately()

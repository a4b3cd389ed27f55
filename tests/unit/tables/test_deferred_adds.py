"""Adds that nobody waits for: what goes together, how much is kept, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from phalanx.errors import PeerTimeout, StateError
from phalanx.plan import Staleness
from phalanx.tables import deferred_adds
from phalanx.tables.deferred_adds import DeferredAdds
from phalanx.tables.part import Entry
from phalanx.tables.router import Router

DEADLINE_S = 30.0


class Part:
    """A table's part on another host, which takes nothing until it is told to."""

    def __init__(self, name: str, messages: list) -> None:
        self.name = name
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.error_of: dict[int, Exception] = {}  # by the number of the first in a message
        self._messages = messages

    def add(self, entries, timeout_s):
        self._messages.append((self.name, [int(entry.delta[0, 0]) for entry in entries]))
        self.begun.set()
        assert self.may_end.wait(timeout_s)
        error = self.error_of.get(int(entries[0].delta[0, 0]), self.error)
        if error is not None:
            raise error


def entry(number: int, rows: torch.Tensor | None = None, cols: int = 2) -> Entry:
    count = 3 if rows is None else len(rows)
    return Entry(rows, torch.full((count, cols), float(number)), worker=1)


ONE = torch.tensor([4])


def put(adds: DeferredAdds, part: Part, each: Entry, timeout_s: float = DEADLINE_S) -> None:
    adds.wait_for_room(timeout_s)
    adds.put(part, each, timeout_s)


def begin(adds: DeferredAdds, part: Part, first: Entry) -> None:
    """Add, and return when that is under way."""
    put(adds, part, first)
    assert part.begun.wait(DEADLINE_S)


def test_an_add_waits_where_too_much_is_kept(monkeypatch):
    monkeypatch.setattr(deferred_adds, "_LATER_S", 0.0)
    monkeypatch.setattr(deferred_adds, "_KEPT_BYTES", 100)
    messages: list = []
    part, adds = Part("a", messages), DeferredAdds("Host 1 (server at x)")
    begin(adds, part, entry(0, ONE))
    put(adds, part, entry(1, ONE, cols=30))
    with pytest.raises(PeerTimeout, match=r"Host 1 \(server at x\) did not take 2 adds .* 0 s"):
        put(adds, part, entry(2, ONE), 0.0)
    part.may_end.set()
    put(adds, part, entry(3, ONE))
    adds.finish(DEADLINE_S)
    assert [number for _, numbers in messages for number in numbers] == [0, 1, 3]
    adds.close()


def test_an_error_drops_what_is_kept_and_is_told_once():
    messages: list = []
    part, adds = Part("a", messages), DeferredAdds("Host 1")
    begin(adds, part, entry(0, ONE))
    for number in (1, 2):
        put(adds, part, entry(number, ONE))
    part.error = StateError("refused")
    part.may_end.set()
    with pytest.raises(StateError, match="refused") as caught:
        adds.finish(DEADLINE_S)
    assert caught.value.__notes__[0].startswith("2 later adds of this worker to that host")
    assert len(caught.value.__notes__) == 1
    part.error = None
    adds.finish(DEADLINE_S)  # it was said
    put(adds, part, entry(3, ONE))
    adds.finish(DEADLINE_S)
    assert messages == [("a", [0]), ("a", [3])]
    adds.close()


def test_waiting_ends_though_others_go_on_adding(monkeypatch):
    messages: list = []
    a, b, adds = Part("a", messages), Part("b", messages), DeferredAdds("Host 1")
    begin(adds, a, entry(0, ONE))
    wait = adds._wait

    def wait_while_another_thread_adds(*args):
        adds.put(b, entry(1, ONE), DEADLINE_S)
        a.may_end.set()
        wait(*args)

    monkeypatch.setattr(adds, "_wait", wait_while_another_thread_adds)
    adds.finish(DEADLINE_S)  # the other thread's add is still kept, or under way
    b.may_end.set()
    adds.close()


def test_a_worker_comes_to_a_round_when_its_adds_to_other_tables_are_in():
    """Another worker that has come to the same get sees them, as it does behind a barrier."""
    order: list[str] = []

    def note(what: str) -> Callable:
        return lambda *_, **__: order.append(what) or SimpleNamespace(number=1)

    remote = SimpleNamespace(deferred=SimpleNamespace(finish=note("adds are in")))
    part = SimpleNamespace(
        remote=remote,
        begin_arrive=note("there"),
        wait=note("answered"),
        abandon=lambda pending: None,
    )
    here = SimpleNamespace(
        rounds=SimpleNamespace(arrive=note("here")),
        parts=[None],
        cut=SimpleNamespace(num_parts=2, own=range(1)),
        page=SimpleNamespace(unfinished=None),
    )
    Router(
        SimpleNamespace(has_keys=True, staleness=Staleness(0)), here, lambda worker: [part]
    ).arrive(0)
    assert order == ["adds are in", "here", "there", "answered"]

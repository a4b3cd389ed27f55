"""Adds that nobody waits for: what goes together, how much is kept, and how it ends."""

from __future__ import annotations

import threading

import pytest
import torch

from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import wait_until
from phalanx.tables import deferred_adds
from phalanx.tables.deferred_adds import MOST_TOGETHER, DeferredAdds
from phalanx.tables.shard import Entry

DEADLINE_S = 30.0


class Part:
    """A table's part on another host, which takes nothing until it is told to."""

    def __init__(self, name: str, messages: list) -> None:
        self.name = name
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._messages = messages

    def add_together(self, entries, timeout_s):
        self._messages.append((self.name, [int(entry.delta[0, 0]) for entry in entries]))
        self.begun.set()
        assert self.may_end.wait(timeout_s)
        if self.error is not None:
            raise self.error


def entry(number: int, rows: torch.Tensor | None = None, cols: int = 2) -> Entry:
    count = 3 if rows is None else len(rows)
    return Entry(rows, torch.full((count, cols), float(number)), worker=1)


ONE = torch.tensor([4])


def begin(adds: DeferredAdds, part: Part, first: Entry) -> None:
    """Add, and return when that is under way."""
    adds.put(part, first, DEADLINE_S)
    assert part.begun.wait(DEADLINE_S)


def test_what_comes_while_a_message_is_under_way_goes_together_table_by_table():
    messages: list = []
    a, b, adds = Part("a", messages), Part("b", messages), DeferredAdds("Host 1")
    begin(adds, a, entry(0, ONE))
    for number in range(1, 4):
        adds.put(a, entry(number, ONE), DEADLINE_S)
    adds.put(a, entry(4), DEADLINE_S)  # of all rows, which goes alone
    for number in range(5, 7):
        adds.put(b, entry(number, ONE), DEADLINE_S)
    adds.put(a, entry(7, ONE), DEADLINE_S)
    a.may_end.set()
    b.may_end.set()
    adds.finish(DEADLINE_S)
    assert messages == [("a", [0]), ("a", [1, 2, 3]), ("a", [4]), ("b", [5, 6]), ("a", [7])]
    adds.close()


def test_a_message_has_no_more_than_a_server_takes():
    messages: list = []
    part, adds = Part("a", messages), DeferredAdds("Host 1")
    begin(adds, part, entry(0, ONE))
    for number in range(MOST_TOGETHER + 1):
        adds.put(part, entry(number, ONE), DEADLINE_S)
    part.may_end.set()
    adds.finish(DEADLINE_S)
    assert [len(numbers) for _, numbers in messages] == [1, MOST_TOGETHER, 1]
    adds.close()


def test_an_add_waits_where_too_much_is_kept(monkeypatch):
    monkeypatch.setattr(deferred_adds, "_LATER_S", 0.0)
    monkeypatch.setattr(deferred_adds, "_KEPT_BYTES", 100)
    messages: list = []
    part, adds = Part("a", messages), DeferredAdds("Host 1 (server at x)")
    begin(adds, part, entry(0, ONE))
    adds.put(part, entry(1, ONE, cols=30), DEADLINE_S)
    with pytest.raises(PeerTimeout, match=r"Host 1 \(server at x\) did not take 2 adds .* 0 s"):
        adds.put(part, entry(2, ONE), 0.0)
    part.may_end.set()
    adds.put(part, entry(3, ONE), DEADLINE_S)
    adds.finish(DEADLINE_S)
    assert [number for _, numbers in messages for number in numbers] == [0, 1, 3]
    adds.close()


def test_an_error_drops_what_is_kept_and_is_told_once():
    messages: list = []
    part, adds = Part("a", messages), DeferredAdds("Host 1")
    begin(adds, part, entry(0, ONE))
    for number in (1, 2):
        adds.put(part, entry(number, ONE), DEADLINE_S)
    part.error = StateError("refused")
    part.may_end.set()
    with pytest.raises(StateError, match="refused") as caught:
        adds.finish(DEADLINE_S)
    assert caught.value.__notes__[0].startswith("2 later adds of this worker to that host")
    part.error = None
    adds.finish(DEADLINE_S)
    adds.put(part, entry(3, ONE), DEADLINE_S)
    adds.finish(DEADLINE_S)
    assert messages == [("a", [0]), ("a", [3])]
    adds.close()


def test_closing_drops_what_is_kept():
    messages: list = []
    part, adds = Part("a", messages), DeferredAdds("Host 1")
    begin(adds, part, entry(0, ONE))
    adds.put(part, entry(1, ONE), DEADLINE_S)
    closing = threading.Thread(target=adds.close)
    closing.start()
    assert wait_until(lambda: adds._closing, DEADLINE_S)
    part.may_end.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert messages == [("a", [0])]

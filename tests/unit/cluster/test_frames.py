"""Heads from the network: ours come back as they were, all others are dropped."""

from __future__ import annotations

import random

import pytest

from phalanx.cluster.frames import MAX_TEXT_BYTES, BadFrame, Caps, Head, Kind
from tests.unit.cluster.mutations import mutated

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")

HEAD = Head(
    Kind.REQUEST, 8, 3, 2, bytes(range(16)), 77, 5, (7, -1, 1 << 40, 0), 4096, "tables größe"
)


def test_a_head_comes_back_as_it_was():
    assert Head.decode(HEAD.encode(), Caps()) == HEAD
    assert len(HEAD.encode()) == 96 + len(HEAD.text.encode())


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "too short"),
        (HEAD.encode()[:95], "too short"),
        (HEAD.encode()[:-1], "text of another length"),
        (HEAD.encode() + b"\0", "text of another length"),
        (HEAD.encode()[:-1] + b"\xff", "a text that is none"),
        (b"HTTP" + HEAD.encode()[4:], "no head"),
        (HEAD.encode()[:4] + b"\2\0" + HEAD.encode()[6:], "version 2"),
        (HEAD._replace(payload_bytes=1 << 60).encode(), "more bytes"),
        (HEAD._replace(text="x" * (MAX_TEXT_BYTES + 1)).encode(), "more bytes"),
    ],
)
def test_what_is_no_head_of_ours_is_dropped(frame, why):
    with pytest.raises(BadFrame, match=why):
        Head.decode(frame, Caps())


def test_a_hundred_thousand_mutated_heads_are_heads_within_the_caps_or_dropped():
    chance, caps = random.Random(0), Caps(payload_bytes=1 << 20, in_flight_bytes=1 << 21)
    good = HEAD.encode()
    for _ in range(100_000):
        try:
            head = Head.decode(mutated(chance, good), caps)
        except BadFrame:
            continue
        assert head.payload_bytes <= caps.payload_bytes
        assert len(head.text) <= MAX_TEXT_BYTES

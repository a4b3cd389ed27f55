"""Heads from the network: ours come back as they were, all others are refused."""

from __future__ import annotations

import pytest

from phalanx.cluster.frames import MAX_TEXT_BYTES, BadFrame, Head, Kind, tag_of

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")

MOST = 1 << 20
TAG = tag_of("run", 1)
HEAD = Head(Kind.REQUEST, 8, 3, 2, 5, 30_000, (7, -1, 1 << 40, 0), 4096)
GOOD = HEAD.encode(TAG)


def test_a_head_comes_back_as_it_was():
    assert Head.decode(GOOD, TAG, MOST) == (HEAD, 0)
    named = HEAD._replace(text="tables größe")
    found, text_bytes = Head.decode(named.encode(TAG)[:80], TAG, MOST)
    assert (found, named.encode(TAG)[80:].decode()) == (HEAD, named.text)
    assert text_bytes == len(named.text.encode())


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "another length"),
        (GOOD[:79], "another length"),
        (b"HTTP" + GOOD[4:], "no head of this run"),
        (HEAD.encode(tag_of("run", 2)), "no head of this run"),
        (HEAD.encode(tag_of("another", 1)), "no head of this run"),
        (HEAD._replace(payload_bytes=MOST + 1).encode(TAG), "more bytes"),
        (HEAD._replace(text="x" * (MAX_TEXT_BYTES + 1)).encode(TAG)[:80], "more bytes"),
    ],
)
def test_other_bytes_are_refused(frame, why):
    with pytest.raises(BadFrame, match=why):
        Head.decode(frame, TAG, MOST)

"""Heads from the network: ours come back as they were, all others are refused."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.cluster.frames import (
    MAX_TEXT_BYTES,
    BadFrame,
    Kind,
    Message,
    described,
    empty_arrays,
    tag_of,
)

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")

MOST = 1 << 20
TAG = tag_of("run", 1)
ASKED = Message(Kind.REQUEST, 8, 3, 2, 5, 30_000, (7, -1, 1 << 40, 0))
GOOD = ASKED.encode(TAG)


def test_a_head_comes_back_as_it_was():
    assert Message.decode(GOOD, TAG) == (ASKED, 0, 0)
    named = ASKED._replace(text="tables größe", arrays=[np.zeros(3), np.zeros((2, 5))])
    frame = named.encode(TAG)
    assert Message.decode(frame[: len(GOOD)], TAG) == (ASKED, len(named.text.encode()), 2)
    made = empty_arrays(frame[len(GOOD) + len(named.text.encode()) :], MOST)
    assert [(a.shape, a.dtype) for a in made] == [((3,), np.float64), ((2, 5), np.float64)]


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "another length"),
        (GOOD[:-1], "another length"),
        (b"HTTP" + GOOD[4:], "no head of this run"),
        (ASKED.encode(tag_of("run", 2)), "no head of this run"),
        (ASKED.encode(tag_of("another", 1)), "no head of this run"),
        (ASKED._replace(text="x" * (MAX_TEXT_BYTES + 1)).encode(TAG)[: len(GOOD)], "more announ"),
        (ASKED._replace(arrays=[np.zeros(1)] * 17).encode(TAG)[: len(GOOD)], "more announced"),
    ],
)
def test_other_bytes_are_refused(frame, why):
    with pytest.raises(BadFrame, match=why):
        Message.decode(frame, TAG)


@pytest.mark.parametrize("shape", [(MOST,), (1 << 62, 1 << 62), (0, 1 << 62), (-1,)])
def test_an_array_that_is_too_large_is_not_made(shape):
    like = described(np.zeros((1,) * len(shape), np.int64))[:4]
    sizes = b"".join(size.to_bytes(8, "little", signed=True) for size in (*shape, 1)[:2])
    with pytest.raises(BadFrame):
        empty_arrays(like + sizes, MOST)

"""What a rank does with a store into which somebody else writes."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from phalanx.distributed.error_store import ErrorStore
from phalanx.errors import PeerError


@pytest.mark.parametrize("text", ["", "[]", '{"kind": 3}', '{"rank": "x", "text": []}'])
def test_an_error_that_no_rank_wrote_is_read_without_another(text):
    store = HashStore()
    store.set("error", text)
    told = ErrorStore(store, 0, 2).read()
    assert told is None or isinstance(told, PeerError)

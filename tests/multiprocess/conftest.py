"""A name for a run of tables, and a look at what it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a name of a run, and see that nothing of it is left afterwards."""
    name = f"k{os.getpid()}-{abs(hash(request.node.name)) % 10**9}"
    yield name
    assert not [entry for entry in os.listdir("/dev/shm") if name in entry]

"""What every file of the contracts gets unasked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import worlds


@pytest.fixture(scope="module", autouse=True)
def worlds_end() -> Iterator[None]:
    """End the processes that worlds have started for a file of tests."""
    yield
    worlds.close()

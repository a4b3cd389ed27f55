"""The package as data, read and parsed once for all rules."""

from __future__ import annotations

import pytest

from tests.meta.source import Module, read_house


@pytest.fixture(scope="session")
def house() -> list[Module]:
    return read_house()

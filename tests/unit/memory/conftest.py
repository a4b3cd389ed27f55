"""What was compiled is tested beside torch, which does its work where nothing was."""

from __future__ import annotations

import pytest

from phalanx.native import FUNCTIONS, is_compiled

NOT_COMPILED = "there was no C compiler when phalanx was installed"
WAYS = {"compiled": True, "torch": False}


@pytest.fixture
def needs_compiled() -> None:
    if not is_compiled():
        pytest.skip(NOT_COMPILED)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the test by compiled functions, and by torch's."""
    if not WAYS[request.param]:
        for name in list(FUNCTIONS):
            monkeypatch.delitem(FUNCTIONS, name)
    elif not is_compiled():
        pytest.skip(NOT_COMPILED)
    return WAYS[request.param]

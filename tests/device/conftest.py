"""The test device's own tests: they run with `--device dev`, which `make test` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(torch, "dev"):
        return
    here = config.rootpath / "tests" / "device"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="runs with --device dev"))


@pytest.fixture
def raises_race() -> Callable[[str], AbstractContextManager[None]]:
    """Return a context whose body must race, which is then forgotten."""

    @contextmanager
    def expect(match: str) -> Iterator[None]:
        with pytest.raises(RuntimeError, match=match):
            yield
        assert torch.dev.races()
        torch.dev.forget_races()

    return expect

"""The course that most chaos tests share: three workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.course import Course, differing


@pytest.fixture(scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    with Course(tmp_path_factory.mktemp("orders"), replicas=3) as running:
        running.warm_up()
        yield running


@pytest.fixture
def course(_running: Course, tmp_path: Path) -> Iterator[Course]:
    """Two trainings that are the same; what a test leaves different is put right after it."""
    yield _running
    if differing(_running.disturbed.everything(), _running.undisturbed.everything()):
        _running.start_over(tmp_path / "undisturbed")
    _running.orders.withdraw()

"""Tests that run twice: with all replicas on one device, and as on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.second_device import emulate_second_device

RUN_ON_TWO_DEVICES = {
    "test_containers",
    "test_containers_rules",
    "test_executor_group",
    "test_executor_group_rules",
    "test_mxnet",
    "test_stale_replicas",
    "test_torch7",
}
RUN_ON_TWO_DEVICES_BY_NIGHT = {
    "test_containers_attack",
    "test_containers_methods",
    "test_containers_seeds",
    "test_executor_group_attack",
    "test_executor_group_input",
    "test_executor_group_metrics",
    "test_executor_group_uses",
    "test_shared_module",
    "test_torch7_bugs",
    "test_torch7_flat",
}


@pytest.fixture(autouse=True)
def second_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Emulate a second device where the test asks for it."""
    if not getattr(request, "param", False):
        yield
        return
    with emulate_second_device():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in RUN_ON_TWO_DEVICES | RUN_ON_TWO_DEVICES_BY_NIGHT:
        marks = [pytest.mark.night] if name in RUN_ON_TWO_DEVICES_BY_NIGHT else []
        metafunc.parametrize(
            "second_device",
            [
                pytest.param(False, id="one_device"),
                pytest.param(True, id="two_devices", marks=marks),
            ],
            indirect=True,
        )

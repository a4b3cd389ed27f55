"""Tests that run twice, with all replicas on one device and as on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import worlds
from tests.conformance.second_device import emulate_second_device

# With a second device that is emulated these files run at night, but for tests that tell most for
# their time; `make test` has them on the test device, where the second device is one.
RUN_ON_TWO_DEVICES = {
    "test_all_gradients_arrive",
    "test_batches",
    "test_containers",
    "test_containers_attack",
    "test_containers_methods",
    "test_containers_rules",
    "test_containers_seeds",
    "test_executor_group",
    "test_executor_group_attack",
    "test_executor_group_input",
    "test_executor_group_metrics",
    "test_executor_group_rules",
    "test_executor_group_uses",
    "test_mxnet",
    "test_mxnet_metrics",
    "test_shared_module",
    "test_stale_replicas",
    "test_state_that_forward_changes",
    "test_torch7",
    "test_torch7_bugs",
    "test_torch7_flat",
    "test_torch7_subclasses",
}
BY_DAY = {
    "test_a_column_of_its_own_may_write_its_parameters",
    "test_a_container_merges_what_its_replicas_bring_to_the_module",
    "test_a_group_merges_what_its_replicas_bring_to_the_module",
    "test_a_parameter_met_in_both_places_gets_both_gradients",
    "test_a_trainer_splits_every_form_of_inputs",
}


@pytest.fixture(scope="module", autouse=True)
def worlds_end() -> Iterator[None]:
    """End the processes that worlds have started for a file of tests."""
    yield
    worlds.close()


@pytest.fixture(autouse=True)
def second_device(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Emulate a second device where the test asks for it, and tell whether it did."""
    if not getattr(request, "param", False):
        yield False
        return
    with emulate_second_device():
        yield True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if hasattr(torch, "dev"):
        return  # there the second device is one
    if name in RUN_ON_TWO_DEVICES:
        by_day = metafunc.function.__name__ in BY_DAY
        marks = [] if by_day else [pytest.mark.night]
        metafunc.parametrize(
            "second_device",
            [
                pytest.param(False, id="one_device"),
                pytest.param(True, id="two_devices", marks=marks),
            ],
            indirect=True,
        )

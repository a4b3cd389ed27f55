"""What torch keeps per thread is carried from the caller's thread into others, and stays there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from phalanx.replicas import CallerModes

CPU = torch.device("cpu")
DEADLINE_S = 30
T = TypeVar("T")


def in_another_thread(task: Callable[[], T]) -> T:
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(task())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(DEADLINE_S)
    if failed:
        raise failed[0]
    return found[0]


def modes() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


@contextlib.contextmanager
def autocast_inside_of_which_it_is_off() -> Any:
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        yield


ENTER: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast to half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", cache_enabled=False),
    "autocast switched off": autocast_inside_of_which_it_is_off,
}
EACH = pytest.mark.parametrize("enter", ENTER.values(), ids=ENTER.keys())


@EACH
def test_another_thread_enters_the_callers_modes_and_leaves_them(enter: Any) -> None:
    with enter():
        expected = modes()
        captured = CallerModes.capture([CPU])

    def work() -> tuple[Any, ...]:
        before = modes()
        with captured.entered(CPU):
            inside = modes()
        return before, inside, modes()

    before, inside, after = in_another_thread(work)
    assert inside[:4] == expected[:4]
    assert inside[4] is False  # the cache is one for all threads: see `entered`
    assert after == before


@EACH
def test_an_autocast_of_the_model_has_no_cache_either(enter: Any) -> None:
    with enter():
        captured = CallerModes.capture([CPU])
    with captured.entered(CPU), torch.autocast("cpu"):
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


@EACH
@pytest.mark.parametrize("outside", ["nothing", "no_grad", "enable_grad", "autocast"])
def test_they_come_in_the_place_of_the_threads_own_and_give_them_back(
    enter: Any, outside: str
) -> None:
    """A thread may serve a caller in one mode while it stands in another itself."""
    with enter():
        expected = modes()[:2]
        captured = CallerModes.capture([CPU])
    with ENTER[outside]():
        before = modes()
        with captured.entered(CPU):
            assert modes()[:2] == expected
        assert modes() == before


def test_computing_under_them_gives_what_the_caller_would_get() -> None:
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2)

    def compute() -> torch.Tensor:
        return x @ weight

    for enter in ENTER.values():
        with enter():
            expected = compute()
            captured = CallerModes.capture([CPU])

        def work(captured: CallerModes = captured) -> torch.Tensor:
            with captured.entered(CPU):
                return compute()

        found = in_another_thread(work)
        assert found.dtype == expected.dtype
        assert found.requires_grad == expected.requires_grad
        assert found.is_inference() == expected.is_inference()


@pytest.mark.gpu
def test_another_thread_works_on_the_callers_device_and_streams(gpu: torch.device) -> None:
    last = torch.accelerator.device_count() - 1
    device = torch.device(gpu.type, last)
    with torch.accelerator.device_index(last), torch.Stream(device) as stream:
        captured = CallerModes.capture([device])

    def work() -> tuple[object, ...]:
        with captured.entered(device):
            return torch.accelerator.current_device_index(), torch.accelerator.current_stream(last)

    assert in_another_thread(work) == (last, stream)
    assert torch.accelerator.current_stream(last) != stream

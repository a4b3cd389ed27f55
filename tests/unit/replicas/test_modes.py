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

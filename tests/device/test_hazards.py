"""What goes wrong on an accelerator shows on the test device: each hazard, beside the right way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

FIRST, LAST = "dev:0", "dev:1"
RaisesRace = Callable[[str], AbstractContextManager[None]]


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream(FIRST)


def here() -> torch.Stream:
    return torch.dev.current_stream(FIRST)


@pytest.fixture(autouse=True)
def doubles() -> None:
    torch.set_default_dtype(torch.float64)


def test_a_stream_must_wait_for_what_it_reads(side: torch.Stream, raises_race: RaisesRace) -> None:
    x = torch.ones(3, device=FIRST)
    with side, raises_race("reads memory that stream 0 of dev:0 has written"):
        x * 2
    side.wait_stream(here())
    with side:
        y = x * 2
    with raises_race("reads memory that stream .* has written"):
        y.sum()
    here().wait_stream(side)
    assert y.sum().item() == 6


def test_a_stream_must_wait_for_who_still_reads(
    side: torch.Stream, raises_race: RaisesRace
) -> None:
    x = torch.ones(3, device=FIRST)
    side.wait_stream(here())
    with side:
        y = x * 2
    with raises_race("writes memory that stream .* reads"):
        x.zero_()
    here().wait_stream(side)
    x.zero_()
    assert y.tolist() == [2, 2, 2]


def test_an_event_tells_of_what_came_before_it_only(
    side: torch.Stream, raises_race: RaisesRace
) -> None:
    with side:
        x = torch.ones(3, device=FIRST)
        event = side.record_event()
        y = torch.ones(3, device=FIRST)
    here().wait_event(event)
    x * 2
    with raises_race("has not waited"):
        y * 2


def test_memory_of_a_tensor_that_another_stream_still_uses(
    side: torch.Stream, raises_race: RaisesRace
) -> None:
    def use(recorded: bool) -> Tensor:
        x = torch.ones(77, device=FIRST)
        side.wait_stream(here())
        with side:
            x * 2
        if recorded:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        again = torch.empty(77, device=FIRST)
        assert (again.data_ptr() == address) != recorded
        return again

    use(recorded=True).zero_()
    torch.dev.synchronize(0)
    again = use(recorded=False)
    with raises_race("`record_stream` is missing"):
        again.zero_()


def test_the_host_sees_a_late_copy_when_it_has_waited() -> None:
    x = torch.full((3,), 7.0, device=FIRST)
    found = x.to("cpu", non_blocking=True)
    assert found.isnan().all()
    torch.dev.synchronize(FIRST)
    assert found.tolist() == [7, 7, 7]
    assert torch.empty(3, pin_memory=True).copy_(x).tolist() == [7, 7, 7]


def test_pinned_memory_must_stay_while_it_is_copied(raises_race: RaisesRace) -> None:
    pinned = torch.ones(3).pin_memory()
    x = pinned.to(FIRST, non_blocking=True)
    pinned.zero_()
    with raises_race("changed pinned memory"):
        x.tolist()
    x = pinned.to(FIRST, non_blocking=True)
    assert x.tolist() == [0, 0, 0]
    pinned.fill_(2)
    assert x.tolist() == [0, 0, 0]


def test_a_custom_kernel_goes_to_the_current_device() -> None:
    x = torch.ones(3, device=LAST)
    with pytest.raises(RuntimeError, match=r"A kernel on dev:0 got the address .* of dev:1"):
        torch.dev.scale_at(x.data_ptr(), x.numel(), 3.0)
    with torch.dev.device(LAST):
        torch.dev.scale_at(x.data_ptr(), x.numel(), 3.0)
    assert x.tolist() == [3, 3, 3]


def test_a_thread_does_not_inherit_the_current_device() -> None:
    found = []
    with torch.dev.device(LAST):
        thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="dev")))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device="dev") + found[0]

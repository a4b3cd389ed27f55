"""What goes wrong on an accelerator shows on the test device: each hazard, beside the right way."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

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


def test_streams_may_use_parts_of_one_tensor(side: torch.Stream, raises_race: RaisesRace) -> None:
    flat = torch.zeros(6, device=FIRST)
    side.wait_stream(here())
    with side:
        flat[:3].add_(1)
    flat[3:].add_(2)
    with raises_race("has written"):
        flat[2:4].add_(1)


def test_two_devices_wait_for_each_other_in_a_copy(raises_race: RaisesRace) -> None:
    side = torch.Stream(LAST)
    with side:
        x = torch.ones(3, device=LAST)
    with raises_race("has not waited"):
        x.to(FIRST)
    with side:
        y = x.to(FIRST)
    assert (y + 1).tolist() == [2, 2, 2]


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


def test_a_stream_and_an_event_are_late(side: torch.Stream) -> None:
    start, event = (torch.Event("dev", enable_timing=True) for _ in range(2))
    with side:
        start.record()
        torch.ones(3, device=FIRST)
        event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert side.query()
    with side:
        torch.ones(3, device=FIRST)
    assert not side.query()
    assert side.query()  # who asks again and again is not kept waiting for ever
    assert start.elapsed_time(event) >= 0


def test_events_tell_the_time_that_a_stream_takes(side: torch.Stream) -> None:
    def elapsed_ms(taken_by: torch.Stream) -> float:
        start, stop = (torch.Event("dev", enable_timing=True) for _ in range(2))
        start.record(here())
        with taken_by:
            torch.dev.take_time(3.0)
        stop.record(here())
        stop.synchronize()
        return start.elapsed_time(stop)

    assert elapsed_ms(here()) >= 3000 > elapsed_ms(side)
    assert elapsed_ms(torch.Stream(LAST)) < 3000


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


def test_late_copies_through_one_pinned_buffer_keep_their_order() -> None:
    buffer = torch.empty(3).pin_memory()
    first, last = torch.ones(3, device=FIRST), torch.empty(3, device=FIRST)
    for factor in (2, 3):
        buffer.copy_(first * factor, non_blocking=True)
        last.copy_(buffer, non_blocking=True)
    assert last.tolist() == [3, 3, 3]
    assert buffer.tolist() == [3, 3, 3]


class Replica:
    """A copy on another device, brought up to date where the source's version has changed."""

    def __init__(self, source: nn.Parameter) -> None:
        self.source, self.copy, self.version = source, source.detach().to(LAST), source._version

    def pull(self) -> Tensor:
        if self.source._version != self.version:
            self.copy, self.version = self.source.detach().to(LAST), self.source._version
        return self.copy


@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_a_replica_that_goes_by_versions_is_stale_after_a_fused_step(way: str) -> None:
    source = nn.Parameter(torch.ones(3, device=FIRST))
    replica = Replica(source)
    source.grad = torch.ones_like(source)
    torch.optim.SGD([source], lr=0.5, **{way: True}).step()
    stale = replica.pull().tolist() != source.tolist()
    assert stale == (way == "fused")


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


def test_a_kernel_does_not_take_an_address_of_the_host() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="of the host"):
        torch.dev.scale_at(x.data_ptr(), x.numel(), 3.0)
    assert x.tolist() == [1, 1, 1]


def test_the_host_cannot_read_at_a_devices_address() -> None:
    script = (
        "import ctypes, sys, torch; from tests.device import accelerator; accelerator.register(); "
        "here, there = torch.ones(3), torch.ones(3, device='dev:0'); "
        "print(ctypes.string_at(here.data_ptr(), 4), flush=True); "
        "print(ctypes.string_at(there.data_ptr(), 4), flush=True)"
    )
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {script}"],
        capture_output=True,
        timeout=120,
    )
    assert found.stdout.count(b"\n") == 1
    assert found.returncode == -signal.SIGSEGV


def test_a_gradient_that_is_added_twice_shows() -> None:
    """A parameter on one device, used on two: each use's gradient arrives, and arrives once."""
    source = torch.ones(3, device=FIRST, requires_grad=True)
    loss = (source * 2).sum() + (source.to(LAST) * 3).sum().to(FIRST)
    loss.backward(retain_graph=True)
    assert source.grad.tolist() == [5, 5, 5]
    loss.backward()
    assert source.grad.tolist() == [10, 10, 10]

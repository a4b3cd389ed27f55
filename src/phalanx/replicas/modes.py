"""The modes that torch keeps for each thread, streams of accelerators, and threads in operators."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class CallerModes(NamedTuple):
    """Modes of the calling thread, entered by each replica's thread.

    A replica's thread works on the caller's own current stream of every accelerator, so that
    everything before and after the call is in order with it without any event.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    streams: tuple[torch.Stream, ...]

    @staticmethod
    def capture(devices: Sequence[torch.device]) -> CallerModes:
        """Read the modes of the calling thread for the given devices."""
        kinds = _kinds_of(tuple(devices))
        return CallerModes(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.is_autocast_enabled(kind)
            ),
            streams=() if kinds == ["cpu"] else callers_streams(devices),
        )

    @contextlib.contextmanager
    def on_streams(self) -> Iterator[None]:
        """Run a node's backward pass on the caller's streams, and put back those of this thread.

        In torch's thread for backward passes, the caller's stream is current on the node's device
        only. What the node is given is ready there, and so must be what it returns.
        """
        if not self.streams:
            yield
            return
        own = torch.accelerator.current_stream()
        ready = own.record_event()
        for stream in self.streams:
            stream.wait_event(ready)
        try:
            with current_streams(self.streams):
                yield
        finally:
            for stream in self.streams:
                own.wait_event(stream.record_event())


@dataclass
class entered_modes:
    """Run the body under a caller's modes, with ``device`` as the thread's current one.

    All threads share torch's cache of cast weights: a thread that leaves autocast clears it for the
    others, and the bits of a layer used twice depend on that. So the cache is off, also for an
    autocast inside of the model.
    """

    modes: CallerModes
    device: torch.device

    def __enter__(self) -> None:
        modes = self.modes
        self._before = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
        torch.set_autocast_cache_enabled(False)
        # A stack takes as long as all the rest.
        is_plain = not (modes.streams or modes.inference or modes.autocast)
        self._others = None if is_plain else contextlib.ExitStack()
        if self._others is not None:
            if modes.streams:
                self._others.enter_context(current_streams(modes.streams, self.device))
            if modes.inference:
                self._others.enter_context(torch.inference_mode())
            for kind, dtype in modes.autocast:
                self._others.enter_context(torch.autocast(kind, dtype=dtype))
        torch.set_grad_enabled(modes.grad)

    def __exit__(self, *error: Any) -> None:  # Any: its class, itself and its traceback, or None
        if self._others is not None:
            self._others.__exit__(*error)
        cached, grad = self._before
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cached)


def autocast_off(devices: Sequence[torch.device]) -> contextlib.ExitStack:
    """Turn autocast off for the given devices, as a thread of a replica begins, until the exit.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), autocast_off([torch.device("cpu")]):
        ...     torch.is_autocast_enabled("cpu")
        False
    """
    stack = contextlib.ExitStack()
    for kind in filter(torch.is_autocast_enabled, _kinds_of(tuple(devices))):
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def callers_streams(devices: Sequence[torch.device]) -> tuple[torch.Stream, ...]:
    """Return the calling thread's stream of each accelerator, if one of the devices is one.

    Example:
        >>> callers_streams([torch.device("cpu")])
        ()
    """
    if {"cpu", "meta"}.issuperset(_kinds_of(tuple(devices))):
        return ()
    count = torch.accelerator.device_count()
    return tuple(torch.accelerator.current_stream(index) for index in range(count))


@functools.cache
def _kinds_of(devices: tuple[torch.device, ...]) -> list[str]:
    return sorted({device.type for device in devices})


@contextlib.contextmanager
def current_streams(
    streams: Iterable[torch.Stream], device: torch.device | None = None
) -> Iterator[None]:
    """Make streams the current ones of their devices in the body, and ``device`` the current one.

    Args:
        device: One without an index, such as the CPU, or None keeps the current one.
    """
    index = torch.accelerator.current_device_index()
    streams = list(streams)
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    own = index if device is None or device.index is None else device.index
    try:
        _set_streams(streams, own)
        yield
    finally:
        _set_streams(before, index)


def _set_streams(streams: Sequence[torch.Stream], index: int) -> None:
    for stream in streams:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(index)  # the streams have made theirs the current ones


# -- threads inside operators ----------------------------------------
#
# With OpenMP their number belongs to the calling thread; the last number set anywhere is also what
# threads born later start with. And a pool that has just worked spins for a while before it sleeps:
# beside replica threads a caller's spinning pool cost a factor of 1.8.


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def set_intra_op(count: int) -> None:
    """Set the number of threads inside operators that the calling thread runs."""
    torch.get_num_threads()  # else a new thread's first operator takes the last number set
    torch.set_num_threads(count)


class _Holders:
    """The containers that keep the caller's operators on one thread; the last to leave restores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = 1

    def enter(self) -> None:
        with self._lock:
            if self._count == 0:
                self._before = torch.get_num_threads()
                set_intra_op(1)
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                set_intra_op(self._before)


_holders = _Holders()  # one for the process, as the number of threads is


def hold_caller_at_one_thread(owner: object) -> Callable[[], object]:
    """Keep the caller's operators on one thread until the returned function is called.

    Or until ``owner`` is collected. When several hold, the number comes back with the last.
    """
    _holders.enter()
    return weakref.finalize(owner, _holders.leave)


@dataclass
class caller_intra_op:
    """Run the body with ``count`` threads inside the caller's operators, then restore it."""

    count: int
    _before: int = 0

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._before != self.count:
            torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)

"""The streams of accelerators that replicas work on, the caller's, and the order of callers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

__all__ = [
    "RunOrder",
    "current_streams",
    "has_streams",
]

_IN_ORDER = ("cpu", "meta", "mps")  # what works on one queue, or on none


def has_streams(device: torch.device) -> bool:
    """Tell whether a device may have several streams.

    Example:
        >>> has_streams(torch.device("cpu")), has_streams(torch.device("cuda", 0))
        (False, True)
    """
    return device.type not in _IN_ORDER


class RunOrder:
    """One run after another, whichever threads and streams their callers have.

    What a run leaves for the next, such as copies of parameters and buffers, is made on its
    caller's streams, of which another caller knows nothing.

    Args:
        devices: Where something is left.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = frozenset(filter(has_streams, devices))
        self._lock = threading.RLock()
        self._done: list[torch.Event] = []

    @contextlib.contextmanager
    def next_run(self, callers: Sequence[torch.Stream]) -> Iterator[None]:
        """Do the body when no other does, on streams that wait for the one before.

        Args:
            callers: The caller's current streams, one on each device, in order.
        """
        own = [stream for stream in callers if stream.device in self._devices]
        with self._lock:
            for stream, event in zip(own, self._done, strict=False):  # there is none at first
                stream.wait_event(event)
            try:
                yield
            finally:
                self._done = [stream.record_event() for stream in own]


@contextlib.contextmanager
def current_streams(
    streams: Iterable[torch.Stream], device: torch.device | None = None
) -> Iterator[None]:
    """Make streams the current ones of their devices in the body, and ``device`` the current one.

    Args:
        device: One without an index, such as the CPU, or None leaves the current one as it is.
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

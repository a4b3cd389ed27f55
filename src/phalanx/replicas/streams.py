"""The streams of replicas on accelerators, and their order with the caller's.

    caller      ──┬────────────────────────────────────────────┬──►
    replica 0     ├─ microbatch 0 ─┬─ microbatch 2 ─┬──────────┤
    replica 1     ├─ microbatch 1 ─┼─────┬──────────┼──────────┤
    sums          └────────────────┴─ ─ ─┴ copy, add ┴ copy, add ┘

Each replica works on streams of its own, so that two on one device work side by side. What it
leaves of a microbatch is copied to the source's device and added on a third stream, while the
replica goes on. All of them wait for the caller's streams first, and the caller's for them last.

A tensor's memory goes back to the stream that it was made on. Where another one uses it, that is
recorded (`record_use`): the memory waits for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "ReplicaStreams",
    "RunOrder",
    "RunStreams",
    "current_streams",
    "has_streams",
    "pieces_of",
    "record_use",
]

_IN_ORDER = ("cpu", "meta", "mps")  # what works on one queue, or on none
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def has_streams(device: torch.device) -> bool:
    """Tell whether a device may have several streams.

    Example:
        >>> has_streams(torch.device("cpu")), has_streams(torch.device("cuda", 0))
        (False, True)
    """
    return device.type not in _IN_ORDER


class ReplicaStreams:
    """Streams for several replicas of one executor, each on its device and on the source's.

    Args:
        devices: The replicas'.
        homes: Where the parameters and buffers of their sources lie.
    """

    def __init__(self, devices: Sequence[torch.device], homes: Iterable[torch.device]) -> None:
        own_homes = list(dict.fromkeys(filter(has_streams, homes)))
        self._own = [
            [
                torch.Stream(each)
                for each in dict.fromkeys([device, *own_homes])
                if has_streams(each)
            ]
            for device in devices
        ]
        everywhere = dict.fromkeys([*filter(has_streams, devices), *own_homes])
        self._sums = [torch.Stream(each) for each in everywhere]

    def open(self, callers: Sequence[torch.Stream]) -> RunStreams:
        """Return the streams of a run whose caller has these current, one on each device."""
        return RunStreams(self._own, self._sums, callers)


class RunStreams:
    """The streams of one run; to be made in the caller's thread, when all before it is launched."""

    def __init__(
        self,
        own: Sequence[Sequence[torch.Stream]],
        sums: Sequence[torch.Stream],
        callers: Sequence[torch.Stream],
    ) -> None:
        self._own = own
        self._sums = {stream.device: stream for stream in sums}
        self._callers = {stream.device: stream for stream in callers}
        # Now, and not when a replica begins: another one's work may be in the way by then.
        self._ready = {device: self._callers[device].record_event() for device in self._sums}

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Let the caller's streams wait, after the body, for all that was launched in it."""
        for device, stream in self._sums.items():
            stream.wait_event(self._ready[device])
        try:
            yield
        finally:
            for stream in (*self._sums.values(), *(each for own in self._own for each in own)):
                self._callers[stream.device].wait_event(stream.record_event())

    @contextlib.contextmanager
    def of_replica(self, index: int) -> Iterator[None]:
        """Run the body, in the replica's thread, on its streams."""
        for stream in self._own[index]:
            stream.wait_event(self._ready[stream.device])
        with current_streams(self._own[index]):
            yield

    @contextlib.contextmanager
    def of_sums(self, index: int) -> Iterator[None]:
        """Run the body on the streams of the sums, after what this replica has launched."""
        for stream in self._own[index]:
            self._sums[stream.device].wait_event(stream.record_event())
        with current_streams(self._sums.values()):
            yield


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


def record_use(tensor: Tensor) -> None:
    """Keep a tensor's memory from others until the current stream has done its present work."""
    if has_streams(tensor.device):
        stream = torch.accelerator.current_stream(tensor.device)
        for piece in pieces_of(tensor):
            piece.record_stream(stream)


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """Return what holds a tensor's memory: a sparse or nested one has several pieces."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _BY_ROW:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMN:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is torch.jagged:
        return [tensor.values()]
    return [tensor]

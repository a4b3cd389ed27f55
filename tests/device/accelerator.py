"""The module that torch knows as `torch.dev`, as `torch.cuda` is the one of CUDA's devices.

`register()` makes torch know the test device. One process can do so once, and cannot undo it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.device import build

__all__ = ["register"]

Stream = torch.Stream
Event = torch.Event
default_generators: tuple[torch.Generator, ...] = ()


def register() -> None:
    """Make torch know the device "dev", with as many devices as TEST_DEVICES says (2)."""
    if hasattr(torch, "dev"):
        return
    build.load()
    torch.utils.rename_privateuse1_backend("dev")
    torch._register_device_module("dev", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    global default_generators
    indices = range(device_count())
    default_generators = tuple(torch.ops.dev.default_generator(index) for index in indices)


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return bool(torch.ops.dev.is_forked())


def device_count() -> int:
    return int(torch.ops.dev.num_devices())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(device)


class device(torch.accelerator.device_index):
    """Make a device the current one, as `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        super().__init__(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(device)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def default_stream(device: Any = None) -> torch.Stream:
    """Return the stream that is current in a new thread."""
    index = _index(device)
    kind = current_stream(index).device_type
    return torch.Stream(stream_id=0, device_index=index, device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one."""
    if stream is None:
        yield
        return
    with stream:
        yield


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for each in default_generators:
        each.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    default_generators[_index(device)].set_state(state)


def copies(source: str, target: str) -> tuple[int, int]:
    """Return how many copies have gone from a device to another so far, and their bytes."""
    ends = (-1 if name == "cpu" else _index(name) for name in (source, target))
    number, num_bytes = torch.ops.dev.copies(*ends)
    return number, num_bytes


def kernels(device: Any = None) -> int:
    """Return how many kernels and copies have been launched on a device so far."""
    return int(torch.ops.dev.kernels(_index(device)))


def races() -> list[str]:
    """Return what has relied on work that it had not waited for, so far."""
    return list(torch.ops.dev.races())


def forget_races() -> None:
    """Forget the races so far: a test has planted them."""
    torch.ops.dev.forget_races()


def scale_at(address: int, number: int, factor: float) -> None:
    """Scale doubles with a kernel of a user's own: it goes to the current device and stream."""
    torch.ops.dev.scale_at(address, number, factor)


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index

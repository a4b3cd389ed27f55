"""Which devices a user's word stands for."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch

from phalanx.errors import ConfigError
from phalanx.types import Device


def resolve_devices(
    devices: Sequence[Device] | int | None, home: torch.device, *, name: str = "devices"
) -> tuple[torch.device, ...]:
    """Return one device per replica.

    Args:
        devices: Names or devices, a number of replicas on ``home``, or None for one replica for
            every device of the kind of ``home`` (two on a CPU).
        home: Where the module's parameters lie.
        name: What the user calls ``devices``, for errors.

    Raises:
        ConfigError: There is no device, one is unknown, or one does not exist here.
    """
    if devices is None and home.type == "cpu":
        return (home, home)
    if devices is None:
        return tuple(torch.device(home.type, i) for i in range(num_devices(home.type)))
    if isinstance(devices, Integral) and not isinstance(devices, bool):
        if devices < 1:
            raise ConfigError(f"`{name}` must be at least 1, but is {devices!r}.")
        return (home,) * int(devices)
    if not isinstance(devices, (list, tuple)) or not devices:
        raise ConfigError(
            f"`{name}` must be a number of replicas, or a list with a device for each, but is "
            f"{devices!r}. Give 2, or ['cpu', 'cpu']."
        )
    return tuple(resolve_device(device, name) for device in devices)


def known_devices() -> tuple[torch.device, ...]:
    """Return all accelerators of this machine, or its CPU where it has none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return (torch.device("cpu"),)
    return tuple(torch.device(kind.type, i) for i in range(torch.accelerator.device_count()))


def num_devices(kind: str) -> int:
    """Return how many devices of an accelerator's kind, such as "cuda", this machine has."""
    count = getattr(getattr(torch, kind, None), "device_count", None)
    return 0 if count is None else int(count())


def resolve_device(device: Device, name: str = "devices") -> torch.device:
    """Return the device that ``device`` names, with its index; errors speak of ``name``.

    Raises:
        ConfigError: It is unknown, or does not exist here.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"`{name}` must hold names such as 'cpu' or 'cuda:0', but holds {device!r}."
        ) from error
    if found.type == "cpu":
        return torch.device("cpu")
    count, index = num_devices(found.type), found.index or 0
    if not 0 <= index < count:
        way_out = f"Give '{found.type}:{count - 1}' or a lower one." if count else "Give 'cpu'."
        raise ConfigError(
            f"`{name}` must exist on this machine, but {str(device)!r} does not: it has {count} "
            f"device(s) of kind {found.type!r}. {way_out}"
        )
    return torch.device(found.type, index)

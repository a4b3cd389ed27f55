"""Names, devices and limits of a group, for which ``torch.distributed`` asks.

torch asks a group for its backend and asks the backend the same things. This group has no other
backend behind it, so it answers as its own.
"""

# torch's stubs do not know the constructor for groups written in Python.
# mypy: disable-error-code="override, assignment, call-arg"

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch.distributed import Store

from phalanx.distributed.uncompiled_methods import uncompiled_methods

__all__ = ["NAME", "DescribedGroup"]

NAME = "phalanx"

_CPU = torch.device("cpu")


@uncompiled_methods
class DescribedGroup(dist.ProcessGroup):
    """A group that can be asked what it is."""

    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, rank: int, size: int, store: Store, timeout_s: float) -> None:
        super().__init__(rank, size)
        self._store = store
        self._timeout_s = timeout_s
        self._group_name = "default"

    @property
    def device_types(self) -> frozenset[str]:
        """The kinds of devices whose tensors this group takes."""
        return frozenset(each.type for each in self._device_types)

    # The next three have the names by which torch's Python asks; it has no public ones.

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> dist.ProcessGroup:
        """Return this group for a device that it serves, as torch asks for a group's backend."""
        if torch.device(device).type not in self.device_types:
            raise RuntimeError(
                f"Group {self._group_name!r} has no backend for {torch.device(device).type}; it "
                f"serves {', '.join(sorted(self.device_types))}."
            )
        return self

    def _has_hooks(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tell that this group hands out no memory."""
        del device
        return False

    def getBackendName(self) -> str:
        """Return ``phalanx``."""
        return NAME

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Take a name."""
        self._group_name = name

    def setTimeout(self, timeout: datetime.timedelta) -> None:
        """Let operations take so long from now on."""
        self._timeout_s = timeout.total_seconds()

    set_timeout = setTimeout
    _set_default_timeout = setTimeout

"""Groups whose CUDA tensors go to NCCL; made only on hosts that have both.

torch keeps one group where a backend's maker returns one written in Python, and forgets what is
named beside it (decision 0012). So on such hosts ours holds the other, an ordinary group of
torch's own, and each call goes by the device of its tensors:

    on CUDA ──> NCCL, opened by the first such call
    else    ──> this group (which refuses what is not on the CPU)
"""

# As in process_group.py: torch's stubs know overloads of each call by type.
# mypy: disable-error-code="override"

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from phalanx.distributed.process_group import SharedGroup
from phalanx.distributed.work import public_methods, uncompiled_methods
from phalanx.errors import UnsupportedError

__all__ = ["CudaGroup", "nccl_is_here"]


def nccl_is_here() -> bool:
    """Tell whether this torch has NCCL, and this host a GPU."""
    return dist.is_nccl_available() and torch.cuda.is_available()


class CudaGroup(SharedGroup):
    """A :class:`SharedGroup` that hands calls with CUDA tensors to a group over NCCL."""

    _device_type = "cuda"
    _inner: dist.ProcessGroup | None = None
    _opening = threading.Lock()

    def _inner_for(self, device_types: set[str]) -> dist.ProcessGroup | None:
        """Return whose call it is: the inner group's, or None for this one's."""
        if self._device_type not in device_types:
            return None
        if len(device_types) > 1:
            raise UnsupportedError(
                "The tensors of a call must be on one kind of device, but are on "
                f"{' and '.join(sorted(device_types))}. Call once for each."
            )
        with self._opening:  # threads may bring their first CUDA tensors at the same time
            if self._inner is None:
                timeout = datetime.timedelta(seconds=self._timeout_s)
                store = PrefixStore(f"{self._device_type}/", self._store)
                self._inner = self._open(store, timeout)
                self._inner._set_group_name(self.getGroupName())  # type: ignore[arg-type]
            return self._inner

    def _open(self, store: Store, timeout: datetime.timedelta) -> dist.ProcessGroup:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)
        nccl._set_sequence_number_for_group()
        group = dist.ProcessGroup(store, self.rank(), self.size())
        kind = dist.ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(torch.device(self._device_type), kind, nccl)
        return group

    @property
    def _device_types(self) -> list[torch.device]:
        return [*super()._device_types, torch.device(self._device_type)]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for a device, as torch asks where a ``device_id`` is given."""
        inner = self._inner_for({torch.device(device).type})
        return super()._get_backend(device) if inner is None else inner._get_backend(device)

    def setTimeout(self, timeout: datetime.timedelta) -> None:
        """Let operations take so long from now on."""
        super().setTimeout(timeout)
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    set_timeout = setTimeout

    def shutdown(self) -> None:
        """Leave both groups."""
        self._leave("shutdown")

    def abort(self) -> None:
        """Leave both groups; what is under way on a GPU fails."""
        self._leave("abort")

    def _leave(self, how: str) -> None:
        inner, self._inner = self._inner, None
        try:
            if inner is not None and not self._lane.is_forked:
                getattr(inner, how)()
        finally:
            super().shutdown()


# Any: a call takes whatever torch gives it.
def _devices_of(given: Any) -> set[str]:
    """Return the kinds of devices of all tensors, and options of a barrier, in nested lists."""
    device = getattr(given, "device", None)
    if isinstance(device, torch.device):
        return {device.type}
    return set().union(*map(_devices_of, given)) if isinstance(given, list | tuple) else set()


def _by_device(name: str) -> Callable[..., Any]:
    def call(self: CudaGroup, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner_for(_devices_of((*args, *kwargs.values())))
        return getattr(super(CudaGroup, self) if inner is None else inner, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = getattr(SharedGroup, name).__doc__
    return call


_WITHOUT_TENSORS = {"abort", "shutdown", "supports_tensor_alloc"}
_WITHOUT_TENSORS |= {"getBackendName", "getGroupName", "setGroupName", "setTimeout", "set_timeout"}
CALLS = [name for name in public_methods(SharedGroup) if name not in _WITHOUT_TENSORS]

for _name in CALLS:
    setattr(CudaGroup, _name, _by_device(_name))
uncompiled_methods(CudaGroup)

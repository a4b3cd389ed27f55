"""A second device where there is one: replicas behind the first hold copies of the parameters.

On the source's own device a replica's parameters lie in the source's memory. On another they are
copies, which are refreshed in every run. Here they are copies on the same device,
so that every machine can run the tests of containers and executor groups with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.replicas import device_copies, replica

__all__ = ["emulate_second_device"]


@contextmanager
def emulate_second_device() -> Iterator[None]:
    """Let every replica made in the body, but the first of its executor, be as elsewhere."""
    elsewhere = threading.local()
    lies_on, open_replica = device_copies.lies_on, replica.Replica.__init__

    def open_elsewhere(
        self: replica.Replica, source: nn.Module, device: Any, index: int, **options: Any
    ) -> None:
        before, elsewhere.on = getattr(elsewhere, "on", False), index > 0
        try:
            open_replica(self, source, device, index, **options)
        finally:
            elsewhere.on = before

    def lies_here(parameter: Tensor, device: torch.device) -> bool:
        return not getattr(elsewhere, "on", False) and lies_on(parameter, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "lies_on", lies_here)
        patch.setattr(replica.Replica, "__init__", open_elsewhere)
        yield

"""A second device where there is one: replicas behind the first hold copies of the parameters.

On the source's own device a replica's parameters lie in the source's memory. On another they are
copies, which go stale unless they are brought up to date. Here they are copies on the same device,
so that every machine can run the tests of containers and executor groups with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

from phalanx.replicas import replica

__all__ = ["emulate_second_device"]


@contextmanager
def emulate_second_device() -> Iterator[None]:
    """Let every replica made in the body, but the first of its executor, be as elsewhere."""
    elsewhere = threading.local()
    alias, open_replica = replica._alias, replica.Replica.__init__

    def copy_or_alias(parameter: nn.Parameter) -> Tensor:
        if not getattr(elsewhere, "on", False):
            return alias(parameter)
        own = Tensor._make_subclass(
            type(parameter), parameter.detach().clone(), parameter.requires_grad
        )
        own.__dict__.update(parameter.__dict__)
        return own

    def open_elsewhere(
        self: replica.Replica, source: nn.Module, device: Any, index: int, **options: Any
    ) -> None:
        before, elsewhere.on = getattr(elsewhere, "on", False), index > 0
        try:
            open_replica(self, source, device, index, **options)
            if elsewhere.on:
                self._shared = [False] * len(self._shared)
                self._same = replica.SameParameters(
                    source, self.parameters, self._shared, only_one=options.get("only_one", False)
                )
        finally:
            elsewhere.on = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "_alias", copy_or_alias)
        patch.setattr(replica.Replica, "__init__", open_elsewhere)
        yield

"""A second device where there is one: replicas behind the first hold copies of the parameters.

On the source's own device a replica's parameters lie in the source's memory. On another they are
copies, which go stale unless they are brought up to date. Here they are copies on the same device,
so that every machine can run the tests of containers and executor groups with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn

from phalanx.replicas import replica, rng, source_gradients

__all__ = ["emulate_device_threads", "emulate_second_device"]


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


@contextmanager
def emulate_device_threads() -> Iterator[None]:
    """Let replicas in the body go back as on an accelerator: torch's engine has a thread for it."""
    engine = rng.run_engine

    def run_in_another_thread(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(engine, *args, **kwargs).result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_gradients, "has_own_thread", lambda device: True)
        patch.setattr(rng, "run_engine", run_in_another_thread)
        yield

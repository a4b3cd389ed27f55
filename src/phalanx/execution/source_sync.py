"""Keep the module of a worker process like the one that the user holds.

Parameters lie in shared memory and need nothing. Buffers have a copy there, written before a run
where they have changed. Attributes (``training``, a dropout's ``p``) and freezing travel with the
next microbatch; whatever else changes needs new workers (see `Attributes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UnsupportedError
from phalanx.memory import SharedMemoryPool, TensorHandle
from phalanx.replicas import Attributes, Registered, TensorVersion
from phalanx.torch_internals import has_global_module_hooks

__all__ = ["Changes", "SourceSync", "place_buffers", "take_over"]


@dataclass(frozen=True)
class Changes:
    """What a worker has to take over before it computes; nothing most of the time.

    Attributes:
        buffers: Counts how often the buffers were written.
        version: Counts the changes of the rest.
        attributes: By index of the module, plain values by name.
        trained: For each parameter, whether it wants a gradient; None where nothing but buffers is
            to be taken over.
    """

    buffers: int
    version: int
    attributes: tuple[tuple[int, dict[str, Any]], ...] = ()  # Any: attributes of user's modules
    trained: tuple[bool, ...] | None = None

    def since(self, version: int) -> Changes:
        """Return what is left for a worker that knows ``version``."""
        return self if version != self.version else Changes(self.buffers, self.version)


class SourceSync:
    """The user's module, as the workers' copies follow it.

    Args:
        source: The module.
        pool: Where the copies of its buffers lie.

    Attributes:
        handles: Where the copies lie, in the order of the modules.
    """

    def __init__(self, source: nn.Module, pool: SharedMemoryPool) -> None:
        self._source = source
        self._parameters = list(source.parameters())
        self._attributes = Attributes(source, source)
        self._hooks = Registered(source)
        found = list(_buffers(source))
        copies = pool.allocate_like([buffer for _, _, buffer in found])
        self._copies = [(o, k, copy) for (o, k, _), copy in zip(found, copies, strict=True)]
        self.handles = [pool.handle_of(copy) for copy in copies]
        self._seen = [TensorVersion()] * len(self._copies)
        self._buffers_written = 0
        self._changed: dict[int, dict[str, Any]] = {}
        self._trained: tuple[bool, ...] = tuple(p.requires_grad for p in self._parameters)
        self._version = 0

    def can_follow(self) -> bool:
        """Tell whether everything that has changed can be taken over by the workers."""
        return (
            self._attributes.can_follow()
            and self._hooks.are_still()
            and all(_alike(owner._buffers[key], copy) for owner, key, copy in self._copies)
        )

    def outdate(self) -> None:
        """Write all buffers again before the next run, whatever their versions say."""
        self._seen = [TensorVersion()] * len(self._copies)

    def changes(self) -> Changes:
        """Write the buffers that have changed, and return what a new worker has to take over.

        Raises:
            UnsupportedError: There are hooks on all modules, which only this process would call.
        """
        if has_global_module_hooks():
            raise UnsupportedError(
                "Hooks on all modules (`register_module_forward_hook` and its like) must not be "
                "registered where modules run in worker processes, which have none of them, but "
                "are. Register hooks on the module, or use executor='threads'."
            )
        self._write_buffers()
        news = self._attributes.take_changes()
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        if news or trained != self._trained:
            for index, values in news:
                self._changed.setdefault(index, {}).update(values)
            self._trained = trained
            self._version += 1
        return Changes(
            buffers=self._buffers_written,
            version=self._version,
            attributes=tuple(self._changed.items()),
            trained=self._trained,
        )

    def _write_buffers(self) -> None:
        wrote = False
        with torch.no_grad():
            for index, (owner, key, copy) in enumerate(self._copies):
                buffer = owner._buffers[key]
                assert buffer is not None  # see `can_follow`
                if not self._seen[index].is_still(buffer):
                    copy.copy_(buffer)
                    self._seen[index] = TensorVersion(buffer)
                    wrote = True
        self._buffers_written += wrote


def take_over(module: nn.Module, changes: Changes) -> None:
    """Make ``module``, in a worker, what ``changes`` says."""
    if changes.trained is None:
        return
    modules = list(module.modules())
    for index, values in changes.attributes:
        modules[index].__dict__.update(values)
    for parameter, trained in zip(module.parameters(), changes.trained, strict=True):
        if parameter.requires_grad != trained:
            parameter.requires_grad_(trained)


def place_buffers(
    module: nn.Module, places: list[TensorHandle | None], pool: SharedMemoryPool
) -> None:
    """Give ``module``, in a worker, the buffers that lie on ``pool``."""
    for (owner, key, _), place in zip(list(_buffers(module)), places, strict=True):
        if place is not None:
            owner._buffers[key] = pool.at(place)


def _alike(buffer: Tensor | None, copy: Tensor) -> bool:
    return buffer is not None and buffer.shape == copy.shape and buffer.dtype == copy.dtype


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, key, buffer

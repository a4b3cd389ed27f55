"""Where the order of the data comes from, so that a resumed epoch goes on where it was left.

A loader's order is decided by generators: its own or its sampler's, or the process's own ones.
Their state at the start of an epoch is kept; to go on, it is put back, the loader is iterated anew
and the batches that were done already are passed over.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.types import Nested

__all__ = ["Order", "batches_from"]

_MT19937_WORDS = 624


class Order:
    """The state of all generators that may decide a loader's order.

    Attributes:
        tensors: States of torch's and NumPy's generators, by name.
        values: The rest, as JSON can hold it.
    """

    def __init__(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.tensors = tensors
        self.values = values

    @staticmethod
    def capture(loader: object) -> Order:
        """Read the generators; nothing is drawn."""
        # `legacy` is what `np.random.shuffle` and its like in users' datasets draw from.
        name, keys, position, has_gauss, cached = np.random.get_state()
        version, state, gauss = random.getstate()
        tensors = {
            "torch": torch.get_rng_state(),
            "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        }
        for place, generator in enumerate(_generators_of(loader)):
            tensors[f"loader.{place}"] = generator.get_state()
        values = {
            "python": [version, list(state), gauss],
            "numpy": [str(name), int(position), int(has_gauss), float(cached)],
        }
        return Order(tensors, values)

    def restore(self, loader: object) -> None:
        """Put the generators back."""
        torch.set_rng_state(self.tensors["torch"])
        name, position, has_gauss, cached = self.values["numpy"]
        keys = self.tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state((name, keys, position, has_gauss, cached))
        version, state, gauss = self.values["python"]
        random.setstate((version, tuple(state), gauss))
        for place, generator in enumerate(_generators_of(loader)):
            if f"loader.{place}" in self.tensors:
                generator.set_state(self.tensors[f"loader.{place}"])


def batches_from(loader: Iterable[Nested], first: int, epoch: int) -> Iterator[Nested]:
    """Iterate over ``loader`` from batch ``first`` on, and tell its sampler the epoch."""
    sampler = getattr(loader, "sampler", None)
    if sampler is not None and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    iterator = iter(loader)
    for _ in range(first):
        next(iterator, None)
    return iterator


def _generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators of a loader and of its samplers, each once."""
    found: list[torch.Generator] = []
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found

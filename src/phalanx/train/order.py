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

from phalanx.train.sampler import ExactSampler
from phalanx.types import Nested

__all__ = ["Order", "Reader", "begin_epoch"]


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


class Reader:
    """Read loaders so that an epoch can be left in the middle and gone on with, here or elsewhere.

    For an epoch that was left, the order is the one it began with, not the one there is now.
    """

    def __init__(self) -> None:
        self._order: Order | None = None
        self._is_stored = False  # the order came from a checkpoint and is to be put back
        self._loader: object = None
        self._iterator: object = None  # the last one, to know a generator again

    def batches(self, loader: Iterable[Nested], first: int, epoch: int) -> Iterator[Nested]:
        """Iterate over what is left of ``epoch`` after ``first`` batches."""
        self._loader = loader
        if loader is self._iterator and first > 0:
            return iter(loader)  # a generator that was left in the middle goes on by itself
        if self._order is not None and (self._is_stored or first > 0):
            self._order.restore(loader)
        else:
            self._order = Order.capture(loader)
        self._is_stored = False
        batches = _batches_from(loader, first, epoch)
        self._iterator = batches
        return batches

    def reads(self, batches: Iterator[Nested]) -> bool:
        """Tell whether ``batches`` were opened last, and nothing was put back since."""
        return batches is self._iterator

    def order(self, done: int) -> Order | None:
        """Return what a checkpoint needs after ``done`` batches of the epoch; None for nothing."""
        if done == 0 and self._loader is not None and not self._is_stored:
            self._order = Order.capture(self._loader)  # what the next epoch will start from
        return self._order

    def put_back(self, order: Order | None) -> None:
        """Go on from what a checkpoint holds."""
        self._order, self._is_stored, self._iterator = order, order is not None, None


def is_complete(loader: Iterable[Nested], batches: int) -> bool:
    """Tell whether ``batches`` are all, without asking for another, where the loader knows it."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:  # a generator, or a DataLoader over an IterableDataset
        return False
    return 0 < length <= batches


def begin_epoch(loader: object, epoch: int) -> None:
    """Tell the loader's sampler which epoch begins, from its first sample on."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, ExactSampler):
        sampler.load_state_dict({**sampler.state_after(0), "epoch": epoch})
    elif sampler is not None and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def _batches_from(loader: Iterable[Nested], first: int, epoch: int) -> Iterator[Nested]:
    """Iterate over ``loader`` from batch ``first`` on."""
    begin_epoch(loader, epoch)
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

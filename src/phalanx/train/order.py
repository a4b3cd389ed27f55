"""The order of the data, which depends only on (seed, epoch, batch).

Whatever is drawn while a loader makes a batch comes from generators that are seeded for that batch:
the process's, which are put back afterwards, and the loader's own, which are seeded for each epoch.
So nothing is stored: a resumed epoch is read again from its beginning, and the batches that were
done already are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand  # where `np.random`'s functions come from
from torch.utils.data import DataLoader

from phalanx.errors import ConfigError
from phalanx.replicas import derive_seed
from phalanx.torch_internals import has_workers
from phalanx.train.sampler import ExactSampler
from phalanx.types import Nested

END = object()
"""Stands where a batch would, after the last one."""
_DATA = -1  # stands in seeds where a step's number does, so no microbatch draws the same numbers


class Reader:
    """Read loaders so that an epoch can be left in the middle and continued, here or elsewhere.

    Here the open iterator continues. Another loader, and any after :meth:`forget`, is read again.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._loader: Iterable[Nested] | None = None
        self._batches: Iterator[Nested] | None = None  # None after it has raised, too
        self._epoch = 0
        self._num_read = 0
        self._batch: Any = None  # Any: or what stands for the end
        self._numpys = np.random.MT19937()  # what NumPy draws from while a batch is read

    @property
    def is_open(self) -> bool:
        """True between :meth:`open` and :meth:`forget`, unless the loader has raised."""
        return self._batches is not None

    def open(self, loader: Iterable[Nested], done: int, epoch: int) -> None:
        """Get ready to read what is left of ``epoch`` after ``done`` batches."""
        is_same = loader is self._loader and epoch == self._epoch
        if is_same and self._batches is not None:
            return
        self._loader, self._batches, self._epoch = loader, None, epoch
        # An iterator gives no batch a second time.
        self._num_read = done if is_same and isinstance(loader, Iterator) else 0
        self._begin()
        while self._num_read < done:
            self._read()
            if self._batch is END:
                self.forget()
                raise ConfigError(
                    f"`loader` must yield the {done} batches of this epoch that are done, and the "
                    "rest, but yields fewer. Give the loader with which the epoch began."
                )

    def batch_after(self, done: int) -> Any:
        """Return the batch after the first ``done``, or `END`; again, until ``done`` grows."""
        if self._num_read == done:
            self._read()
        return self._batch

    def _begin(self) -> None:
        """Announce the epoch, seed the loader's generators for it, and begin to iterate."""
        assert self._loader is not None
        with self._drawing(0):
            begin_epoch(self._loader, self._epoch)
            for place, generator in enumerate(_generators_of(self._loader)):
                generator.manual_seed(derive_seed(self._seed, _DATA, self._epoch, 0, place))
            if isinstance(self._loader, DataLoader) and self._loader.num_workers:
                self._batches = self._begin_with_workers(self._loader)
            else:
                self._batches = iter(self._loader)

    def _begin_with_workers(self, loader: DataLoader[Any]) -> Iterator[Nested]:
        """Begin to iterate a loader whose sampler is asked at once, and not by the first read.

        So the sampler draws here what it would draw there. Otherwise a loader without a generator
        would draw the seed of its workers before it, from the same numbers.
        """
        if has_workers(loader):
            draw_base_seed(loader)  # as when it started them, and not again
        generator = loader.generator
        if generator is None:
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        try:
            with self._drawing(1):
                return iter(loader)
        finally:
            loader.generator = generator

    def _read(self) -> None:
        assert self._batches is not None
        try:
            with self._drawing(self._num_read + 1):
                self._batch = next(self._batches, END)
        except BaseException:
            self._batches = None
            raise
        self._num_read += 1

    @contextmanager
    def _drawing(self, place: int) -> Iterator[None]:
        """Seed the process's generators for the body, and put them back afterwards."""
        if type(self._loader) in (list, tuple):  # nothing is drawn
            yield
            return
        before = torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator()
        seed = derive_seed(self._seed, _DATA, self._epoch, place)
        try:
            mtrand.set_bit_generator(self._numpys)  # a copy of NumPy's state takes 100 µs
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            mtrand.set_bit_generator(before[2])

    def pause(self, done: int) -> None:
        """Let go of the last batch if it was trained on; one that was not is kept."""
        if self._num_read == done:
            self._batch = None

    def forget(self) -> None:
        """Let go of the loader, its workers and its iterator."""
        self._loader = self._batches = self._batch = None


def draw_base_seed(loader: DataLoader[Any]) -> None:
    """Draw what a `DataLoader` draws for its workers before it asks for the first sample."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def length_of(loader: Iterable[Nested]) -> int | None:
    """Return how many batches there are, where the loader knows it."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # it has none, or none yet: the iteration ends where it ends
        return None


def begin_epoch(loader: object, epoch: int) -> None:
    """Announce the epoch to the loader and to every part of it that has ``set_epoch``.

    Epochs count from 0 there, as in loops of plain PyTorch.
    """
    for part in _parts_of(loader):
        if isinstance(part, ExactSampler):
            part.load_state_dict({**part.state_after(0), "epoch": epoch})
        elif callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def _generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators of a loader and of its parts, each once."""
    found = (
        value
        for part in _parts_of(loader)
        for value in (getattr(part, "generator", None), *getattr(part, "__dict__", {}).values())
    )
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _parts_of(loader: object) -> list[object]:
    """Return what may decide the order or the content of batches, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler]
    parts += [getattr(batch_sampler, "sampler", None), getattr(loader, "collate_fn", None)]
    waiting = [getattr(loader, "dataset", None)]
    while waiting:  # what holds other data sets, as `random_split` and `ConcatDataset` do
        data = waiting.pop()
        if data is not None and all(data is not each for each in parts):
            parts.append(data)
            inner = getattr(data, "datasets", None)
            waiting += [getattr(data, "dataset", None)]
            waiting += inner if isinstance(inner, (list, tuple)) else ()
    return list({id(each): each for each in parts if each is not None}.values())

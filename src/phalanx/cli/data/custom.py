"""A user's own data set or loader as ``Data``."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx.cli.data.attribute import call_without_arguments, import_attribute
from phalanx.cli.data.data import Data
from phalanx.cli.data.loader import check_batch_size
from phalanx.errors import ConfigError

_ACCEPTED = "a Dataset, an iterable of batches, a function returning one, or a (train, test) tuple"


def open_custom(spec: str, *, batch_size: int, seed: int) -> Data:
    """Open what ``module:attribute`` names.

    It may be a ``torch.utils.data.Dataset``, which is read through a ``DataLoader`` with
    ``batch_size`` and a generator of its own seeded by ``seed``; any iterable of batches that can
    be iterated again, taken as it is (``batch_size`` and ``seed`` are its own matter); a function
    or class that gives either without arguments; or a tuple of two of them, training and test set.

    The input shape is that of a data set's first input, and the number of classes comes from its
    attribute ``num_classes`` or the length of ``classes``; a loader is not touched to find out.

    Raises:
        ConfigError: There is no such attribute, it is none of these or empty, or its
            ``num_classes`` is no int of at least 2.
    """
    check_batch_size(batch_size)
    found = _resolve(import_attribute(spec), spec)
    train, test = found if _is_pair(found) else (found, None)
    train = _resolve(train, spec)
    test = None if test is None else _resolve(test, spec)
    source = train.dataset if isinstance(train, DataLoader) else train
    return Data(
        name=spec,
        kind="custom",
        train=_open_loader(train, f"`{spec}`", batch_size=batch_size, seed=seed, shuffle=True),
        test=None
        if test is None
        else _open_loader(
            test, f"The validation set of `{spec}`", batch_size=batch_size, seed=seed, shuffle=False
        ),
        input_shape=_input_shape(source),
        num_classes=_num_classes(source, spec),
        description=f"{spec}: {type(source).__name__}",
    )


# Any, here and below: the object is the user's; these functions are where its type is found out.
def _is_pair(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2


def _resolve(found: Any, spec: str) -> Any:
    is_value = not isinstance(found, type) and (
        isinstance(found, Dataset | tuple) or hasattr(found, "__iter__")
    )
    return call_without_arguments(found, spec) if callable(found) and not is_value else found


def _open_loader(
    found: Any, name: str, *, batch_size: int, seed: int, shuffle: bool
) -> Iterable[Any]:
    if isinstance(found, Dataset):
        if not isinstance(found, IterableDataset | Sized):
            raise ConfigError(
                f"{name} must be a Dataset with `__len__`, but {type(found).__name__} has none. "
                "Add it: rows are drawn by their numbers."
            )
    elif hasattr(found, "__next__"):
        raise ConfigError(
            f"{name} must be iterable once per epoch, but is a {type(found).__name__}, which "
            "runs out. Name the function that makes it, wrapped in a class with `__iter__`."
        )
    elif not hasattr(found, "__iter__") or isinstance(found, str | bytes | dict | Tensor | tuple):
        raise ConfigError(f"{name} must be {_ACCEPTED}, but is a {type(found).__name__}.")
    if _is_empty(found):
        raise ConfigError(
            f"{name} must hold at least one row, but its {type(found).__name__} is empty."
        )
    if not isinstance(found, Dataset):
        loader: Iterable[Any] = found
        return loader
    return DataLoader(
        found,
        batch_size=batch_size,
        shuffle=shuffle and not isinstance(found, IterableDataset),
        # Without its own generator a DataLoader draws from the global one at every epoch.
        generator=torch.Generator().manual_seed(seed),
    )


def _is_empty(found: Any) -> bool:
    try:
        return isinstance(found, Sized) and len(found) == 0
    except TypeError:  # a DataLoader over an IterableDataset
        return False


def _input_shape(source: Any) -> tuple[int, ...] | None:
    if not isinstance(source, Dataset) or isinstance(source, IterableDataset):
        return None
    sample = source[0]
    first = sample[0] if isinstance(sample, tuple | list) and sample else None
    return tuple(first.shape) if isinstance(first, Tensor) else None


def _num_classes(source: Any, spec: str) -> int | None:
    num_classes = getattr(source, "num_classes", None)
    if num_classes is None:
        classes = getattr(source, "classes", None)
        return len(classes) if isinstance(classes, list | tuple | dict) else None
    # Integral: numpy's, too
    if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or num_classes < 2:
        raise ConfigError(
            f"`num_classes` of `{spec}` must be an int of at least 2, but is {num_classes!r:.80}. "
            "Leave it out where there are no classes."
        )
    return int(num_classes)

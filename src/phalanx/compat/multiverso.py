"""The names of Multiverso's Torch and Python bindings, over ``phalanx.tables``.

    init()
    table = ArrayTableHandler(size, init_value=weights)
    barrier()
    weights = table.get()            # numpy, float32
    table.add(new - weights)
    shutdown()

docs/migrating_multiverso.md has the names, and what is different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx import tables
from phalanx.errors import ConfigError

__all__ = [
    "ArrayTableHandler",
    "MatrixTableHandler",
    "barrier",
    "init",
    "is_master_worker",
    "num_workers",
    "server_id",
    "shutdown",
    "worker_id",
    "workers_num",
]

Array = np.ndarray[Any, np.dtype[np.float32]]  # of one or two dimensions
Data = Tensor | np.ndarray[Any, Any] | Sequence[Any] | float  # whatever numpy makes floats of
_TIMEOUT_S = 600.0  # Multiverso waits for ever; workers may be an epoch's end apart


def init(sync: bool = False) -> None:
    """Join the workers that `phalanx launch` or torchrun has started, or be the only one; once.

    Args:
        sync: Whether the i-th get of a table is the same for all workers (see docs/tables.md).

    Raises:
        StateError: It was called before.
    """
    tables.init(sync=sync, timeout_s=_TIMEOUT_S)


def shutdown() -> None:
    """Leave. The last worker's tables are gone with it; without ``init``, do nothing."""
    tables.shutdown()


def barrier() -> None:
    """Wait until all workers have come, left or died.

    Raises:
        PeerTimeout: A worker did not come within ten minutes; ``.rank`` is it.
    """
    tables.current().barrier("multiverso")


def num_workers() -> int:
    """Return how many workers there are: those who have neither shut down nor died."""
    return tables.current().num_workers


def workers_num() -> int:
    """Return how many workers there are, under the Python binding's name."""
    return num_workers()


def worker_id() -> int:
    """Return this worker's number, from 0; under torchrun it is the rank."""
    return tables.current().worker_id


def server_id() -> int:
    """Return this worker's number: as in Multiverso by default, every worker is a server as well.

    There is none that others would have to ask: workers touch the tables themselves.
    """
    return worker_id()


def is_master_worker() -> bool:
    """Tell whether this is the worker whose initial values count: 0, or the lowest that is left."""
    return tables.current().is_master


class ArrayTableHandler:
    """A table of one dimension, of float32.

    All workers make the same tables in the same order.

    Args:
        size: How many numbers, from 0 on.
        init_value: What the table holds at first; only the master's counts. None is zeros.

    Raises:
        ConfigError: ``init_value`` has another size, or another worker's table has.
        StateError: ``init`` was not called.

    Example:
        >>> init()
        >>> table = ArrayTableHandler(3, init_value=[1, 2, 3])
        >>> table.add([10, 20, 30])
        >>> table.get()
        array([11., 22., 33.], dtype=float32)
        >>> shutdown()
    """

    def __init__(self, size: int, init_value: Data | None = None) -> None:
        value = None if init_value is None else _floats(init_value, (size,), "init_value")
        self._table = tables.current().array(size, init=value)

    def get(self) -> Array:
        """Return the value, float32, the caller's own."""
        return _to_numpy(self._table.get())

    def add(self, data: Data, sync: bool = False) -> None:
        """Add ``data`` to the table.

        Args:
            data: As many numbers as the table has; they may be changed afterwards.
            sync: Whether it is in when this returns. On one host it always is.

        Raises:
            ConfigError: There are more or fewer numbers, or NaN or infinity among them.
        """
        del sync
        self._table.add(_floats(data, self._table.shape, "data"))


class MatrixTableHandler:
    """A table of rows, of float32.

    All workers make the same tables in the same order.

    Args:
        num_row: How many rows, from 0 on.
        num_col: Row width, at least 1.
        init_value: What the table holds at first; only the master's counts. None is zeros.

    Raises:
        ConfigError: ``init_value`` has another size, or another worker's table has.
        StateError: ``init`` was not called.

    Example:
        >>> init()
        >>> table = MatrixTableHandler(3, 2)
        >>> table.add([[1, 2], [3, 4]], row_ids=[2, 0])
        >>> table.get([2, 1])
        array([[1., 2.],
               [0., 0.]], dtype=float32)
        >>> shutdown()
    """

    def __init__(self, num_row: int, num_col: int, init_value: Data | None = None) -> None:
        value = (
            None if init_value is None else _floats(init_value, (num_row, num_col), "init_value")
        )
        self._table = tables.current().matrix(num_row, num_col, init=value)

    def get(self, row_ids: Sequence[int] | Tensor | None = None) -> Array:
        """Return the rows in the order asked, or all of them; (K, num_col), float32.

        Args:
            row_ids: 0-based; a row may be asked twice.

        Raises:
            ConfigError: A row is outside the table.
        """
        return _to_numpy(self._table.get(row_ids))

    def add(
        self, data: Data, row_ids: Sequence[int] | Tensor | None = None, sync: bool = False
    ) -> None:
        """Add ``data`` to the rows of ``row_ids``, or to all.

        Args:
            data: As many numbers as those rows have; they may be changed afterwards.
            row_ids: 0-based; a row may stand there twice, then both are added.
            sync: Whether it is in when this returns. On one host it always is.

        Raises:
            ConfigError: A row is outside the table, there are more or fewer numbers, or NaN or
                infinity is among them.
        """
        del sync
        num_row, num_col = self._table.shape
        count = num_row if row_ids is None else len(row_ids)
        self._table.add(_floats(data, (count, num_col), "data"), row_ids)


def _floats(given: Data, shape: tuple[int, ...], name: str) -> Tensor:
    """Return numbers of any shape and dtype as a float32 tensor of ``shape``."""
    numbers = given.detach().float().cpu() if isinstance(given, Tensor) else given
    try:
        array = np.asarray(numbers, dtype=np.float32)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"`{name}` must hold numbers, but does not: {exc}.") from exc
    wanted = int(np.prod(shape))
    if array.size != wanted:
        raise ConfigError(
            f"`{name}` must hold {wanted} numbers, for shape {shape}, but holds {array.size}."
        )
    return torch.tensor(array).view(shape)


def _to_numpy(value: Tensor) -> Array:
    array: Array = value.numpy()
    return array

"""The names of Multiverso's Torch and Python bindings, over ``phalanx.tables``.

    init()
    table = ArrayTableHandler(size, init_value=params)
    barrier()
    params.copy_(table.get())        # a tensor, float32; np.asarray(…) for the Python binding
    table.add(new - old)
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
from phalanx.errors import ConfigError, StateError

__all__ = [
    "ArrayTableHandler",
    "MatrixTableHandler",
    "TableHandler",
    "barrier",
    "init",
    "is_master_worker",
    "num_workers",
    "shutdown",
    "worker_id",
]

Data = Tensor | np.ndarray[Any, Any] | Sequence[Any] | float  # whatever numpy makes floats of
_world: tables.TableGroup | None = None  # the process's own, as Multiverso has one


def init(sync: bool = False, *, timeout_s: float = 600.0) -> None:
    """Join the workers that `phalanx launch`, torchrun or mpirun has started, or be the only one.

    Args:
        sync: Whether the i-th get of a table is the same for all workers (see docs/tables.md).
        timeout_s: How long a call waits for other workers, in seconds; Multiverso waits for ever.

    Raises:
        StateError: It was called before.
    """
    global _world
    if _world is not None and not _world.closed:
        raise StateError("`init` must be called once, but was called before. Call `shutdown`.")
    _world = tables.join(sync=sync, timeout_s=timeout_s)


def shutdown() -> None:
    """Leave. The last worker's tables are gone with it; without ``init``, do nothing."""
    global _world
    if _world is not None:
        _world.close()
        _world = None


def _group() -> tables.TableGroup:
    if _world is None or _world.closed:
        raise StateError("`init` must be called first, but was not.")
    return _world


def barrier() -> None:
    """Wait until all workers have come, left or died, or raise PeerTimeout."""
    _group().barrier()


def num_workers() -> int:
    """Return how many workers there are: those who have neither shut down nor died."""
    return _group().num_workers


def worker_id() -> int:
    """Return this worker's number, from 0; under torchrun it is the rank."""
    return _group().worker_id


def is_master_worker() -> bool:
    """Tell whether this is the worker whose initial values count: 0, or the lowest that is left."""
    return _group().is_master


class TableHandler:
    """A table that workers add to and read: one of the two below, made alike by all, in one order.

    Raises:
        ConfigError: ``init_value`` has another size, or another worker's table has; in a call, a
            row is outside the table, ``data`` has another size, or holds NaN or infinity.
        StateError: ``init`` was not called.
    """

    _table: tables.Table

    def get(self, row_ids: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return all values, or rows by 0-based number in the order asked; the caller's own."""
        return self._table.get(row_ids)

    def _add(self, data: Data, rows: Sequence[int] | Tensor | None) -> None:
        shape = self._table.shape if rows is None else (len(rows), *self._table.shape[1:])
        self._table.add(_floats(data, shape, "data"), rows)


class ArrayTableHandler(TableHandler):
    """A table of one dimension, of float32.

    Args:
        size: How many numbers, from 0 on.
        init_value: What the table holds at first; only the master's counts. None is zeros.

    Example:
        >>> init()
        >>> table = ArrayTableHandler(3, init_value=[1, 2, 3])
        >>> table.add([10, 20, 30])
        >>> table.get()
        tensor([11., 22., 33.])
        >>> shutdown()
    """

    def __init__(self, size: int, init_value: Data | None = None) -> None:
        first = None if init_value is None else _floats(init_value, (size,), "init_value")
        self._table = _group().array(size, init=first)

    def add(self, data: Data, sync: bool = False) -> None:  # noqa: ARG002 - Multiverso's
        """Add ``data``, as many numbers as the table has; ``sync`` changes nothing."""
        self._add(data, None)


class MatrixTableHandler(TableHandler):
    """A table of rows, of float32.

    Args:
        num_row: How many rows, from 0 on.
        num_col: Row width, at least 1.
        init_value: What the table holds at first; only the master's counts. None is zeros.

    Example:
        >>> init()
        >>> table = MatrixTableHandler(3, 2)
        >>> table.add([[1, 2], [3, 4]], row_ids=[2, 0])
        >>> table.get([2, 1])
        tensor([[1., 2.],
                [0., 0.]])
        >>> shutdown()
    """

    def __init__(self, num_row: int, num_col: int, init_value: Data | None = None) -> None:
        shape = num_row, num_col
        first = None if init_value is None else _floats(init_value, shape, "init_value")
        self._table = _group().matrix(*shape, init=first)

    def add(
        self,
        data: Data,
        row_ids: Sequence[int] | Tensor | None = None,
        sync: bool = False,  # noqa: ARG002 - Multiverso's
    ) -> None:
        """Add ``data`` to rows, a row given twice twice, or to all; ``sync`` changes nothing."""
        self._add(data, row_ids)


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

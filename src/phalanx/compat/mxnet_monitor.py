"""MXNet's monitor: its defaults, its names of arguments, and a `toc_print` that prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from phalanx import executor_group
from phalanx.errors import ConfigError

__all__ = ["Monitor", "norm_by_size"]


def norm_by_size(values: Tensor) -> Tensor:
    """Return MXNet's default statistic: the 2-norm over the root of the number of elements."""
    wide = values if values.dtype in (torch.float64, torch.complex128) else values.float()
    result: Tensor = torch.linalg.vector_norm(wide) / max(1, values.numel()) ** 0.5
    return result


class Monitor(executor_group.Monitor):
    """Watch outputs, and at the end of a batch arguments (parameters) and auxiliary states.

    Args:
        interval: Which batches are watched: the first, and every ``interval``-th after it.
        stat_func: tensor -> a number; default :func:`norm_by_size`.
        pattern: Names that are told begin so.
        sort: Whether they are told by name.
        monitor_all: Whether inputs of modules are told, too.
        options: Those of `phalanx.executor_group.Monitor`, by keyword, such as ``which`` for what
            else is watched.

    Example:
        >>> net = torch.nn.Linear(2, 1)
        >>> monitor = Monitor(1, stat_func=lambda values: values.abs().max())
        >>> monitor.install(net)
        >>> monitor.tic()
        >>> output = net(torch.ones(3, 2))
        >>> [record.name for record in monitor.toc()]
        ['output', 'weight', 'bias']
        >>> monitor.remove()

    Source: MXNet's ``mx.mon.Monitor``, whose names did not say the device. The data itself is told
    with ``monitor_all``.
    """

    def __init__(
        self,
        interval: int = 1,
        stat_func: Callable[[Tensor], Tensor | float] | None = None,
        pattern: str = ".*",
        sort: bool = False,
        monitor_all: bool = False,
        *,
        statistic: Callable[[Tensor], Tensor | float] | None = None,
        which: str | Sequence[str] | None = None,
        **options: Any,  # Any: each option's own
    ) -> None:
        if stat_func is not None and statistic is not None:
            raise ConfigError(
                "`stat_func` must be given once, but is given as `statistic`, too. Leave one out."
            )
        chosen = stat_func if statistic is None else statistic
        inputs = ("inputs",) if monitor_all else ()
        super().__init__(
            interval,
            norm_by_size if chosen is None else chosen,
            pattern,
            sort,
            (*inputs, "outputs", "parameters", "buffers") if which is None else which,
            **options,
        )

    def toc_print(self, console: Console | None = None) -> Table:
        """End a batch, and print what was seen; to ``console``, or to the standard output."""
        return super().toc_print(Console() if console is None else console)

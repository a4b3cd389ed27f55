"""A table's region as tensors."""

from __future__ import annotations

from torch import Tensor

from phalanx.memory import Region
from phalanx.tables.spec import Layout, TableSpec
from phalanx.tables.updaters import state_dtype

__all__ = ["view_backups", "view_parts"]


def view_parts(region: Region, spec: TableSpec, layout: Layout) -> list[tuple[Tensor, Tensor]]:
    """Return values and states, each of A and of B, as (rows, width)."""
    kinds = [(*layout.values, spec.cols, spec.dtype)]
    kinds += [(a, b, width, state_dtype(spec.dtype)) for a, b, width in layout.states]
    parts = []
    for a, b, width, dtype in kinds:
        sides = [
            region.tensor(dtype, spec.rows * width, at).view(spec.rows, width) for at in (a, b)
        ]
        parts.append((sides[0], sides[1]))
    return parts


def view_backups(region: Region, spec: TableSpec, layout: Layout) -> list[Tensor]:
    """Return each worker's copy, as (rows, cols)."""
    size = Layout.backup_bytes(spec)
    return [
        region.tensor(spec.dtype, spec.rows * spec.cols, layout.backups + worker * size).view(
            spec.rows, spec.cols
        )
        for worker in range(spec.num_backups)
    ]

"""The forms in which torch gives a call's arguments, brought to one."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["check_fit", "listed", "only", "options"]


# Any, below: options are torch's own classes, which have no common base and no types.
def listed(tensors: Any) -> Sequence[Any]:
    """Return a list of what may be one tensor alone."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def only(tensors: Sequence[Any]) -> Any:
    """Return the single one of ``tensors``.

    Raises:
        UnsupportedError: There are more, or none.
    """
    if len(tensors) != 1:
        raise UnsupportedError(
            f"A call must concern one tensor per rank, but concerns {len(tensors)}. Call once for "
            "each."
        )
    return tensors[0]


def check_fit(one: Tensor, other: Tensor, name: str, of: str) -> None:
    """See that two tensors are of one length and dtype.

    Raises:
        ConfigError: They are not.
    """
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise ConfigError(
            f"`{name}` must hold as many elements as {of} ({other.numel()} × {other.dtype}), but "
            f"holds {one.numel()} × {one.dtype}."
        )


def options(
    kind: Callable[[], Any], given: Any, timeout: datetime.timedelta | None = None, op: Any = None
) -> Any:
    """Return torch's options, made of what the shorter forms of a call give in their place."""
    if isinstance(given, kind):  # type: ignore[arg-type]
        return given
    options = kind()
    if isinstance(given, int):
        options.rootRank = given
    elif given is not None:
        options.reduceOp = _as_op(given)
    if op is not None:
        options.reduceOp = _as_op(op)
    if timeout is not None:
        options.timeout = timeout
    return options


def _as_op(given: Any) -> dist.ReduceOp:
    # `ReduceOp.SUM` says that it is a ReduceOp, but options do not take it for one; PREMUL_SUM is
    # one only together with its factor.
    kind = getattr(given, "op", given)
    return given if kind == dist.ReduceOp.PREMUL_SUM else dist.ReduceOp(kind)

"""The rules by which a table takes a delta.

Shapes:
    K: rows of an add, each once.  D: row width.
    rows_KD, delta_KD of the table's dtype; a state is (K, D) or (K, 1), float32 or float64.

`sum` takes a difference: w += delta. All others take a gradient (or DiLoCo's pseudo-gradient,
old − new) and go down it. Where rows are given, only those rows and their state change: rows that
are absent from an add are as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from phalanx.plan import check_argument


@dataclass(frozen=True, kw_only=True)
class Updater:
    """One rule with its options; a value, the same in every worker.

    Attributes:
        name: What it is called in ``updater=``.
        states: Width of each state, zeros at first: "row" for one number per row, "element" for one
            per element.
        is_wide: Whether a delta is (K, 2D): beside what was added stands what it is taken with.
        any_dtype: Whether it serves tables of integers.
        merge: How the adds of a bulk-synchronous round become one before it is taken, if all are
            of the whole table: "sum" or "mean". Else, and for None, one is taken after the other.

    Your own subclass with a ``name`` and :meth:`apply` serves tables on one host, in processes
    that all import it. ``apply`` gets copies of the rows, each once, and what it raises leaves the
    table as it was. It runs with the table locked, so it must not use the table, and must leave the
    delta unchanged, which may be the caller's own tensor.

    Example:
        >>> from phalanx import tables
        >>> class Newest(tables.Updater):
        ...     name = "newest"
        ...     any_dtype = True
        ...
        ...     def apply(self, rows, delta, states):
        ...         rows.copy_(delta)
        >>> with tables.join() as world:
        ...     table = world.array(2, updater=Newest())
        ...     table.add([3, 4])
        ...     table.add([5], rows=[0])
        ...     table.get().tolist()
        [5.0, 4.0]
    """

    name: ClassVar[str] = ""
    states: ClassVar[tuple[str, ...]] = ()
    is_wide: ClassVar[bool] = False
    any_dtype: ClassVar[bool] = False
    merge: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        fits = self.merge in (None, "sum", "mean")
        check_argument(fits, "merge", "be 'sum' or 'mean'", self.merge)
        for option in _options_of(type(self)):
            # the share of the past that stays
            high = 1.0 if option in ("momentum", "beta1", "beta2") else math.inf
            value = getattr(self, option)
            fits = isinstance(value, int | float) and 0 <= value < high
            check_argument(fits, option, f"be a number from 0 to below {high:g}", value)

    @property
    def scale(self) -> float | None:
        """The factor of a delta that is only added: C does it (part.c), if `apply` is not given."""
        return None

    def apply(self, rows_KD: Tensor, delta_KD: Tensor, states: list[Tensor]) -> None:
        """Change rows and states in place.

        Args:
            rows_KD: The rows.
            delta_KD: The sum of what was added to each; (K, 2D) where the updater is wide.
            states: The updater's states of these rows.
        """
        raise NotImplementedError

    def options(self) -> dict[str, object]:
        """Return name and options, as :func:`parse_updater` reads them."""
        return {"name": self.name, **asdict(self)}


def _options_of(kind: type[Updater]) -> list[str]:
    return [option.name for option in fields(kind) if option.name != "merge"]


@dataclass(frozen=True, kw_only=True)
class Sum(Updater):
    """w += delta. Exact for integers; for floats one rounding per add, in the order of adds."""

    name: ClassVar[str] = "sum"
    any_dtype: ClassVar[bool] = True

    @property
    def scale(self) -> float:
        return 1


@dataclass(frozen=True, kw_only=True)
class Sgd(Updater):
    """w −= lr · g.

    Args:
        lr: The learning rate.
    """

    name: ClassVar[str] = "sgd"
    lr: float = 0.01

    @property
    def scale(self) -> float:
        return -self.lr


@dataclass(frozen=True, kw_only=True)
class Momentum(Updater):
    """s = momentum · s + g;  w −= lr · s.

    Args:
        lr: The learning rate.
        momentum: How much of the past stays, below 1.

    Source: as ``torch.optim.SGD(momentum=…)``; one state that all workers share.
    """

    name: ClassVar[str] = "momentum"
    states: ClassVar[tuple[str, ...]] = ("element",)
    lr: float = 0.01
    momentum: float = 0.9

    def apply(self, rows_KD: Tensor, delta_KD: Tensor, states: list[Tensor]) -> None:
        (s,) = states
        s.mul_(self.momentum).add_(delta_KD)
        rows_KD.add_(s, alpha=-self.lr)


@dataclass(frozen=True, kw_only=True)
class Nesterov(Momentum):
    """s = momentum · s + g;  w −= lr · (g + momentum · s).

    Args:
        lr: The learning rate; DiLoCo's outer step has 0.7.
        momentum: How much of the past stays, below 1.

    Source: as ``torch.optim.SGD(nesterov=True)``; DiLoCo, arXiv 2311.08105, algorithm 1.
    """

    name: ClassVar[str] = "nesterov"

    def apply(self, rows_KD: Tensor, delta_KD: Tensor, states: list[Tensor]) -> None:
        (s,) = states
        s.mul_(self.momentum).add_(delta_KD)
        rows_KD.add_(delta_KD, alpha=-self.lr)
        rows_KD.add_(s, alpha=-self.lr * self.momentum)


@dataclass(frozen=True, kw_only=True)
class AdaGrad(Updater):
    """h += g²;  w −= lr · g / (√h + eps).

    Args:
        lr: The learning rate.
        eps: Keeps the division away from 0.

    Source: Duchi et al., JMLR 2011; as ``torch.optim.Adagrad``.
    """

    name: ClassVar[str] = "adagrad"
    states: ClassVar[tuple[str, ...]] = ("element",)
    lr: float = 0.01
    eps: float = 1e-10

    def apply(self, rows_KD: Tensor, delta_KD: Tensor, states: list[Tensor]) -> None:
        (h,) = states
        gradient = delta_KD.to(h.dtype)
        h.add_(gradient.square())
        rows_KD.sub_((gradient * self.lr).div_(h.sqrt().add_(self.eps)))


@dataclass(frozen=True, kw_only=True)
class Adam(Updater):
    """m, v: moving averages of g and g², corrected by how often this row was touched.

    m = β₁m + (1−β₁)g;  v = β₂v + (1−β₂)g²;  w −= lr · m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + eps), with t
    the number of adds that touched the row.

    Args:
        lr: The learning rate.
        beta1: β₁, below 1.
        beta2: β₂, below 1.
        eps: Keeps the division away from 0.

    Source: Kingma and Ba, arXiv 1412.6980; for rows as ``torch.optim.SparseAdam``, but with t per
    row.
    """

    name: ClassVar[str] = "adam"
    states: ClassVar[tuple[str, ...]] = ("element", "element", "row")
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def apply(self, rows_KD: Tensor, delta_KD: Tensor, states: list[Tensor]) -> None:
        m, v, t = states
        gradient = delta_KD.to(m.dtype)
        m.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1)
        v.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        t.add_(1)
        steps = t.double()  # 1 − β₂ᵗ for small t cancels in float32
        bias1 = (1 - self.beta1**steps).to(m.dtype)
        bias2 = (1 - self.beta2**steps).to(m.dtype)
        rows_KD.sub_((m / bias1).mul_(self.lr).div_((v / bias2).sqrt_().add_(self.eps)))


@dataclass(frozen=True, kw_only=True)
class Blend(Updater):
    """w += weight · (v − w): moves the shared value towards a worker's, never beyond it.

    For running statistics (shared_module.py). Unlike a sum of differences it stays between the
    workers' values however late one is, so that a variance is never negative. Deltas are
    (v, weight).
    """

    name: ClassVar[str] = "blend"
    is_wide: ClassVar[bool] = True
    merge: str | None = field(default="mean", repr=False)

    def apply(self, rows_KD: Tensor, delta_KD: Tensor, states: list[Tensor]) -> None:  # noqa: ARG002
        value, weight = delta_KD.chunk(2, dim=1)
        rows_KD.lerp_(value, weight)


_BUILT_IN: dict[str, type[Updater]] = {
    kind.name: kind for kind in (Sum, Sgd, Momentum, Nesterov, AdaGrad, Adam, Blend)
}


def parse_updater(given: object) -> Updater:
    """Return the updater that was meant: by name, by name and options, or itself.

    Raises:
        ConfigError: It is none of these, the name or an option is unknown, or an option's value
            cannot be.
    """
    if isinstance(given, Updater):
        return given
    options = {"name": given} if isinstance(given, str) else given
    fits = isinstance(options, Mapping) and options.get("name") in _BUILT_IN
    wanted = f"be an updater, or one of {', '.join(map(repr, _BUILT_IN))}, or have its name"
    check_argument(fits, "updater", wanted, given)
    assert isinstance(options, Mapping)
    values = dict(options)
    kind = _BUILT_IN[values.pop("name")]
    known = _options_of(kind)
    fits = values.keys() <= {"merge", *known}
    check_argument(fits, "updater", f"have no options but {known}", given)
    return kind(**values)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the states of a table of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32

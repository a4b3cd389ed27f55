"""How the replicas' outputs come together again, leaf by leaf.

Shape legend: k parts; part i stands for size_i rows, B rows together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.plan.leaves import covering, covers, flatten, leaf_paths, named, unflatten
from phalanx.torch_internals import pytree
from phalanx.types import Nested

__all__ = ["Merge", "Merging", "join"]

_KINDS = ("cat", "stack", "mean", "sum", "first", "per_replica")
_SHOWN = 8  # shapes in an error; of more, each once
_WRITTEN = re.compile(r"\s*(\w+)\s*(?:\(\s*(-?\d+)?\s*\))?\s*")


@dataclass(frozen=True)
class Merge:
    """How one output leaf is merged; wherever one is expected, its text does too (``"cat(1)"``).

    ``cat(dim)`` concatenates; ``stack()`` makes one more dim in front, [k, …]; ``mean()`` weights
    by rows, so that replicas' means become the whole batch's; ``sum()`` adds in replica order;
    ``first()`` takes the first replica's; ``per_replica()`` is a list of all, each on its device.

    Example:
        >>> Merge.cat(1)
        Merge('cat(1)')
        >>> Merge.of("mean") == Merge.mean()
        True

    Raises:
        ConfigError: The text is no such rule.
    """

    kind: str
    dim: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(_no_rule(self.kind))

    @staticmethod
    def cat(dim: int = 0) -> Merge:
        """Concatenate along ``dim``."""
        return Merge("cat", dim)

    @staticmethod
    def stack() -> Merge:
        """Stack along a new first dim."""
        return Merge("stack")

    @staticmethod
    def mean() -> Merge:
        """Average, weighted by rows."""
        return Merge("mean")

    @staticmethod
    def sum() -> Merge:
        """Add."""
        return Merge("sum")

    @staticmethod
    def first() -> Merge:
        """Take the first replica's."""
        return Merge("first")

    @staticmethod
    def per_replica() -> Merge:
        """Leave them apart, in a list."""
        return Merge("per_replica")

    @staticmethod
    def of(rule: object) -> Merge:
        """Return ``rule``, read from its text where it is one."""
        if isinstance(rule, Merge):
            return rule
        match = _WRITTEN.fullmatch(rule) if isinstance(rule, str) else None
        if match is None or match[1] not in _KINDS or (match[2] and match[1] != "cat"):
            raise ConfigError(_no_rule(rule))
        return Merge(match[1], int(match[2] or 0))

    def __repr__(self) -> str:
        return f"Merge({self._text()!r})"

    def _text(self) -> str:
        return f"cat({self.dim})" if self.kind == "cat" else self.kind


def _no_rule(rule: object) -> str:
    return (
        "`output` must hold rules out of 'cat', 'cat(dim)', 'stack', 'mean', 'sum', 'first' and "
        f"'per_replica', but holds {rule!r}."
    )


@dataclass(frozen=True)
class _Part:
    """One leaf of one part."""

    leaf: Any  # Any: a leaf of the user's own outputs
    rows: int | None  # None: the leaf may have any


class Merging:
    """The rules for all leaves of a module's outputs.

    Args:
        output: A rule for all leaves, or rules by leaf path (``"loss"``, ``"0"``, ``"aux.1"``; a
            path covers what lies below it too, and one that ends with "?" may be missing). Leaves
            without one: tensors and arrays with dims are concatenated along ``dim``, scalars
            stacked to a vector of the parts, other values taken from the first part.
        noun: What errors call a part.
        way_out: What errors advise; default: other rules.

    Example:
        >>> merging = Merging({"loss": "mean"})
        >>> parts = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}]
        >>> merging.merge(parts, [2, 1])["loss"].item()
        2.0

    Raises:
        ConfigError: A rule is unknown; in :meth:`merge`: parts differ in structure, shapes cannot
            be merged so, or a path names no leaf. Nothing is merged then.
        UnsupportedError: In :meth:`merge`: a leaf is sparse or nested, and not left as it is.
    """

    def __init__(
        self,
        output: Merge | str | Mapping[str | int, Merge | str] | None = None,
        dim: int = 0,
        *,
        noun: str = "replica",
        way_out: str | None = None,
    ) -> None:
        self._dim = dim
        self._noun = noun
        self._plural = noun + ("es" if noun.endswith("ch") else "s")
        self._advised = way_out
        self._rules: dict[str, Merge] = {}
        self._optional: set[str] = set()
        self._whole: Merge | None = None
        if isinstance(output, Mapping):
            written = {str(path): Merge.of(rule) for path, rule in output.items()}
            self._rules = {path.removesuffix("?"): rule for path, rule in written.items()}
            self._optional = {path[:-1] for path in written if path.endswith("?")}
        elif output is not None:
            self._whole = Merge.of(output)

    def merge(
        self,
        parts: Sequence[Nested],
        sizes: Sequence[int] | None,
        home: torch.device | None = None,
    ) -> Nested:
        """Merge ``parts``, outputs for ``sizes`` rows each, on ``home`` (default: where they are).

        Args:
            sizes: None concatenates leaves without a rule whatever their sizes.

        Determinism: sums are taken in the order of the parts.
        """
        rows = [None] * len(parts) if sizes is None else sizes
        if self._whole is not None and self._whole.kind == "per_replica":
            return list(parts)
        flat = [flatten(part) for part in parts]
        spec = flat[0][1]
        for index, (_, other) in enumerate(flat):
            if other != spec:
                raise ConfigError(
                    f"`module` must return the same structure from every {self._noun}, but "
                    f"returned {_shown(spec)} from {self._noun} 0 and {_shown(other)} from "
                    f"{self._noun} {index}. {self._way_out('', 'per_replica')}"
                )
        paths = leaf_paths(parts[0])
        rules = self._rules_of(paths)
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return unflatten(
            [
                self._merge_leaf(path, rule, list(map(_Part, column, rows)), home)
                for path, rule, column in zip(paths, rules, columns, strict=True)
            ],
            spec,
        )

    def coincidences(self, parts: Sequence[Nested], sizes: Sequence[int]) -> set[str]:
        """Return the leaves whose size may be that of the slices by coincidence.

        Slices of the same rows do not tell [rows, steps, width] from a state of [layers, rows,
        width] where all of these sizes are equal.
        """
        if len(parts) == 1 or len(set(sizes)) > 1:
            return set()
        leaves, paths = flatten(parts[0])[0], leaf_paths(parts[0])
        return {
            path
            for path, rule, leaf in zip(paths, self._rules_of(paths), leaves, strict=True)
            if rule is None and isinstance(leaf, Tensor) and leaf.ndim > 2
            if list(leaf.shape).count(sizes[0]) > 1
        }

    def _rules_of(self, paths: Sequence[str]) -> list[Merge | None]:
        if not self._rules:
            return [self._whole] * len(paths)
        found = [covering(path, self._rules) for path in paths]
        for path in self._rules:
            known = path in found or any(covers(path, each) for each in paths)
            if not known and path not in self._optional:
                raise ConfigError(
                    f"`output` must name leaves that the module returns, but names {path!r}. It "
                    f"returned {', '.join(map(repr, paths))}. Write {path + '?'!r} for a leaf that "
                    "may be missing."
                )
        return [None if path is None else self._rules[path] for path in found]

    def _merge_leaf(
        self, path: str, rule: Merge | None, parts: list[_Part], home: torch.device | None
    ) -> Any:
        leaves = [part.leaf for part in parts]
        if rule is not None and rule.kind == "per_replica":
            return leaves
        if rule is None and all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
            return np.concatenate(leaves, self._default(path, parts).dim)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            self._refuse_values(path, rule, leaves)
            return leaves[0]
        self._check_dense(path, rule, leaves)
        if rule is not None and rule.kind == "mean":
            self._check_floating(path, leaves[0])
        if home is not None:
            leaves = [leaf.to(home) for leaf in leaves]
        if rule is None:
            rule = self._default(path, parts)
        if rule.kind == "first" or (len(leaves) == 1 and rule.kind in ("mean", "sum")):
            return leaves[0]
        self._check_shapes(path, rule, leaves)
        if rule.kind == "cat":
            return torch.cat(leaves, rule.dim)
        if rule.kind == "stack":
            return torch.stack(leaves)
        return _sum(leaves) if rule.kind == "sum" else _mean(leaves, [p.rows or 0 for p in parts])

    def _default(self, path: str, parts: list[_Part]) -> Merge:
        """Concatenate what has its slice's rows, stack scalars, refuse the rest."""
        if all(part.leaf.ndim == 0 for part in parts):
            return Merge.stack()
        dim = self._dim
        for part in parts:
            if part.rows is None:
                continue
            shape = part.leaf.shape
            if not -len(shape) <= dim < len(shape) or shape[dim] != part.rows:
                raise ConfigError(
                    f"Output {named(path)} of `module` must have its slice's {part.rows} rows "
                    f"along dim {dim}, but has shape {tuple(shape)}. Return one row per sample, or "
                    f"a scalar per replica. {self._way_out(path, 'first')}"
                )
        return Merge.cat(dim)

    def _check_shapes(self, path: str, rule: Merge, leaves: list[Tensor]) -> None:
        shapes = [list(leaf.shape) for leaf in leaves]
        if rule.kind == "cat":
            if all(-len(shape) <= rule.dim < len(shape) for shape in shapes):
                for shape in shapes:
                    shape[rule.dim] = 0
            else:
                shapes.append([-1])  # a dim that one of them has not fits nothing
        if any(shape != shapes[0] for shape in shapes):
            found = [str(tuple(leaf.shape)) for leaf in leaves]
            told = ", ".join(found if len(found) <= _SHOWN else dict.fromkeys(found))
            raise ConfigError(
                f"Output {named(path)} of `module` must have shapes that {rule._text()!r} can "
                f"merge, but {self._plural} returned {told}. {self._way_out(path, 'per_replica')}"
            )

    def _refuse_values(self, path: str, rule: Merge | None, leaves: list[Any]) -> None:
        """What is no tensor can be taken from the first part only, and if none is a tensor."""
        mixed = any(isinstance(leaf, Tensor) for leaf in leaves)
        if (rule is None and mixed) or (rule is not None and rule.kind != "first"):
            kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves))
            how = "a tensor on all or none" if rule is None else "a tensor"
            by = "" if rule is None else f" by {rule._text()!r}"
            raise ConfigError(
                f"Output {named(path)} of `module` must be {how} to be merged{by}, but is "
                f"{kinds}. {self._choices('first', 'per_replica')}"
            )

    def _check_dense(self, path: str, rule: Merge | None, leaves: list[Tensor]) -> None:
        """Refuse to put together what has no rows that lie one behind the other."""
        kind = "cat" if rule is None else rule.kind
        for leaf in leaves if kind != "first" else ():
            sparse = leaf.layout is not torch.strided and kind in ("cat", "stack")
            if leaf.is_nested or sparse:
                told = "nested" if leaf.is_nested else f"of layout {leaf.layout}"
                raise UnsupportedError(
                    f"Output {named(path)} of `module` must be dense to be merged by {kind!r}, "
                    f"but is {told}. {self._choices('per_replica', 'first')}"
                )

    def _check_floating(self, path: str, leaf: Tensor) -> None:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise ConfigError(
                f"Output {named(path)} of `module` must be floating to be merged by 'mean', but "
                f"is {leaf.dtype}. {self._choices('sum', 'first')}"
            )

    def _choices(self, *rules: str) -> str:
        if self._advised is not None:
            return self._advised
        return f"Give it {' or '.join(map(repr, rules))} in `output`."

    def _way_out(self, path: str, rule: str) -> str:
        if self._advised is not None:
            return self._advised
        told = f"{{{path!r}: {rule!r}}}" if path else repr(rule)
        return f"Or say how it is merged: output={told}."


def join(parts: Sequence[Nested], sizes: Sequence[int], dim: int = 0) -> Nested:
    """Merge the replicas' outputs as :class:`Merging` does without rules."""
    return Merging(dim=dim).merge(parts, sizes)


def _sum(leaves: list[Tensor]) -> Tensor:
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    return total


def _mean(leaves: list[Tensor], rows: list[int]) -> Tensor:
    """Weight by rows; a part without rows, whose mean is NaN, is left out if others have some."""
    sizes = rows if any(rows) else [1] * len(rows)
    pairs = [(leaf, size) for leaf, size in zip(leaves, sizes, strict=True) if size]
    return _sum([leaf * (size / sum(sizes)) for leaf, size in pairs])


def _shown(spec: pytree.TreeSpec) -> str:
    """Show a structure by an example of it, with a star for each leaf."""
    return repr(unflatten([_Star()] * spec.num_leaves, spec))


class _Star:
    def __repr__(self) -> str:
        return "*"

"""How the replicas' outputs come together again, leaf by leaf.

Shape legend: k parts; part i stands for size_i rows, B rows together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan.leaves import covering, covers, flatten, leaf_paths, named, unflatten
from phalanx.types import Nested

__all__ = ["Merging"]

_KINDS = ("cat", "stack", "mean", "sum", "first", "per_replica")
_WRITTEN = re.compile(r"\s*(\w+)\s*(?:\(\s*(-?\d+)?\s*\))?\s*")


class _Rule(NamedTuple):
    """A rule as it was read from its text."""

    kind: str
    dim: int = 0

    @staticmethod
    def of(text: object) -> _Rule:
        match = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[1] not in _KINDS or (match[2] and match[1] != "cat"):
            raise ConfigError(
                "`output` must hold rules out of 'cat', 'cat(dim)', 'stack', 'mean', 'sum', "
                f"'first' and 'per_replica', but holds {text!r}."
            )
        return _Rule(match[1], int(match[2] or 0))

    def __str__(self) -> str:
        return f"cat({self.dim})" if self.kind == "cat" else self.kind


class Merging:
    """The rules for all leaves of a module's outputs.

    ``"cat(dim)"`` concatenates; ``"stack"`` makes one more dim in front, [k, …]; ``"mean"`` weights
    by rows, so that replicas' means become the whole batch's; ``"sum"`` adds in replica order;
    ``"first"`` takes the first replica's; ``"per_replica"`` is a list of all, each on its device.

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
    """

    def __init__(
        self,
        output: str | Mapping[str | int, str] | None = None,
        dim: int = 0,
        *,
        noun: str = "replica",
        way_out: str | None = None,
    ) -> None:
        self._dim = dim
        self._noun = noun
        self._advised = way_out
        self._rules: dict[str, _Rule] = {}
        self._optional: set[str] = set()
        self._whole: _Rule | None = None
        self._unambiguous: set[str] = set()  # paths of leaves seen to have their rows along `dim`
        if isinstance(output, Mapping):
            written = {str(path): _Rule.of(rule) for path, rule in output.items()}
            self._rules = {path.removesuffix("?"): rule for path, rule in written.items()}
            self._optional = {path[:-1] for path in written if path.endswith("?")}
        elif output is not None:
            self._whole = _Rule.of(output)

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
        if self._whole is not None and self._whole.kind == "per_replica":
            return list(parts)
        flat = [flatten(part) for part in parts]
        spec = flat[0][1]
        for index, (_, other) in enumerate(flat):
            if other != spec:
                raise ConfigError(
                    f"`module` must return the same structure from every {self._noun}, but "
                    f"returned {spec!s:.120} from {self._noun} 0 and {other!s:.120} from "
                    f"{self._noun} {index}. {self._way_out('', 'per_replica')}"
                )
        paths = leaf_paths(parts[0])
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        merged = [
            self._merge_leaf(path, rule, column, sizes, home)
            for path, rule, column in zip(paths, self._rules_of(paths), columns, strict=True)
        ]
        return unflatten(merged, spec)

    def refuse_ambiguous(self, parts: Sequence[Nested], sizes: Sequence[int]) -> None:
        """Refuse outputs whose slices could have their rows along the next dim as well.

        Where all slices have as many rows as there are layers, a state of [layers, rows, width] has
        the shape of [rows, steps, width]. A leaf that other sizes have shown to have its rows along
        ``dim`` is accepted from then on.

        Args:
            parts: At least two, which can be merged.
        """
        rows = sizes[0] if len(set(sizes)) == 1 else None
        paths = leaf_paths(parts[0])
        leaves = zip(paths, self._rules_of(paths), flatten(parts[0])[0], strict=True)
        for path, rule, leaf in leaves:
            if rule is not None or path in self._unambiguous or not isinstance(leaf, Tensor):
                continue
            if leaf.ndim > 2:
                dim = self._dim % leaf.ndim
                if rows in leaf.shape[dim + 1 : dim + 2]:
                    raise ConfigError(
                        f"Output {named(path)} of `module` must show where its rows are, but has "
                        f"its slice's {rows} along dim {dim} and along dim {dim + 1}. "
                        f"{self._way_out(path, f'cat({dim})')}"
                    )
            self._unambiguous.add(path)

    def _rules_of(self, paths: Sequence[str]) -> list[_Rule | None]:
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

    # Any, here and below: leaves of the user's own outputs.
    def _merge_leaf(
        self,
        path: str,
        rule: _Rule | None,
        leaves: Sequence[Any],
        sizes: Sequence[int] | None,
        home: torch.device | None,
    ) -> Any:
        if rule is not None and rule.kind == "per_replica":
            return list(leaves)
        if rule is None and all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
            return np.concatenate(leaves, self._default(path, leaves, sizes).dim)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            self._check_values(path, rule, leaves)
            return leaves[0]
        here = leaves if home is None else [leaf.to(home) for leaf in leaves]
        rule = self._default(path, here, sizes) if rule is None else rule
        if rule.kind == "first" or (len(here) == 1 and rule.kind in ("mean", "sum")):
            return here[0]
        self._check_shapes(path, rule, here)
        if rule.kind == "cat":
            return torch.cat(list(here), rule.dim)
        if rule.kind == "stack":
            return torch.stack(list(here))
        return _sum(here) if rule.kind == "sum" else _mean(here, sizes or [1] * len(here))

    def _default(self, path: str, leaves: Sequence[Any], sizes: Sequence[int] | None) -> _Rule:
        """Concatenate what has its slice's rows, stack scalars, refuse the rest."""
        if all(leaf.ndim == 0 for leaf in leaves):
            return _Rule("stack")
        dim = self._dim
        for leaf, rows in zip(leaves, sizes or [], strict=False):
            if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != rows:
                raise ConfigError(
                    f"Output {named(path)} of `module` must have its slice's {rows} rows along "
                    f"dim {dim}, but has shape {tuple(leaf.shape)}. Return one row per sample, or "
                    f"a scalar per replica. {self._way_out(path, 'first')}"
                )
        return _Rule("cat", dim)

    def _check_shapes(self, path: str, rule: _Rule, leaves: Sequence[Tensor]) -> None:
        shapes = [list(leaf.shape) for leaf in leaves]
        if rule.kind == "cat" and all(-len(each) <= rule.dim < len(each) for each in shapes):
            for shape in shapes:
                shape[rule.dim] = 0
        elif rule.kind == "cat":
            shapes.append([-1])  # a dim that one of them has not fits nothing
        if any(shape != shapes[0] for shape in shapes):
            found = dict.fromkeys(str(tuple(leaf.shape)) for leaf in leaves)
            parts = f"{self._noun}{'es' if self._noun.endswith('ch') else 's'}"
            raise ConfigError(
                f"Output {named(path)} of `module` must have shapes that {str(rule)!r} can merge, "
                f"but {parts} returned {', '.join(found)}. {self._way_out(path, 'per_replica')}"
            )

    def _check_values(self, path: str, rule: _Rule | None, leaves: Sequence[Any]) -> None:
        """Refuse to merge values by a rule for tensors, and tensors of some parts only."""
        mixed = any(isinstance(leaf, Tensor) for leaf in leaves)
        if (rule is None and mixed) or (rule is not None and rule.kind != "first"):
            kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves))
            how = "a tensor on all or none" if rule is None else "a tensor"
            raise ConfigError(
                f"Output {named(path)} of `module` must be {how} to be merged"
                f"{'' if rule is None else f' by {str(rule)!r}'}, but is {kinds}. "
                f"{self._way_out(path, 'first')}"
            )

    def _way_out(self, path: str, rule: str) -> str:
        if self._advised is not None:
            return self._advised
        told = f"{{{path!r}: {rule!r}}}" if path else repr(rule)
        return f"Or say how it is merged: output={told}."


def _sum(leaves: Sequence[Tensor]) -> Tensor:
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    return total


def _mean(leaves: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Weight by rows; a part without rows, whose mean is NaN, is left out if others have some."""
    sizes = rows if any(rows) else [1] * len(rows)
    pairs = [(leaf, size) for leaf, size in zip(leaves, sizes, strict=True) if size]
    return _sum([leaf * (size / sum(sizes)) for leaf, size in pairs])

"""The merging of the replicas' outputs, leaf by leaf.

Shape legend: k parts; part i stands for size_i rows, B rows together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.plan.leaves import covering, flatten, leaf_paths, named, unflatten
from phalanx.types import Nested

_RULE = re.compile(r"cat\((-?\d+)\)|cat|stack|mean|sum|first|per_replica")


# Any, in this file: leaves of the user's own outputs.
def merge_leaves(
    parts: Sequence[Nested],
    merge: Callable[[str, Sequence[Any]], Any],
    noun: str,
    is_leaf: Sequence[Callable[[Any], bool]] | None = None,
) -> Nested:
    """Return a value of the parts' structure, with their leaves merged place by place.

    Args:
        merge: (path, the leaf of each part) -> what becomes of them.
        noun: A part's name in messages.
        is_leaf: A test of the nodes of each part, as `flatten` takes one.

    Raises:
        ConfigError: Parts differ in their structure.
    """
    no_tests: list[Callable[[Any], bool] | None] = [None] * len(parts)
    tests = is_leaf or no_tests
    flat = [flatten(part, test) for part, test in zip(parts, tests, strict=True)]
    spec = flat[0][1]
    for index, (_, other) in enumerate(flat):
        if other != spec:
            raise ConfigError(
                f"Outputs must be of one structure for every {noun}, but are {spec!s:.120} for "
                f"{noun} 0 and {other!s:.120} for {noun} {index}. Return the same leaves for all."
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    paths = leaf_paths(parts[0], tests[0])
    return unflatten([merge(*each) for each in zip(paths, columns, strict=True)], spec)


class Merging:
    """The rules for all leaves of a module's outputs.

    ``"cat(dim)"`` concatenates; ``"stack"`` makes one more dim in front, [k, …]; ``"mean"`` weights
    by rows, so that replicas' means become the whole batch's; ``"sum"`` adds in replica order;
    ``"first"`` takes the first replica's; ``"per_replica"`` is a list of all, each on its device.

    Args:
        output: A rule for all leaves, or rules by leaf path (``"loss"``, ``"0"``, ``"aux.1"``); a
            path covers all leaves below it, and one that the outputs lack is ignored. Leaves
            without a rule: tensors and arrays with dims are concatenated along ``dim``, scalars
            stacked to a vector of the parts, other values taken from the first part.
        noun: A part's name in messages.
        way_out: What errors advise.

    Example:
        >>> merging = Merging({"loss": "mean"})
        >>> parts = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}]
        >>> merging.merge(parts, [2, 1])["loss"].item()
        2.0

    Raises:
        ConfigError: A rule is unknown; in :meth:`merge`: parts differ in structure, or shapes
            cannot be merged so.
    """

    def __init__(
        self,
        output: str | Mapping[str | int, str] | None = None,
        dim: int = 0,
        *,
        noun: str = "replica",
        way_out: str = "Give a rule that fits, such as 'first', by `output=`.",
    ) -> None:
        self._dim = dim
        self._noun = noun
        self._way_out = way_out
        self._whole: str | None = None
        self._rules: dict[str, str] = {}
        if isinstance(output, Mapping):
            self._rules = {str(path): rule for path, rule in output.items()}
        else:
            self._whole = output
        given: list[Any] = [*self._rules.values(), "cat" if self._whole is None else self._whole]
        for rule in given:
            if not isinstance(rule, str) or not _RULE.fullmatch(rule):
                raise ConfigError(
                    "`output` must hold rules out of 'cat', 'cat(dim)', 'stack', 'mean', 'sum', "
                    f"'first' and 'per_replica', but holds {rule!r}."
                )

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
        if self._whole == "per_replica":
            return list(parts)

        def merge(path: str, leaves: Sequence[Any]) -> Any:
            rule = self._whole or self._rules.get(covering(path, self._rules) or "")
            if rule == "per_replica":
                return list(leaves)
            try:
                return self._merged(rule, leaves, sizes, home)
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                by_rule = "" if rule is None else f" by {rule!r}"
                raise ConfigError(
                    f"Output {named(path)} of `module` cannot be merged{by_rule}: "
                    f"{str(error).rstrip('.')}. {self._way_out}"
                ) from error

        return merge_leaves(parts, merge, self._noun)

    def _merged(
        self,
        rule: str | None,
        leaves: Sequence[Any],
        sizes: Sequence[int] | None,
        home: torch.device | None,
    ) -> Any:
        """Merge one leaf by its rule, if it has one."""
        are_tensors = all(isinstance(leaf, Tensor) for leaf in leaves)
        if are_tensors and home is not None:
            leaves = [leaf.to(home) for leaf in leaves]
        if rule is None:
            if not all(isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves):
                if any(isinstance(leaf, Tensor) for leaf in leaves):
                    raise TypeError("it is a tensor in some of them only")
                return leaves[0]
            rule = self._default(leaves, sizes or [])
            if not are_tensors:
                return np.concatenate(leaves, self._dim) if rule != "stack" else leaves[0]
        if rule == "first":
            return leaves[0]
        if rule.startswith("cat"):
            match = _RULE.fullmatch(rule)
            return torch.cat(list(leaves), int(match[1] or 0) if match else 0)
        if rule == "stack":
            return torch.stack(list(leaves))
        if len({leaf.shape for leaf in leaves}) > 1:
            raise ValueError(f"shapes are {', '.join(str(tuple(leaf.shape)) for leaf in leaves)}")
        if len(leaves) == 1:
            return leaves[0]
        return reduce(add, leaves) if rule == "sum" else _mean(leaves, sizes or [1] * len(leaves))

    def _default(self, leaves: Sequence[Any], sizes: Sequence[int]) -> str:
        """Stack scalars, concatenate leaves that have their slice's rows, refuse the rest."""
        if all(leaf.ndim == 0 for leaf in leaves):
            return "stack"
        dim = self._dim
        for leaf, rows in zip(leaves, sizes, strict=False):
            if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != rows:
                raise ValueError(
                    f"it must have its slice's {rows} rows along dim {dim}, but has shape "
                    f"{tuple(leaf.shape)}"
                )
        return f"cat({dim})"


def _mean(leaves: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Weight by rows; a part without rows, whose mean is NaN, is left out if others have some."""
    sizes = rows if any(rows) else [1] * len(rows)
    pairs = [(leaf, size) for leaf, size in zip(leaves, sizes, strict=True) if size]
    return reduce(add, [leaf * (size / sum(sizes)) for leaf, size in pairs])

"""Cases of several factors: every pair of values for every change, the whole product by night."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*factors: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return places in ``factors``, few of the product, that hold every two values together.

    Greedy and without chance: whichever case has most of the pairs that are still missing.
    """
    cases = list(product(*(range(len(values)) for values in factors)))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def in_pairs(names: str, *factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with the product of ``factors``; what is beyond `pairwise` is marked `night`."""
    gate = set(pairwise(*factors))
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(values[place] for values, place in zip(factors, case, strict=True)),
                marks=[] if case in gate else pytest.mark.night,
                id="-".join(
                    _shown(values[place]) for values, place in zip(factors, case, strict=True)
                ),
            )
            for case in product(*(range(len(values)) for values in factors))
        ],
    )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return getattr(value, "__name__", None) or str(value).removeprefix("torch.")

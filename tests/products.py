"""Cases of several factors: some of the product for every change, the whole of it by night."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*factors: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return places in ``factors`` that hold every value of two, or every pair of three and more.

    Greedy and without chance: whichever case has most of the values or pairs still missing.
    """
    cases = list(product(*(range(len(values)) for values in factors)))
    together = 1 if len(factors) == 2 else 2
    pairs = {case: set(combinations(enumerate(case), together)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def some_by_day(names: str, *factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with the product of ``factors``; cases beyond `covering` are marked `night`."""
    gate = set(covering(*factors))
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

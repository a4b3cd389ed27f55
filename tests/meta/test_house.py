"""No name of the package stands twice, and `make house` counts the functions that a call passes."""

from __future__ import annotations

from phalanx.plan import equal_sizes, ranges_of
from tests.meta.house import class_names, doubled, file_names, profiled
from tests.meta.source import read_house


def test_no_class_and_no_file_of_the_package_has_anothers_name() -> None:
    assert doubled(class_names(read_house())) == {}
    assert doubled(file_names(read_house())) == {}


def test_a_walk_counts_what_the_package_itself_calls() -> None:
    with profiled() as measure:
        walk = measure(lambda: [equal_sizes(5, 2), equal_sizes(6, 2), ranges_of(5, 2)])
    assert walk.files >= {"plan/slices.py"}
    names = {code.co_name for code in walk.functions}
    assert names >= {"equal_sizes", "ranges_of"}
    assert not any(name.startswith("test_") for name in names)

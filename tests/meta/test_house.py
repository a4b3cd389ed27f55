"""The figures of `make house`, on planted modules and a planted walk."""

from __future__ import annotations

from phalanx.plan import equal_sizes, ranges_of
from tests.meta.house import (
    class_names,
    count_code,
    doubled,
    file_names,
    profiled,
)
from tests.meta.source import Module, read_house


def test_no_class_and_no_file_of_the_package_has_anothers_name() -> None:
    assert doubled(class_names(read_house())) == {}
    assert doubled(file_names(read_house())) == {}


def test_lines_of_code_are_those_without_prose_and_blanks() -> None:
    text = (
        '"""A module."""\n\n# why\nx = 1  # beside\n\ndef f():\n    """Do.\n\n    More.\n    """\n'
    )
    assert count_code(Module("plan/a.py", text)) == 2


def test_a_walk_counts_what_the_package_itself_calls() -> None:
    with profiled() as measure:
        walk = measure(lambda: [equal_sizes(5, 2), equal_sizes(6, 2), ranges_of(5, 2)])
    assert walk.files >= {"plan/slices.py"}
    names = {code.co_name for code in walk.functions}
    assert names >= {"equal_sizes", "ranges_of"}
    assert not any(name.startswith("test_") for name in names)
    assert walk.calls >= 3
    assert walk.changes_of_room == 0

"""The figures of `make house`, on planted modules and a planted walk."""

from __future__ import annotations

from phalanx.plan import equal_sizes, read_sizes
from tests.meta.house import (
    class_names,
    count_code,
    doubled,
    executor_kinds,
    file_names,
    profiled,
    questions_of_kind,
)
from tests.meta.source import Module, read_house

PLANTED = [
    Module("execution/contract.py", "class Executor: ...\nclass Job: ..."),
    Module("execution/threads.py", "class ThreadExecutor(Executor): ...\nclass Job: ..."),
    Module("execution/__init__.py", "isinstance(executor, ThreadExecutor)"),
    Module("train/threads.py", "x = 1\nisinstance(executor, int | ThreadExecutor)"),
    Module("train/__init__.py", "isinstance(executor, Executor)"),
]


def test_names_that_stand_twice_are_counted() -> None:
    assert doubled(class_names(PLANTED)) == {"Job": 2}
    assert doubled(file_names(PLANTED)) == {"threads.py": 2}


def test_no_class_and_no_file_of_the_package_has_anothers_name() -> None:
    assert doubled(class_names(read_house())) == {}
    assert doubled(file_names(read_house())) == {}


def test_questions_of_an_executors_kind_are_found_outside_its_room() -> None:
    assert questions_of_kind(PLANTED, executor_kinds(PLANTED)) == ["train/threads.py:2"]


def test_lines_of_code_are_those_without_prose_and_blanks() -> None:
    text = (
        '"""A module."""\n\n# why\nx = 1  # beside\n\ndef f():\n    """Do.\n\n    More.\n    """\n'
    )
    assert count_code(Module("plan/a.py", text)) == 2


def test_a_walk_counts_what_the_package_itself_calls() -> None:
    with profiled() as measure:
        walk = measure(lambda: [equal_sizes(5, 2), equal_sizes(6, 2), read_sizes([2, 3], 5, 2)])
    assert walk.files >= {"plan/slices.py"}
    names = {code.co_name for code in walk.functions}
    assert names >= {"equal_sizes", "read_sizes", "_check_total"}
    assert not any(name.startswith("test_") for name in names)
    assert walk.calls >= 7
    assert walk.changes_of_room == 0

"""Each promise has a test, each marker a promise, and docs/promises.md says what they say."""

from __future__ import annotations

import pytest

from tests.promises import (
    PAGE,
    Holder,
    Promise,
    find_holders,
    holders_in,
    mistakes,
    read_promises,
    write_page,
)


def test_each_promise_has_a_test_and_the_page_says_which() -> None:
    promises, holders = read_promises(), find_holders()
    assert mistakes(promises, holders) == []
    assert PAGE.read_text(encoding="utf-8") == write_page(promises, holders), "`make promises`"


def test_the_pages_that_promises_name_exist() -> None:
    assert [each.page for each in read_promises() if not (PAGE.parent / each.page).exists()] == []


KEPT = Promise("kept", "It is kept.", "training.md")


@pytest.mark.parametrize(
    ("promises", "ids", "found"),
    [
        ([KEPT], ["kept"], []),
        ([KEPT], [], ["kept: no test"]),
        ([KEPT], ["kept", "keptt"], ["keptt: unknown, in t.py"]),
        ([KEPT, KEPT], ["kept"], ["an id stands twice"]),
    ],
)
def test_what_does_not_fit_is_found(
    promises: list[Promise], ids: list[str], found: list[str]
) -> None:
    assert mistakes(promises, [Holder("t.py", "test", tuple(ids))]) == found


def test_markers_of_tests_and_files_are_read() -> None:
    text = """
pytestmark = [pytest.mark.slow, pytest.mark.promise("a")]
@pytest.mark.promise("b", "c")
def test_it(): ...
"""
    assert list(holders_in("t.py", text)) == [
        Holder("t.py", "", ("a",)),
        Holder("t.py", "test_it", ("b", "c")),
    ]

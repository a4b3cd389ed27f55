"""Which rank failed first, and what a job may be."""

from __future__ import annotations

import json
import sys

import pytest

from phalanx.launching.rank_failures import FailureNote, describe_failures
from phalanx.launching.rank_start import record_failures


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([FailureNote(0, 1, at_s=7.75), FailureNote(1, 3, at_s=7.25)], 1),
        ([FailureNote(0, 1, at_s=7.0, is_echo=True), FailureNote(1, 3, at_s=8.0)], 1),
        ([FailureNote(0, 1, at_s=7.0), FailureNote(1, -9)], 1),
        ([FailureNote(0, -15), FailureNote(1, 1, at_s=7.0, is_echo=True)], 1),
    ],
    ids=["the earlier one", "no echo", "one that was killed", "none that the launcher ended"],
)
def test_the_cause_is(failures, first):
    assert describe_failures(failures).rank == first


def test_the_others_that_failed_are_named():
    told = describe_failures(
        [
            FailureNote(0, 1, at_s=7.5),
            FailureNote(1, 3, "…", at_s=7.25),
            FailureNote(2, 1, at_s=7.75),
            FailureNote(3, -15),
        ]
    )
    assert str(told) == "Rank 1 ended with exit code 3. Ranks 0, 2 failed as well.\n…"
    assert (told.rank, told.exit_code) == (1, 3)


@pytest.mark.parametrize(("given", "noted"), [(3, 3), (-1, 255), ("no", 1), (True, 1)])
def test_a_rank_notes_the_exit_code_that_it_is_about_to_end_with(
    given, noted, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        record_failures(lambda: sys.exit(given))
    said = json.loads((tmp_path / "error.json").read_text())
    assert said["exit_code"] == noted

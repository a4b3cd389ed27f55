"""Which rank failed first, and what a job may be."""

from __future__ import annotations

import json
import sys

import pytest

from phalanx.launching.rank_failures import RankFailure, describe_failures
from phalanx.launching.rank_start import record_failures


def failure(
    exit_code: int, at_s: float | None = None, is_echo: bool = False, code: int = 1
) -> RankFailure:
    if at_s is None:
        return RankFailure(exit_code)
    note = {"at_s": at_s, "exit_code": code, "is_echo": is_echo, "message": "…"}
    return RankFailure(exit_code, note)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: failure(1, 7.75), 1: failure(3, 7.25)}, 1),
        ({0: failure(1, 7.0, is_echo=True), 1: failure(3, 8.0)}, 1),
        ({0: failure(1, 7.0), 1: failure(-9)}, 1),
        ({0: failure(-15), 1: failure(1, 7.0, is_echo=True)}, 1),
    ],
    ids=["the earlier one", "no echo", "one that was killed", "none that the launcher ended"],
)
def test_the_cause_is(failures, first):
    assert describe_failures(failures).rank == first


def test_who_failed_and_was_ended_on_its_way_out_did_not_die_of_that():
    failures = {
        0: failure(1, 7.5),
        1: failure(-15, 7.25, code=3),
        2: failure(-15, 7.75),
        3: failure(-15),
    }
    told = describe_failures(failures)
    assert str(told) == ("Rank 1 ended with exit code 3. Ranks 0, 2 failed as well.\n…")
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

"""Which rank failed first, and what a job may be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from phalanx.launching.rank_failures import describe_failures, first_failure
from phalanx.launching.rank_start import record_failures


def failure(
    folder: Path, exitcode: int, at_s: float | None = None, echo: bool = False, code: int = 1
) -> ProcessFailure:
    path = folder / f"{len(list(folder.iterdir()))}.json"
    if at_s is None:
        return ProcessFailure(0, 1, exitcode, str(path))
    extra = {
        "timestamp": str(int(at_s)),
        "at_s": at_s,
        "exit_code": code,
        "echo": echo,
        "py_callstack": "…\n\nAt:\n  work.py(67): raise_error\n",
    }
    path.write_text(json.dumps({"message": {"message": "it failed", "extraInfo": extra}}))
    return ProcessFailure(0, 1, exitcode, str(path))


def test_the_first_to_write_down_its_failure_is_the_cause(tmp_path):
    failures = {0: failure(tmp_path, 1, 7.75), 1: failure(tmp_path, 3, 7.25)}
    assert first_failure(failures) == 1


def test_who_lost_a_peer_is_an_echo_even_if_it_was_first(tmp_path):
    failures = {0: failure(tmp_path, 1, 7.0, echo=True), 1: failure(tmp_path, 3, 8.0)}
    assert first_failure(failures) == 1


def test_who_was_killed_could_not_write_and_is_the_cause(tmp_path):
    failures = {0: failure(tmp_path, 1, 7.0), 1: failure(tmp_path, -9)}
    assert first_failure(failures) == 1


def test_who_was_ended_by_the_launcher_is_not_the_cause(tmp_path):
    failures = {0: failure(tmp_path, -15), 1: failure(tmp_path, 1, 7.0, echo=True)}
    assert first_failure(failures) == 1


def test_who_failed_and_was_ended_on_its_way_out_did_not_die_of_that(tmp_path):
    failures = {
        0: failure(tmp_path, 1, 7.5),
        1: failure(tmp_path, -15, 7.25, code=3),
        2: failure(tmp_path, -15, 7.75),
        3: failure(tmp_path, -15),
    }
    told = describe_failures(failures)
    assert str(told) == ("Rank 1 (process 1) ended with exit code 3. Ranks 0, 2 failed as well.\n…")
    assert (told.rank, told.exit_code) == (1, 3)


@pytest.mark.parametrize(("given", "noted"), [(3, 3), (-1, 255), ("no", 1), (True, 1)])
def test_a_rank_notes_the_exit_code_that_it_is_about_to_end_with(
    given, noted, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        record_failures(lambda: sys.exit(given))
    said = json.loads((tmp_path / "error.json").read_text())
    assert said["message"]["extraInfo"]["exit_code"] == noted

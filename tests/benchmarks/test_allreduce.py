"""What `make bench-allreduce` makes of its measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.allreduce import BUSY, Timing, busy_processes, report_allreduce, target
from benchmarks.machine import describe_machine
from benchmarks.mpi import has_mpi, measure_mpi
from benchmarks.report import Judged
from phalanx.errors import PeerLost

TIMINGS = [
    Timing(ranks=2, num_bytes=4096, seconds={"phalanx": [3e-5, 2e-5, 9e-5], "gloo": [6e-4] * 3}),
    Timing(ranks=2, num_bytes=1 << 22, seconds={"phalanx": [1e-3] * 3, "gloo": [4e-3] * 3}),
    Timing(ranks=4, num_bytes=1 << 22, seconds={"phalanx": [2e-3] * 3, "gloo": [4e-3] * 3}),
]


def rows_of(*timings: Timing) -> list[tuple]:
    report = report_allreduce(timings, {}, describe_machine(), "", 6e9)
    return [row.cells for row in report.sheets[0].rows if row.cells]


def met(*cells: object) -> list[bool | None]:
    return [cell.met if isinstance(cell, Judged) else None for cell in cells]


def test_targets_are_judged_by_size_and_ranks():
    small, large, four = rows_of(*TIMINGS)
    assert met(*small) == [True, None, True, None]
    assert met(*large) == [None, None, False, True]
    assert met(*four) == [None, None, True, None]
    assert (small[2].value, large[3].value) == (pytest.approx(20), pytest.approx(4.194304))


def test_mpi_stands_beside_where_it_was_measured():
    two, four, without = rows_of(
        replace(TIMINGS[1], seconds={**TIMINGS[1].seconds, "mpi": [2e-3] * 3}),
        replace(TIMINGS[2], seconds={**TIMINGS[2].seconds, "mpi": [9e-3] * 3}),
        TIMINGS[2],
    )
    assert (two[4].value, two[4].met) == (2.0, False)
    assert four[3:5] == (9000, 4.5)
    assert without[3:5] == (None, None)


@pytest.mark.skipif(not has_mpi(), reason="needs mpirun and the package mpi4py")
def test_mpi_is_timed_in_ranks_of_its_own():
    assert [len(s) for s in measure_mpi(2, {4096: 3, 1 << 20: 1}, 2).values()] == [2, 2]


@pytest.mark.skipif(not has_mpi(), reason="needs mpirun and the package mpi4py")
def test_ranks_of_mpi_that_fail_say_why():
    with pytest.raises(PeerLost, match="Contestant `mpi`: process 0 of 1 ended"):
        measure_mpi(2, {-4: 1}, 1)


def test_beside_other_work_no_call_shall_be_slower_than_gloos():
    quick = replace(TIMINGS[0], busy=1)
    slow = replace(TIMINGS[1], busy=2, seconds={"phalanx": [5e-3], "gloo": [4e-3]})
    one, two = rows_of(quick, slow)
    assert met(*one) == [None, None, True, None]
    assert met(*two) == [None, None, False, None]


def test_busy_processes_end_with_the_body():
    before = children()
    with busy_processes(2):
        busy = children() - before
        assert len(busy) == 2
    assert not children() & busy


def children() -> set[int]:
    """Return the processes that this one has started, by number."""
    return {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()}


def test_sizes_between_have_no_target():
    assert target(Timing(ranks=2, num_bytes=256 << 10, seconds={})) is None


@pytest.mark.night
def test_the_command_measures_and_writes(tmp_path: Path):
    words = ["allreduce", "--ranks", "2", "--rounds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "allreduce.png").exists()
    timings = json.loads((tmp_path / "allreduce.json").read_text())["measured"]["timings"]
    assert timings[0]["num_bytes"] == 4096
    assert all(min(each["seconds"]["phalanx"]) > 0 for each in timings)
    assert {each["busy"] for each in timings} == {0, *BUSY}

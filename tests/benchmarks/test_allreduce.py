"""What `make bench-allreduce` makes of its measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.allreduce import BUSY, _counts, busy_processes
from benchmarks.allreduce_report import (
    Cell,
    allreduce_table,
    as_json,
    draw_allreduce,
    target,
)
from benchmarks.machine import describe_machine
from benchmarks.mpi import ProcessFailed, has_mpi, measure_mpi
from phalanx.errors import ConfigError

CELLS = [
    Cell(ranks=2, num_bytes=4096, seconds={"phalanx": [3e-5, 2e-5, 9e-5], "gloo": [6e-4] * 3}),
    Cell(ranks=2, num_bytes=1 << 22, seconds={"phalanx": [1e-3] * 3, "gloo": [4e-3] * 3}),
    Cell(ranks=4, num_bytes=1 << 22, seconds={"phalanx": [2e-3] * 3, "gloo": [4e-3] * 3}),
]


def shown(cells: list[Cell] = CELLS) -> str:
    text = StringIO()
    Console(file=text, width=120).print(allreduce_table(cells, 6e9))
    return text.getvalue()


def test_the_table_marks_what_is_met_and_what_is_missed():
    small, large, four = (line for line in shown().splitlines() if "iB" in line)
    assert "30 µs ≤30 ✓" in small
    assert "20.0 ≥10 ✓" in small
    assert "4.0 ≥5 ✗" in large
    assert "4.19 ≥3 ✓" in large
    assert "2.0 ≥1 ✓" in four


def test_mpi_stands_beside_where_it_was_measured(tmp_path: Path):
    cells = [
        replace(CELLS[1], seconds={**CELLS[1].seconds, "mpi": [2e-3] * 3}),
        replace(CELLS[2], seconds={**CELLS[2].seconds, "mpi": [9e-3] * 3}),
        CELLS[2],
    ]
    two, four, without = (line for line in shown(cells).splitlines() if "iB" in line)
    assert "2.00 ≥2.5 ✗" in two
    assert "4.50" in four
    assert "–" in without
    assert "mpi" not in shown()
    draw_allreduce(cells, describe_machine(), tmp_path / "a.png", copy_bytes_per_s=6e9)
    assert (tmp_path / "a.png").exists()


@pytest.mark.skipif(not has_mpi(), reason="needs mpirun and the package mpi4py")
def test_mpi_is_timed_in_ranks_of_its_own():
    assert [len(s) for s in measure_mpi(2, {4096: 3, 1 << 20: 1}, 2).values()] == [2, 2]


@pytest.mark.skipif(not has_mpi(), reason="needs mpirun and the package mpi4py")
def test_ranks_of_mpi_that_fail_say_why():
    with pytest.raises(ProcessFailed, match="MPI's ranks must end well"):
        measure_mpi(2, {-4: 1}, 1)


def test_beside_other_work_no_call_shall_be_slower_than_gloos(tmp_path: Path):
    quick = replace(CELLS[0], busy=1)
    slow = replace(CELLS[1], busy=2, seconds={"phalanx": [5e-3], "gloo": [4e-3]})
    one, two = (line for line in shown([quick, slow]).splitlines() if "iB" in line)
    assert "20.0 ≥1 ✓" in one
    assert "≤30" not in one  # said of a quiet machine
    assert "0.8 ≥1 ✗" in two
    draw_allreduce(
        [*CELLS, quick, slow], describe_machine(), tmp_path / "a.png", copy_bytes_per_s=6e9
    )
    assert (tmp_path / "a.png").exists()


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
    assert target(Cell(ranks=2, num_bytes=256 << 10, seconds={})) is None


def test_the_record_holds_every_round(tmp_path: Path):
    machine = describe_machine()
    record = json.loads(as_json(CELLS, {"4 ranks": "why"}, machine, copy_bytes_per_s=6e9))
    assert record["cells"][0]["seconds"]["phalanx"] == [3e-5, 2e-5, 9e-5]
    assert record["cells"][0]["median_s"]["phalanx"] == 3e-5
    assert record["failures"] == {"4 ranks": "why"}
    draw_allreduce(CELLS, machine, tmp_path / "a.png", copy_bytes_per_s=6e9)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_of_ranks_are_read():
    assert _counts("4, 2,2") == [2, 4]
    with pytest.raises(ConfigError, match="`--ranks` must be whole numbers from 2 on"):
        _counts("1")


@pytest.mark.slow
def test_the_command_measures_and_writes(tmp_path: Path):
    words = ["allreduce", "--ranks", "2", "--rounds", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "allreduce.png").exists()
    cells = json.loads((tmp_path / "allreduce.json").read_text())["cells"]
    assert cells[0]["num_bytes"] == 4096
    assert all(cell["least_s"]["phalanx"] > 0 for cell in cells)
    assert {cell["busy"] for cell in cells} == {0, *BUSY}

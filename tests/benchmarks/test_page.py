"""`make bench`: all benchmarks on one page, whatever becomes of one of them."""

from __future__ import annotations

import subprocess
from html.parser import HTMLParser

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS
from benchmarks.machine import describe_machine
from benchmarks.page import measure_all
from benchmarks.report import publish
from phalanx.cli.console import make_console
from phalanx.errors import UnsupportedError
from tests.benchmarks.test_report import report
from tests.meta.source import ROOT


def step(out):
    publish(report(ddp="It ended."), make_console(), out)


def gpu(out):
    raise UnsupportedError("There is no accelerator <here>.")


def broken(out):
    raise RuntimeError("out of luck")


def tables(out):
    raise AssertionError("only the others were asked for")


class Reader(HTMLParser):
    """What a page shows, and what it would load."""

    def __init__(self, page):
        super().__init__()
        self.text, self.sources = [], []
        self.feed(page)

    def handle_data(self, data):
        self.text.append(data)

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]


def run_all(folder, *words):
    app = typer.Typer()
    app.command()(measure_all({each.__name__: each for each in (step, gpu, broken, tables)}))
    return CliRunner().invoke(app, [*words, "--out", str(folder)])


def test_one_page_holds_what_was_measured_what_was_skipped_and_what_has_failed(tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "gpu.json").write_text("{}")  # of an earlier run
    done = run_all(tmp_path, "--only", "step,gpu,broken")
    assert done.exit_code == 1
    assert "Failed: step, broken." in done.output
    assert "Traceback" in done.output  # of `broken`
    page = (tmp_path / "index.html").read_text()
    shown = Reader(page)
    for words in (
        "One step", "Trainer", "12.3", "0.50", "ddp failed: It ended.", "python -m benchmarks step",
        "Skipped: There is no accelerator <here>.", "Failed: RuntimeError: out of luck",
    ):  # fmt: skip
        assert words in "".join(shown.text)
    assert page.count(describe_machine().cpu) == 1
    assert "≤" not in page
    assert len(shown.sources) == 1
    assert shown.sources[0].startswith("data:image/png;base64,")
    assert "prefers-color-scheme: dark" in page


def test_a_benchmark_that_does_not_exist_is_refused(tmp_path):
    assert "must name some of step, gpu" in str(run_all(tmp_path, "--only", "steps").exception)


def test_what_is_only_skipped_is_no_failure(tmp_path):
    assert run_all(tmp_path, "--only", "gpu").exit_code == 0


def test_all_benchmarks_have_a_target_of_their_own():
    makefile = (ROOT / "Makefile").read_text()
    named = next(line for line in makefile.splitlines() if line.startswith("BENCHMARKS := "))
    assert set(named.split()[2:]) == {f"bench-{name}" for name in BENCHMARKS}


@pytest.mark.parametrize("target", ["house", "bits", "chaos", "night", "check"])
def test_targets_for_developers_are_not_shown_to_users(target):
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in shown.stdout.splitlines()]
    assert {"train", "test", "docs", "bench"} <= set(names)
    assert target not in names

"""`phalanx plan`: from a file of numbers to tables, what it refuses, and that it measures."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import phalanx
from phalanx.cli.app import app
from phalanx.cli.options import complete
from phalanx.cli.planning import measuring
from phalanx.cli.planning.hollow import SIZES, Hollow, Subject, repeated
from phalanx.cli.planning.outcome import compare
from phalanx.errors import ConfigError
from phalanx.forecast import read_costs
from tests.unit.forecast.test_prediction import COSTS


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(COSTS.as_json()))
    return str(path)


def run(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_a_table_has_a_row_for_each_number_of_workers(file):
    done = run("--measured", file, "--workers", "1,2,10000", "--workers-per-host", 8)
    assert done.exit_code == 0
    assert "cnn on digits: 106 ms for a step of one worker with 32 rows, 8 MB" in done.output
    assert "Hosts of 4 cores with up to 8 workers" in done.output
    table = rows(done.output)
    assert ["workers", "hosts", "threads", "processes", "ranks", "DDP"] in table
    assert ["1", "1", *("106", "ms", "100%") * 4] in table
    [last] = [row for row in table if row[:2] == ["10,000", "1,250"]]
    assert last[2:4] == ["–", "–"]


def test_json_can_be_given_as_measured_elsewhere(file, tmp_path):
    words = ("--json", "--jitter", 0.2, "--failures-per-hour", 0.01, "--cores", 2)
    first = run("--measured", file, *words)
    (tmp_path / "again.json").write_text(first.output)
    again = run("--measured", tmp_path / "again.json", *words)
    assert again.output == first.output
    told = json.loads(again.output)
    assert read_costs(told["measured"]) == COSTS
    assert told["cluster"]["cores"] == told["cluster"]["workers_per_host"] == 2
    assert told["faults"]["jitter"] == 0.2
    assert {each["workers"] for each in told["predictions"]} >= {1, 10_000}
    assert all(0 <= each["share_left"] < 1 for each in told["predictions"])
    other = json.loads(run("--measured", file, *words, "--seed", 1).output)
    assert other["predictions"] != told["predictions"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "1,x"], "`--workers` must be whole numbers from 1 to 100000, with commas"),
        (["--workers", "0"], "but is '0'"),
        (["--formations", "threads,ray"], "`--formations` must name some of threads, processes,"),
        (["--workers", "100001"], "but is '100001'"),
        (["--bytes-per-s", "0"], "`bytes_per_s` must be above 0 bytes per second, but is 0.0"),
        (["--model", "mlp"], "`--model` must be left out with `--measured`"),
        (["--check"], "`--check` must be left out with `--measured`"),
        (["--checkpoint-s", "0"], "`checkpoint_s` must be above 0 seconds"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(
    file, words, sentence, monkeypatch
):
    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("it was measured"))
    measured = ["--measured", file] if "left out" in sentence else []
    error = run(*measured, *words).exception
    assert isinstance(error, ConfigError)
    assert sentence in str(error)


@pytest.mark.parametrize("words", [["--cores", 0], ["--microbatches", 0], ["--seed", -1]])
def test_numbers_out_of_range_are_refused_as_the_command_line_is_read(file, words):
    assert run("--measured", file, *words).exit_code == 2


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "{}", '{"measured": 3}', pytest.param("[" * 100_000, id="nested")]
)
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "x").write_text(content)
    assert isinstance(run("--measured", tmp_path / "x").exception, ConfigError)
    assert isinstance(run("--measured", tmp_path / "gone").exception, ConfigError)


def test_a_hollow_model_has_the_sizes_of_the_whole_one_and_computes_nothing():
    subject = Subject(complete({"data": "digits", "model": "mlp", "batch_size": 5}))
    batch = repeated(subject.microbatch(), 3)
    assert [len(each) for each in batch] == [15, 15]
    sizes = {}
    for size in SIZES:
        module, loss = subject.build(size)
        before = [each.detach().clone() for each in module.parameters()]
        with phalanx.Trainer(module, loss, subject.optimizer(), executor="inline") as trainer:
            trainer.step(batch)
        sizes[size] = [each.numel() for each in module.parameters()]
        if isinstance(module, Hollow):
            assert all(map(torch.equal, before, module.parameters()))
    assert sizes["hollow"] == sizes["whole"]
    assert sizes["empty"] == [1] * len(sizes["whole"])


def test_what_does_more_is_never_measured_to_take_less():
    found = measuring.at_rest({
        1: {"empty": 6.5, "hollow": 1.7, "whole": 3.9},
        2: {"empty": 1.8, "hollow": 2.2, "whole": 3.7},
        3: {"empty": 1.9, "hollow": 9.0, "whole": 5.0},
    })  # fmt: skip
    assert found == {
        1: {"empty": 1.7, "hollow": 1.7, "whole": 3.7},
        2: {"empty": 1.8, "hollow": 2.2, "whole": 3.7},
        3: {"empty": 1.9, "hollow": 5.0, "whole": 5.0},
    }


def test_an_error_is_of_the_prediction_over_what_was_measured():
    [one, two] = compare(COSTS, {"threads": {1: {"whole": 0.106}, 2: {"whole": 0.234}}})
    assert (one.formation, one.workers, two.workers) == ("threads", 1, 2)
    assert one.error == pytest.approx(0.0, abs=1e-9)
    assert two.error == pytest.approx(-0.5)


def test_threads_are_measured_and_checked(monkeypatch):
    monkeypatch.setattr(measuring, "_TURN_S", 0.01)
    monkeypatch.setattr(measuring, "_time_start", lambda subject: 3.0)
    done = run("--formations", "threads", "--model", "mlp", "--workers", "1,2", "--check")
    assert done.exit_code == 0, done.exception
    table = rows(done.output)
    assert ["formation", "workers", "predicted", "measured", "error"] in table
    assert [row[1] for row in table if row[:1] == ["threads"]] == ["1", "2", "4"]
    assert "Errors: " in done.output


@pytest.mark.night
def test_every_formation_is_measured():
    done = run("--model", "mlp", "--json")
    assert done.exit_code == 0, done.exception
    costs = read_costs(json.loads(done.stdout)["measured"])
    assert list(costs.formations) == ["threads", "processes", "ranks", "ddp"]
    assert costs.gradient_bytes == 4 * (64 * 256 + 256 * 256 + 256 * 10 + 522)
    assert costs.formations["processes"].recovery_s < 5

"""`phalanx report`: the runs that are read, their differences, and the page."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest

from phalanx.callbacks import RanksChanged, WorkerLost
from phalanx.callbacks.log_files import record_of
from phalanx.cli.app import main
from phalanx.cli.report_page import RecordedRun, compare_losses, final_values, make_page, read_run
from phalanx.errors import CheckpointError, ConfigError
from tests.unit.callbacks.events import epoch_done, events_of_run

EVIL = "<script>alert('x')</script>\"'&]]>--><!--"
CHANGED = record_of(RanksChanged(step=9, rank=0, ranks=(0, 2), pids=(7, 9), lost=(1,), came=()))


def records(num_steps=20, **changes):
    return [record_of(event) for event in events_of_run(num_steps, **changes)]


def lost(step, worker=1, reason="was killed", dump=""):
    return record_of(
        WorkerLost(
            step=step, worker=worker, pid=77, reason=reason, microbatch=3, dump=dump, seconds=0.25
        )
    )


def write_run(path, lines, config=None):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def run_of(lines, **fields):
    kinds = {"steps": ["step"], "epochs": ["epoch"], "events": ["failure", "ranks"]}
    found = {k: [each for each in lines if each["kind"] in kind] for k, kind in kinds.items()}
    found = json.loads(json.dumps(found))
    return RecordedRun(**{"name": "a", "config": {}, **found, **fields})


# --- reading --------------------------------------------------------------------------------------


def test_a_run_folder_and_a_file_of_jsonl_are_read(tmp_path):
    config = {"format": 2, "options": {"lr": 0.1}}
    folder = write_run(tmp_path / "a", [*records(), lost(21)], config)
    (folder / "model.safetensors").write_bytes(b"weights")
    file = write_run(tmp_path / "b", records(7)) / "metrics.jsonl"
    file.write_text(file.read_text() + '{"kind": "st')  # still written
    one, other = read_run(folder), read_run(file)
    assert (one.name, len(one.steps), len(one.epochs), len(one.events)) == ("a", 20, 2, 1)
    assert one.config == config
    assert one.weights == "9a129038d9a0"
    assert (other.name, len(other.steps), other.config) == ("metrics.jsonl", 7, {})


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be a run folder or a file"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="must have done a step"):
        read_run(write_run(tmp_path / "a", []))
    broken = write_run(tmp_path / "b", records(3)) / "metrics.jsonl"
    broken.write_text("{}\n" + broken.read_text())
    with pytest.raises(CheckpointError, match="Line 1 of"):
        read_run(broken)


# --- deciding -------------------------------------------------------------------------------------


def test_the_final_values_are_those_of_the_records():
    found = final_values(run_of([*records(), lost(5)], weights="abc"))
    assert found == {
        "steps": "20",
        "epochs": "2",
        "loss of the last step": "0.0500",
        "train loss": "0.5000",
        "validation loss": "0.6000",
        "train accuracy": "75.0 %",
        "validation accuracy": "70.0 %",
        "best validation loss": "0.6000 (epoch 1)",
        "seconds in steps": "2.0",
        "samples/s in steps": "80",
        "replicas": "2",
        "lost workers": "1",
        "weights": "abc",
    }


def test_the_best_epoch_is_named_by_its_own_number():
    late = [
        record_of(epoch_done(epoch, validation={"loss": loss}))
        for epoch, loss in ((5, 3.0), (6, 1.0), (7, 2.0))
    ]
    found = final_values(run_of([*records(2), *late]))
    assert found["best validation loss"] == "1.0000 (epoch 6)"


def test_losses_are_compared_bit_by_bit():
    one, other = records(9), records(9)
    assert compare_losses(run_of(one), run_of(other)) == "bitwise equal in all 9 common steps"
    other[6]["loss"] = math.nextafter(other[6]["loss"], 1)
    assert compare_losses(run_of(one), run_of(other)).startswith("different from step 7 on: ")
    assert compare_losses(run_of(one[:4]), run_of(one[5:])) == "bitwise equal in all 0 common steps"


# --- the page -------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def named(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def evil_run(name=EVIL):
    lines = [*records(30), lost(12, reason=EVIL, dump=EVIL)]
    lines += [record_of(epoch_done(2, train={EVIL: 0.5, "loss": 1.0})), CHANGED]
    config = {"options": {EVIL: EVIL, "lr": [EVIL]}, EVIL: {EVIL: EVIL}}
    return run_of(json.loads(json.dumps(lines)), name=name, config=config)


def test_text_of_a_run_stays_text() -> None:
    page = make_page([evil_run(), evil_run("$b$")])
    elements = Elements(page)
    assert not elements.named("script")
    assert elements.text.count(EVIL) > 10
    for tag, attributes in elements.found:
        assert not any(name.startswith("on") for name in attributes), tag


def test_the_page_has_results_curves_failures_and_settings() -> None:
    text = Elements(make_page([evil_run("a"), evil_run("b")])).text
    for words in (
        *("loss", "accuracy", "samples per second", "Failures and recoveries", "Settings"),
        *("rank 1 was lost", "ranks 0, 2 train", "250 ms later"),
        *("losses beside a", "bitwise equal in all 30 common steps"),
    ):
        assert words in text, words


def test_equal_curves_of_two_runs_are_both_seen() -> None:
    page = make_page([run_of(records()), run_of(records(), name="b")])
    widths = re.findall(r"stroke: (#2563a8|#d9661f); stroke-width: ([\d.]+)", page)
    assert set(widths) >= {("#2563a8", "4"), ("#d9661f", "1.2")}
    assert len(Elements(page).named("svg")) == 4  # side by side, or one below the other


def test_a_run_without_anything_but_losses_is_a_page_too():
    steps = [{"kind": "step", "step": step, "loss": None} for step in (1, 2)]
    page = make_page([RecordedRun(name="bare", steps=steps, config={})])
    assert "No worker was lost." in page
    assert "Settings" not in page


def test_a_long_run_makes_a_small_page() -> None:
    assert len(make_page([run_of(records(8_000, per_epoch=8))])) < 400_000


# --- the command ----------------------------------------------------------------------------------


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["phalanx", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", records())
    out = tmp_path / "page.html"
    for _ in range(2):
        assert command(monkeypatch, "report", run, "-o", out) == 0
        assert "of 1 run: open it" in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")
    assert command(monkeypatch, "report", run, "-o", tmp_path / "new" / "page.html") == 0
    assert command(monkeypatch, "report", run, "-o", out / "page.html") == 2  # in a file
    assert "`--out` must be a file that can be written" in capsys.readouterr().err

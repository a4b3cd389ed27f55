"""`phalanx report`: what is read, decided and written, without a browser."""

from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser

import numpy as np
import pytest

from phalanx.callbacks import RanksChanged, WorkerLost, record_of, written_record
from phalanx.cli.app import main
from phalanx.cli.reporting.comparison import compare_losses, compare_settings, final_values
from phalanx.cli.reporting.curves import thin
from phalanx.cli.reporting.page import MARK, make_page, strip_of
from phalanx.cli.reporting.runs import RecordedRun, read_runs
from phalanx.errors import CheckpointError, ConfigError
from tests.unit.callbacks.events import epoch_done, events_of_run, step_done

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
    (path / "metrics.jsonl").write_text("".join(map(written_record, lines)))
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def run_of(lines, **fields):
    kinds = {"steps": "step", "epochs": "epoch", "failures": "failure", "changes": "ranks"}
    found = {name: [each for each in lines if each["kind"] == kind] for name, kind in kinds.items()}
    found = json.loads(json.dumps(found))
    return RecordedRun(**{"name": "a", "config": {}, **found, **fields})


# --- reading --------------------------------------------------------------------------------------


def test_a_run_folder_and_a_file_of_jsonl_are_read(tmp_path):
    folder = write_run(tmp_path / "a", [*records(), lost(21)], {"options": {"lr": 0.1}})
    (folder / "model.safetensors").write_bytes(b"weights")
    file = tmp_path / "b.jsonl"
    file.write_text("".join(map(written_record, records(7))) + '{"kind": "st')  # still written
    one, other = read_runs([folder, file])
    assert (one.name, len(one.steps), len(one.epochs), len(one.failures)) == ("a", 20, 2, 1)
    assert one.config == {"options": {"lr": 0.1}}
    assert one.weights == "9a129038d9a0"
    assert (other.name, len(other.steps), other.config, other.weights) == ("b.jsonl", 7, {}, None)


def test_runs_of_one_name_are_called_by_their_paths(tmp_path):
    paths = [write_run(tmp_path / part / "run", records(2)) for part in ("x", "y")]
    assert [run.name for run in read_runs(paths)] == [str(path) for path in paths]
    with pytest.raises(ConfigError, match="must name each run once"):
        read_runs([paths[0], paths[0]])


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
    assert compare_losses(run_of(one), run_of(other)) == "the same bits in all 9 steps"
    other[6]["loss"] = math.nextafter(other[6]["loss"], 1)
    assert compare_losses(run_of(one), run_of(other)).startswith("the same bits up to step 6; in")
    assert compare_losses(run_of(one[:4]), run_of(one[5:])) == "no step in common"


def test_settings_that_differ_are_told_apart():
    configs = [
        {"format": 1, "options": {"lr": lr, "model": "cnn"}, "versions": {"torch": "2"}, **more}
        for lr, more in ((0.1, {}), (0.2, {"data": "digits"}))
    ]
    runs = [run_of(records(2), config=config) for config in configs]
    assert compare_settings(runs) == (
        {"lr": ["0.1", "0.2"], "data": ["–", "digits"]},
        {"model": ["cnn", "cnn"], "version of torch": ["2", "2"]},
    )


def test_a_long_curve_is_thinned_to_means_and_extremes():
    x = np.arange(1.0, 100_001.0)
    y = np.where(x == 77_777, 50.0, 1.0)
    y[:300] = np.nan
    points = thin(x, y)
    assert len(points.x) == 400
    assert points.x[-1] == 100_000
    assert np.isnan(points.mean[0])
    assert np.nanmax(points.high) == 50.0
    assert np.nanmax(points.mean) == pytest.approx(1 + 49 / 250)


def test_the_strip_shows_who_worked_when_and_who_was_lost():
    lines = [record_of(step_done(step, replicas=2 if step < 5 else 3)) for step in range(1, 7)]
    lines[1]["busy_s"] = (0.0, 0.1)
    strip = strip_of(run_of([*lines, lost(3), lost(4, worker=9), lost(99)]))
    assert strip.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.round(strip.busy, 3)[:, 1].tolist() == pytest.approx([0, 1, np.nan], nan_ok=True)
    assert np.isnan(strip.busy[2]).tolist() == [True] * 4 + [False] * 2
    assert strip.marks == [(1, 2, "step 3: worker 1 was killed")]


def test_of_many_steps_the_strip_has_few_columns():
    strip = strip_of(run_of([*records(1000), lost(500)]))
    assert strip.busy.shape == (2, 200)
    assert np.allclose(strip.busy, 0.8)
    ((_, column, _),) = strip.marks
    assert strip.steps[column - 1] < 500 <= strip.steps[column]


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
    lines.append(record_of(epoch_done(2, train={EVIL: 0.5, "loss": 1.0})))
    lines.append(CHANGED)
    config = {"options": {EVIL: EVIL, "lr": [EVIL]}, EVIL: {EVIL: EVIL}}
    return run_of(json.loads(json.dumps(lines)), name=name, config=config)


def test_nothing_of_a_run_becomes_part_of_the_page():
    page = make_page([evil_run(), evil_run("b")])
    elements = Elements(page)
    assert page.startswith(MARK)
    assert len(elements.named("script")) == 1
    assert elements.text.count(EVIL) > 10
    for tag, attributes in elements.found:
        assert not {"src", "href", "srcset", "xlink:href"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes), tag
    assert {tag for tag, _ in elements.found} <= {
        *("html", "head", "meta", "title", "style", "body", "script", "footer", "details"),
        *("summary", "pre", "h1", "h2", "h3", "p", "ul", "li", "table", "tr", "th", "td", "div"),
        *("figure", "figcaption", "b", "small", "svg", "path", "span"),
    }


def test_the_page_has_what_it_promises():
    text = Elements(make_page([evil_run("a"), evil_run("b")])).text
    for words in (
        *("Loss", "Accuracy", "Samples per second", "What replicas did"),
        *("Failures and recoveries", "rank 1 was lost", "the ranks 0, 2 train", "250 ms later"),
        *("that differ", "losses beside a", "the same bits in all 30 steps"),
    ):
        assert words in text, words


def test_a_run_without_anything_but_losses_is_a_page_too():
    steps = [{"kind": "step", "step": step, "loss": None} for step in (1, 2)]
    page = make_page([RecordedRun(name="bare", steps=steps, config={})])
    assert "No worker was lost." in page
    assert "What replicas did" not in page
    assert "Settings" not in page


@pytest.mark.parametrize("losses", [(1e-299, 1e299), (10**299, 3), (-1e299, 1e299), (1e-299, 2.0)])
def test_losses_without_a_ratio_are_a_page_too(losses):
    steps = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    assert "NaN" not in make_page([run_of(steps)])


def test_whatever_a_damaged_file_holds_is_a_page_or_an_error_of_ours(tmp_path):
    odd = [
        None,
        True,
        "x",
        [],
        [None, "x", 2.0],
        {},
        {"a": 1},
        -1,
        0,
        10**20,
        10**400,
        -(10**400),
        1e308,
        1e-299,
        5e-324,
    ]
    draw = random.Random(0)
    path = tmp_path / "a.jsonl"
    num_pages = 0
    for trial in range(300):
        lines = json.loads(json.dumps([*records(6, per_epoch=3), lost(4), CHANGED]))
        for _ in range(draw.choice([1, 3, 9])):
            line = draw.choice(lines)
            line[draw.choice([name for name in line if name != "kind"])] = draw.choice(odd)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            page = make_page(read_runs([path]))
        except (ConfigError, CheckpointError):
            continue
        except Exception as error:
            error.add_note(f"trial {trial}: {path.read_text()}")
            raise
        num_pages += 1
        assert "NaN" not in page.split("<script>")[0]
    assert num_pages > 50


def test_the_page_stays_small_however_long_the_run():
    assert len(make_page([run_of(records(20_000, per_epoch=20))])) < 200_000


# --- the command ----------------------------------------------------------------------------------


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["phalanx", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_command_writes_the_page_and_replaces_only_reports(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", records())
    out = tmp_path / "page.html"
    for _ in range(2):
        assert command(monkeypatch, "report", run, "-o", out) == 0
        assert "of 1 run: open it" in capsys.readouterr().out
    assert out.read_text().startswith(MARK)
    out.write_text("my own page")
    assert command(monkeypatch, "report", run, "-o", out) == 2
    assert "must be a new file or an earlier report" in capsys.readouterr().err
    assert out.read_text() == "my own page"
    assert command(monkeypatch, "report", run, "-o", tmp_path / "no" / "page.html") == 2
    assert "`--out` must be a file that can be written" in capsys.readouterr().err

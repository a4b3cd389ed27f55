"""A training that is written down: what files hold, also after a resume, and what is refused."""

from __future__ import annotations

import csv
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from phalanx.callbacks import CSV, JSONL, RanksChanged, TensorBoard, WorkerLost, read_record
from phalanx.errors import ConfigError, UnsupportedError
from tests.unit.callbacks.events import (
    epoch_done,
    events_of_run,
    fit_begun,
    fit_ended,
    step_done,
)


def play(callback, events):
    for event in events:
        callback(event)


def lost(step):
    return WorkerLost(
        step=step, worker=0, pid=1, reason="died", microbatch=None, seconds=0.1, dump=""
    )


def kinds(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["kind"][0], each.get("step", each.get("steps"))) for each in records]


def run(num_steps):
    return [*events_of_run(num_steps, per_epoch=3)]


WHOLE = [("s", 1), ("s", 2), ("s", 3), ("e", 3), ("s", 4), ("s", 5), ("s", 6), ("e", 6)]


def test_changed_ranks_and_norms_of_gradients_are_written_down(tmp_path):
    path = tmp_path / "log.jsonl"
    changed = RanksChanged(step=3, rank=0, ranks=(0, 2), pids=(7, 9), lost=(1,), came=())
    play(JSONL(path), [*run(2), changed, step_done(3, per_epoch=3, grad_norm=0.25)])
    records = [read_record(line) for line in path.read_text().splitlines()]
    assert records[2] == {
        "kind": "ranks",
        "step": 3,
        "rank": 0,
        "ranks": [0, 2],
        "pids": [7, 9],
        "lost": [1],
        "came": [],
    }
    assert [each["grad_norm"] for each in records if each["kind"] == "step"] == [None, None, 0.25]


def test_every_step_and_epoch_is_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    play(JSONL(path), run(6))
    assert kinds(path) == WHOLE
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["loss"], first["epoch"], first["shares"]) == (1.0, 1, [4, 4])


@pytest.mark.parametrize("again", [1, 3, 4, 5], ids=str)
@pytest.mark.parametrize("process", ["the same", "another"])
def test_steps_that_are_done_again_replace_their_lines(tmp_path, again, process):
    path = tmp_path / "log.jsonl"
    log = JSONL(path)
    play(log, run(5))
    if process == "another":
        log = JSONL(str(path))
        path.write_text(path.read_text() + '{"kind": "st')  # it was killed
    place = next(at for at, e in enumerate(run(6)) if getattr(e, "step", None) == again)
    begun = fit_begun(steps=again - 1, epochs=(again - 1) // 3)
    play(log, [begun, *run(6)[place:]])
    assert kinds(path) == WHOLE


def test_the_end_of_an_epoch_may_be_done_again(tmp_path):
    path = tmp_path / "log.jsonl"
    play(JSONL(path), run(4))
    play(JSONL(path), [fit_begun(steps=3, epochs=0), *run(6)[3:]])
    assert kinds(path) == WHOLE


def test_lines_of_a_loop_of_ones_own_are_added(tmp_path):
    path = tmp_path / "log.jsonl"
    for step in (1, 2):
        play(JSONL(path), [lost(step), step_done(step)])
    assert kinds(path) == [("f", 1), ("s", 1), ("f", 2), ("s", 2)]


def test_numbers_without_a_word_in_json_are_null(tmp_path):
    path = tmp_path / "log.jsonl"
    play(JSONL(path), [step_done(1, loss=float("nan"))])
    assert json.loads(path.read_text())["loss"] is None


def test_an_epoch_is_a_row(tmp_path):
    path = tmp_path / "log.csv"
    play(CSV(path), [*run(3), epoch_done(2, per_epoch=3, validation=None)])
    play(CSV(path), [epoch_done(2, per_epoch=3, validation=None), epoch_done(3, train={"f1": 1.0})])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [row["steps"] for row in rows] == ["3", "6", "30"]
    assert [row["validation.accuracy"] for row in rows] == ["0.7", "", "0.7"]
    assert [row["train.f1"] for row in rows] == ["", "", "1.0"]


@pytest.mark.parametrize("kind", [JSONL, CSV])
@pytest.mark.parametrize(
    "text", ["precious", "precious\n", "a,b\n1,2\n", "epoch\nx\n", '{"kind": 5}\n', "{}\n", "[]\n"]
)
def test_a_file_that_holds_something_else_is_left_alone(tmp_path, kind, text):
    path = tmp_path / "mine"
    path.write_text(text)
    for events in (run(3), [lost(1)] if kind is JSONL else [epoch_done()]):
        with pytest.raises(ConfigError, match=f"`path` must be a file of `{kind.__name__}`, but"):
            play(kind(path), events)
        assert path.read_text() == text


@pytest.mark.parametrize("kind", [JSONL, CSV])
def test_the_first_rank_writes(tmp_path, kind):
    for is_first in (False, True):
        log = kind(tmp_path / "log")
        log.attach(SimpleNamespace(is_first_rank=is_first))
        play(log, run(3))
        assert (tmp_path / "log").exists() == is_first


class Writer:
    """Stands for torch's writer, which needs tensorboard."""

    made: ClassVar[list] = []

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def writers(monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    return Writer.made


def test_scalars_of_steps_and_epochs_are_told_to_tensorboard(tmp_path, writers):
    board = TensorBoard(tmp_path)
    changes = {"learning_rates": (0.1, float("nan"), 0.2), "grad_norm": 3.0}
    play(board, [step_done(7, **changes), epoch_done(1, per_epoch=7), fit_ended()])
    assert [writer.purge_step for writer in writers] == [7]
    assert writers[0].folder == str(tmp_path)
    assert writers[0].closed
    assert writers[0].scalars == [
        ("step/loss", 1 / 7, 7),
        ("step/learning_rate", 0.1, 7),
        ("step/learning_rate_2", 0.2, 7),
        ("step/grad_norm", 3.0, 7),
        ("train/loss", 0.5, 7),
        ("train/accuracy", 0.75, 7),
        ("validation/loss", 0.6, 7),
        ("validation/accuracy", 0.7, 7),
    ]


def test_tensorboard_is_told_where_the_run_goes_on(tmp_path, writers):
    board = TensorBoard(tmp_path)
    play(board, [step_done(1), step_done(2), fit_ended(), step_done(3), fit_ended(), step_done(2)])
    assert [(writer.purge_step, writer.closed) for writer in writers] == [
        (1, True),
        (3, True),
        (2, False),
    ]
    board.attach(SimpleNamespace(is_first_rank=False))
    play(board, [step_done(1), epoch_done(1)])
    assert len(writers) == 3
    assert writers[-1].closed


def test_a_missing_tensorboard_is_told_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError, match=r"needs the package tensorboard.*pip install"):
        TensorBoard(tmp_path)
    with pytest.raises(ConfigError, match="`folder` must be a path"):
        TensorBoard(5)

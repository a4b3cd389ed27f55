"""A history keeps what a figure needs; what was written of it restores it."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

import phalanx
from phalanx.callbacks import History, Totals, record_of
from tests.unit.callbacks.events import events_of_run, fit_begun, step_done


def played(num_steps):
    history = History()
    for event in events_of_run(num_steps):
        history(event)
    return history


def test_every_event_becomes_one_record():
    records = [record_of(event) for event in events_of_run(20)]
    assert [record["kind"] for record in records] == (["step"] * 10 + ["epoch"]) * 2
    assert [record["step"] for record in records if record["kind"] == "step"] == [*range(1, 21)]
    assert [record["last_step"] for record in records if record["kind"] == "epoch"] == [10, 20]


def test_a_history_that_was_written_and_restored_is_the_same():
    history, twin = played(20), History()
    twin.restore(json.loads(json.dumps([record_of(event) for event in events_of_run(20)])))
    assert twin.losses == history.losses
    assert twin.epochs == history.epochs
    twin.restore([])
    assert twin.losses == twin.epochs == []


def test_a_loss_that_json_cannot_hold_comes_back_as_not_a_number():
    history = History()
    history.restore([{"kind": "step", "step": 1, "loss": None}])
    assert math.isnan(history.losses[0])


def test_totals_count_what_lies_between_steps_but_not_tests():
    totals = Totals()
    totals.add(step_done(1), 1.0)  # 0.1 s: nothing is known of what was before
    totals.add(step_done(2), 1.5)  # 0.5 s
    totals.interrupt()
    totals.add(step_done(3), 9.0)  # 0.1 s
    assert totals.training_seconds == pytest.approx(0.7)
    assert totals.samples_per_s() == pytest.approx(3 * 8 / 0.7)
    assert totals.busy() == pytest.approx([0.8, 0.8])


def test_totals_of_nothing_are_nothing():
    assert Totals().samples_per_s() == 0
    assert Totals().busy() == []


def state_of(history):
    return {"losses": torch.tensor(history.losses, dtype=torch.float64), "epochs": [
        {"epoch": e.epoch, "last_step": e.last_step, "train": e.train, "validation": e.validation}
        for e in history.epochs
    ]}  # fmt: skip


def test_a_history_is_the_same_after_a_checkpoint():
    history, twin = played(20), played(30)
    twin.load_state_dict(history.state_dict())
    assert (twin.losses, twin.epochs) == (history.losses, history.epochs)
    assert torch.equal(history.state_dict()["losses"], state_of(history)["losses"])
    assert history.state_dict()["epochs"] == state_of(history)["epochs"]


@pytest.mark.parametrize(
    "change",
    [
        {"losses": torch.ones(2, 2, dtype=torch.float64)},
        {"losses": torch.ones(2)},
        {"losses": [1.0]},
        {"epochs": [5]},
        {"epochs": [{"epoch": 0, "last_step": 3, "train": {}}]},
        {"epochs": [{"epoch": -1, "last_step": 3, "train": {}, "validation": None}]},
        {"epochs": [{"epoch": True, "last_step": 3, "train": {}, "validation": None}]},
        {"epochs": [{"epoch": 0, "last_step": 3, "train": {"loss": "x"}, "validation": None}]},
        {"epochs": [{"epoch": 0, "last_step": 3, "train": {}, "validation": 0}]},
        {"epochs": [{"epoch": 0, "last_step": 3, "train": {}, "validation": None, "x": 1}]},
    ],
    ids=str,
)
def test_what_is_no_history_is_refused_and_changes_nothing(change):
    history = played(20)
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        history.load_state_dict({**state_of(history), **change})
    assert len(history.losses) == 20
    assert len(history.epochs) == 2


def test_a_history_of_another_trainer_begins_anew():
    history = played(20)
    history.attach(SimpleNamespace(is_first_rank=True))
    assert history.losses == history.epochs == []


def test_a_plot_is_a_file_of_the_first_rank_and_a_figure_for_all(tmp_path):
    history, other = played(20), History()
    other.attach(SimpleNamespace(is_first_rank=False))
    other(fit_begun())
    other.load_state_dict(history.state_dict())
    assert history.plot().axes
    assert other.plot(tmp_path / "other.png").axes
    history.plot(str(tmp_path / "plot.png"), title="t")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    with pytest.raises(phalanx.ConfigError, match=r"`path` must be a file that can be written"):
        history.plot(tmp_path / "none" / "plot.png")
    with pytest.raises(phalanx.ConfigError, match=r"`path` must be a path, but is 5"):
        history.plot(5)

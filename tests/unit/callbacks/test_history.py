"""A history keeps losses and epochs, also through a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import phalanx
from phalanx.callbacks import History, record_of
from tests.unit.callbacks.events import events_of_run, fit_begun


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

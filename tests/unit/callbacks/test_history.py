"""A history keeps losses and epochs, also through a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import phalanx
from phalanx.callbacks import History
from tests.unit.callbacks.events import epoch_done, events_of_run, fit_begun, step_done


def played(num_steps):
    history = History()
    for event in events_of_run(num_steps):
        history(event)
    return history


def test_a_history_is_the_same_after_a_checkpoint():
    history, twin = played(20), played(30)
    twin.load_state_dict(history.state_dict())
    assert (twin.losses, twin.epochs) == (history.losses, history.epochs)


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


@pytest.mark.parametrize(
    "events",
    [
        [],
        [step_done(1)],
        [*events_of_run(20)],
        [step_done(1), epoch_done(1, validation=None)],
        [epoch_done(1, train={"loss": 1.0, "$a$": 0.5})],
    ],
    ids=["nothing", "one step", "epochs", "no validation", "a name"],
)
def test_any_history_can_be_drawn_and_matplotlib_stays_as_it_was(tmp_path, events):
    import matplotlib as mpl  # slow, and only this test asks

    before, history = dict(mpl.rcParams), History()
    for event in events:
        history(event)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "training.png").symlink_to(tmp_path / "victim")
    history.plot(tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "victim").read_text() == "precious"
    assert dict(mpl.rcParams) == before

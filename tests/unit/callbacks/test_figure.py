"""The figure is drawn for every history that can be, and its numbers are right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phalanx.callbacks import History, draw_training
from phalanx.callbacks.figure import smooth
from tests.unit.callbacks.events import epoch_done, step_done


def played(num_steps, **changes):
    history = History()
    for step in range(1, num_steps + 1):
        history(step_done(step))
        if step % 10 == 0:
            history(epoch_done(step // 10, **changes))
    return history


@pytest.mark.parametrize(
    "history",
    [
        History(),
        played(1),
        played(20),
        played(20, validation=None),
        played(20, train={"loss": 1.0}, validation={"loss": 2.0}),
        played(500),
    ],
    ids=["nothing", "one step", "epochs", "no test", "no accuracy", "long"],
)
def test_a_figure_is_drawn(tmp_path, history):
    draw_training(history, title="t", path=tmp_path / "training.png")
    png = (tmp_path / "training.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


def test_a_link_in_the_place_of_a_figure_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "training.png").symlink_to(tmp_path / "victim")
    draw_training(played(1), title="t", path=tmp_path / "training.png")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_figure_leaves_matplotlib_as_it_was(tmp_path):
    import matplotlib as mpl  # slow, and only this test asks

    before = dict(mpl.rcParams)
    draw_training(played(20), title="t", path=tmp_path / "training.png")
    assert dict(mpl.rcParams) == before


def test_a_short_curve_is_not_smoothed():
    assert smooth([3.0, 1.0, 2.0]).tolist() == [3.0, 1.0, 2.0]
    assert smooth([]).tolist() == []


def test_a_long_curve_is_averaged_over_its_neighbours():
    values = np.arange(80.0)
    assert smooth(values).tolist()[2:-2] == values.tolist()[2:-2]
    assert smooth(values)[0] == pytest.approx((0 + 1 + 2) / 3)
    assert smooth(values)[-1] == pytest.approx((77 + 78 + 79) / 3)


def test_what_is_not_finite_is_left_out():
    values = [1.0] * 40 + [math.nan] + [1.0] * 40
    assert smooth(values).tolist() == [1.0] * 81
    assert np.isnan(smooth([math.nan])).all()

"""Callbacks that look at a mean of each epoch: which is better, and what follows."""

from __future__ import annotations

import math
import shutil

import pytest

from phalanx.callbacks import Checkpoint, EarlyStopping
from tests.unit.callbacks.events import epoch_done


class Trainer:
    """Stands for a trainer: counts stops, and saves a checkpoint's files."""

    def __init__(self, *, is_first_rank=True):
        self.is_first_rank = is_first_rank
        self.stops = 0
        self.fails = False

    def stop(self):
        self.stops += 1

    def save(self, folder):
        if self.fails:
            raise OSError("no room")
        folder.mkdir(parents=True)
        for name in ("checkpoint.json", "model.safetensors"):
            (folder / name).write_text("")


def attached(callback, **options):
    trainer = Trainer(**options)
    callback.attach(trainer)
    return trainer


def play(callback, values, metric="loss"):
    for epoch, value in enumerate(values, 1):
        callback(epoch_done(epoch, validation={metric: value}))


@pytest.mark.parametrize(
    ("options", "values", "stops_after"),
    [
        ({}, [3.0, 2.0, 2.0, 2.5, 2.1], 5),
        ({}, [3.0, 2.0, 2.0, 2.5, 1.9, 2.0], None),
        ({"patience": 1}, [3.0, 3.0], 2),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.5], 3),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.4], None),
        ({"patience": 2, "mode": "max"}, [3.0, 4.0, 3.5, 4.0], 4),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2}, [math.nan, 1.0, math.nan, 0.5], None),
        ({"patience": 2}, [1.0, -math.inf, 0.0, 0.0], 4),
    ],
    ids=str,
)
def test_it_stops_after_epochs_that_were_no_better(options, values, stops_after):
    stopping = EarlyStopping(**options)
    trainer = attached(stopping)
    play(stopping, values[: (stops_after or len(values) + 1) - 1])
    assert trainer.stops == 0
    play(stopping, values[(stops_after or len(values) + 1) - 1 :])
    assert trainer.stops == (stops_after is not None)


def test_a_stopping_goes_on_after_a_checkpoint_and_anew_with_another_trainer():
    stopping, twin = EarlyStopping(), EarlyStopping()
    attached(stopping)
    play(stopping, [2.0, 1.0, 3.0])
    trainer = attached(twin)
    twin.load_state_dict(stopping.state_dict())
    assert (twin.best, twin.waited) == (1.0, 1)
    play(twin, [3.0, 3.0])
    assert trainer.stops == 1
    attached(twin)
    assert (twin.best, twin.waited) == (None, 0)


# --- the best checkpoints ----------------------------------------------------------------------


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("options", "values", "kept"),
    [
        ({}, [3.0, 2.0, 2.0, 4.0], [2]),
        ({"mode": "max"}, [3.0, 2.0, 3.0, 2.0], [1]),
        ({"keep": 2}, [3.0, 2.0, 2.5, 4.0, 2.0], [2, 5]),
        ({"keep": 9}, [3.0, 2.0, 2.5], [2, 3, 1]),
        ({"keep": 2}, [math.nan, 2.0, math.inf, math.nan], [2]),
    ],
    ids=str,
)
def test_the_best_epochs_are_kept_the_best_first(tmp_path, options, values, kept):
    best = Checkpoint(tmp_path / "best", monitor="validation.loss", **options)
    attached(best)
    assert best.best is None
    play(best, values)
    expected = [f"step-{10 * epoch:08d}" for epoch in kept]
    assert [path.name for path in best.kept] == expected
    assert best.best == tmp_path / "best" / expected[0]
    assert names_in(tmp_path / "best") == sorted(expected)
    assert list(best.kept.values()) == [values[epoch - 1] for epoch in kept]


def test_nothing_of_the_users_is_removed(tmp_path):
    best = Checkpoint(tmp_path, monitor="validation.loss")
    attached(best)
    play(best, [3.0])
    (tmp_path / "step-00000010" / "thesis.txt").write_text("mine")
    with pytest.warns(UserWarning, match="is kept no more, but stays"):
        best(epoch_done(2, validation={"loss": 2.0}))
    assert names_in(tmp_path) == ["step-00000010", "step-00000020"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").write_text("mine")
    for path in (tmp_path / "step-00000020").iterdir():
        path.unlink()
    shutil.rmtree(tmp_path / "step-00000020")
    (tmp_path / "step-00000020").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="is kept no more, but stays"):
        best(epoch_done(3, validation={"loss": 1.0}))
    assert names_in(tmp_path / "elsewhere") == ["model.safetensors"]


def test_a_folder_stays_whole_while_something_of_the_users_has_the_name_of_its_draft(tmp_path):
    best = Checkpoint(tmp_path, monitor="validation.loss")
    attached(best)
    play(best, [3.0])
    before = names_in(tmp_path / "step-00000010")
    (tmp_path / "step-00000010.writing").write_text("mine")
    with pytest.warns(UserWarning, match=r"stays: .*10.writing is in the way"):
        best(epoch_done(2, validation={"loss": 2.0}))
    assert names_in(tmp_path / "step-00000010") == before
    assert (tmp_path / "step-00000010.writing").read_text() == "mine"


def test_a_folder_that_is_gone_is_not_missed(tmp_path):
    best = Checkpoint(tmp_path, monitor="validation.loss")
    attached(best)
    best.load_state_dict({"kept": [[3.0, "step-00000010"]], "dropped": []})
    best(epoch_done(2, validation={"loss": 2.0}))
    assert names_in(tmp_path) == ["step-00000020"]


def test_all_ranks_save_and_the_first_removes(tmp_path):
    best = Checkpoint(tmp_path, monitor="validation.loss")
    attached(best, is_first_rank=False)
    play(best, [3.0, 2.0])
    assert names_in(tmp_path) == ["step-00000010", "step-00000020"]


def test_the_best_is_one_that_is_still_there(tmp_path):
    older = Checkpoint(tmp_path, keep=2, monitor="validation.loss")
    attached(older)
    play(older, [3.0, 2.0])
    shutil.rmtree(tmp_path / "step-00000020")
    assert older.best == tmp_path / "step-00000010"


def test_an_epoch_that_could_not_be_saved_is_not_among_the_best(tmp_path):
    best = Checkpoint(tmp_path, monitor="validation.loss")
    trainer = attached(best)
    play(best, [3.0])
    trainer.fails = True
    with pytest.raises(OSError, match="no room"):
        best(epoch_done(2, validation={"loss": 2.0}))
    assert best.best == tmp_path / "step-00000010"
    assert names_in(tmp_path) == ["step-00000010"]


@pytest.mark.parametrize(
    "kept",
    [
        [[1.0, "../step-00000010"]],
        [[1.0, "."]],
        [[1.0, "step-00000010/../x"]],
        [[1.0, "step-00000010\n"]],
        [[2.0, "step-00000010"], [1.0, "thesis"]],
    ],
    ids=str,
)
def test_what_is_no_state_of_the_best_is_refused_and_no_way_out_of_the_folder(kept, tmp_path):
    best = Checkpoint(tmp_path, monitor="validation.loss")
    for state in ({"kept": kept, "dropped": []}, {"kept": [], "dropped": [kept[-1][1]]}):
        with pytest.raises(ValueError, match="holds other names"):
            best.load_state_dict(state)
    assert best.kept == {}

"""Progress shows what the last steps say, and no more often than it should."""

from __future__ import annotations

import io
import sys
from functools import partial

import pytest
import torch
from rich.console import Console
from torch import nn

import phalanx
from phalanx.callbacks import FormationChosen, Progress, RanksChanged, progress_for
from phalanx.callbacks.live_display import LiveDisplay
from phalanx.callbacks.meter import (
    Meter,
    Plan,
    describe_epoch,
    describe_formation,
    describe_ranks,
    describe_rest,
    describe_step,
)
from phalanx.callbacks.progress import PlainLines
from tests.unit.callbacks.events import epoch_done, fit_begun, fit_ended, step_done

sgd = partial(torch.optim.SGD, lr=0.1)
PLAN = Plan(epochs=3, steps=None, steps_per_epoch=10)


class Clock:
    """A clock that goes on by ``tick_s`` whenever it is read."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.time_s = 0.0

    def __call__(self) -> float:
        self.time_s += self.tick_s
        return self.time_s


def text_console(*, is_terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=is_terminal, width=100, soft_wrap=True, highlight=False,
        legacy_windows=False, _environ={"TERM": "xterm"},
    )  # fmt: skip


def lines_of(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


def test_a_reading_is_of_the_window():
    meter = Meter(window=2)
    meter.add(step_done(1, shares=(8, 0), busy_s=(9.0, 9.0)), 0.1)  # falls out of the window
    meter.add(step_done(2, shares=(2, 6), busy_s=(0.02, 0.06)), 1.0)
    meter.add(step_done(3, shares=(4, 4), busy_s=(0.04, 0.1)), 1.5)
    reading = meter.read()
    assert reading.shares == pytest.approx((6 / 16, 10 / 16))
    assert reading.busy == pytest.approx((0.3, 0.8))
    assert reading.samples_per_s == pytest.approx(16 / (0.1 + 0.5))


def test_the_loss_is_smoothed_from_the_first_step_on():
    meter = Meter()
    meter.add(step_done(1, loss=4.0), 0.1)
    assert meter.read().loss == pytest.approx(4.0)
    meter.add(step_done(2, loss=2.0), 0.2)
    assert 2.0 < meter.read().loss < 3.0


def test_what_lies_between_two_epochs_is_not_in_the_speed():
    meter = Meter()
    meter.add(step_done(1), 1.0)
    assert meter.end_epoch() == 8
    meter.add(step_done(2), 100.0)
    assert meter.read().samples_per_s == pytest.approx(8 / 0.1)
    assert meter.end_epoch() == 8


def test_busy_is_never_more_than_all_of_the_time():
    meter = Meter()
    meter.add(step_done(1, busy_s=(0.2, 0.05)), 1.0)
    assert meter.read().busy == (1.0, 0.5)


def test_a_step_is_one_line():
    meter = Meter()
    meter.add(step_done(12), 1.2)
    assert describe_step(step_done(12), meter.read(), PLAN) == (
        "epoch 2/3, batch 2/10: loss 0.0833, 80 samples/s; "
        "replica 0: 50% of samples, 80% busy; replica 1: 50% of samples, 80% busy"
    )


def test_an_epoch_is_one_line():
    assert describe_epoch(epoch_done(2), 40, PLAN) == (
        "epoch 2/3: loss 0.5000, accuracy 75.0 %, "
        "validation loss 0.6000, validation accuracy 70.0 %, 40 samples/s"
    )
    untested = epoch_done(2, validation=None, train={"loss": 0.25})
    of_ten = Plan(epochs=10, steps=None, steps_per_epoch=None)
    assert describe_epoch(untested, 80, of_ten) == "epoch  2/10: loss 0.2500, 80 samples/s"
    of_steps = Plan(epochs=None, steps=30, steps_per_epoch=None)
    assert describe_epoch(untested, 80, of_steps) == "epoch 2: loss 0.2500, 80 samples/s"


def test_a_formation_is_one_line():
    chosen = FormationChosen(replicas=2, intra_op=1, reason="measured")
    assert describe_formation(chosen) == "Chosen: 2 replicas × 1 thread (measured)"


def test_a_change_of_the_ranks_is_one_line():
    changed = RanksChanged(step=7, rank=0, ranks=(0, 2), pids=(11, 13), lost=(1,), came=())
    assert describe_ranks(changed) == "Step 7: rank 1 was lost; now there are the ranks 0, 2."


@pytest.mark.parametrize(
    ("plan", "left"),
    [
        (PLAN, "0:03 left"),  # 27 steps of 8 rows at 80 rows a second
        (Plan(epochs=3, steps=13, steps_per_epoch=10), "0:01 left"),
        (Plan(epochs=None, steps=3600 * 10 + 3, steps_per_epoch=None), "1:00:00 left"),
        (Plan(epochs=3, steps=None, steps_per_epoch=None), ""),
    ],
)
def test_what_is_left_is_told_where_it_is_known(plan, left):
    meter = Meter()
    meter.add(step_done(3), 0.3)
    assert describe_rest(step_done(3), meter.read(), plan) == left


def test_plain_lines_come_at_an_interval_and_at_the_end_of_an_epoch():
    console, clock = text_console(), Clock(0.0)
    progress = Progress(console, interval_s=2.0, clock=clock)
    progress(fit_begun())
    for step in range(1, 11):
        clock.time_s += 0.5
        progress(step_done(step))
    progress(epoch_done(1))
    progress(fit_ended())
    batches = [line.split(":")[0] for line in lines_of(console)]
    assert batches == ["epoch 1/3, batch 4/10", "epoch 1/3, batch 8/10", "epoch 1/3"]


def test_plain_lines_are_not_broken():
    console = text_console()
    progress = Progress(console, interval_s=0.0, clock=Clock(0.0))
    progress(fit_begun())
    progress(step_done(1, replicas=8))
    assert len(lines_of(console)) == 1
    assert "\x1b" not in lines_of(console)[0]


def test_epochs_are_counted_from_the_start_of_the_run():
    console = text_console()
    progress = Progress(console)
    progress(fit_begun(epochs=4, last_epoch=12))
    progress(epoch_done(5))
    assert lines_of(console)[0].startswith("epoch  5/12: ")


def test_a_live_display_is_drawn_at_most_so_often():
    def num_drawn(tick_s: float) -> int:
        console = text_console(is_terminal=True)
        progress = Progress(console, interval_s=0.125, clock=Clock(tick_s))
        progress(fit_begun())
        for step in range(1, 201):
            progress(step_done(step))
        drawn = console.file.getvalue().count("samples/s")
        progress(fit_ended())
        return drawn

    # A drawing reads the clock twice more, so it seems to take one tick: at a small tick the
    # interval decides, at a large one the share of the time that drawing may take.
    assert num_drawn(0.0) == 1
    assert num_drawn(0.005) == pytest.approx(200 * 0.005 / 0.125, abs=2)
    assert num_drawn(1.0) == pytest.approx(200 / 20, abs=2)


def test_a_live_display_shows_epoch_and_replicas_and_leaves_the_lines():
    console = text_console(is_terminal=True)
    progress = Progress(console, interval_s=0.0, clock=Clock(0.0))
    progress(fit_begun())
    progress(step_done(3))
    drawn = console.file.getvalue()
    progress(epoch_done(1))
    progress(fit_ended())
    for words in ("epoch 1/3", "3/10", "loss", "samples/s", "replica 0", "replica 1", " 80% busy"):
        assert words in drawn
    assert "validation accuracy 70.0 %" in console.file.getvalue()
    assert console.file.getvalue().rstrip().endswith("\x1b[2K")  # what was live is wiped away


def test_a_loader_without_a_length_is_shown_without_one():
    console = text_console(is_terminal=True)
    progress = Progress(console, interval_s=0.0)
    progress(fit_begun(steps_per_epoch=None))
    progress(step_done(3))
    progress(fit_ended())
    assert "samples/s" in console.file.getvalue()
    assert " left" not in console.file.getvalue()


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, LiveDisplay), (False, PlainLines)])
def test_the_display_suits_where_it_goes(is_terminal, kind):
    progress = Progress(text_console(is_terminal=is_terminal))
    progress(fit_begun())
    assert isinstance(progress._display, kind)
    progress(fit_ended())
    assert progress._display is None


class Rank:
    """Stands for a trainer that is one of two ranks."""

    def __init__(self, rank):
        self.is_first_rank = rank == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_shows(rank):
    console = text_console()
    progress = Progress(console)
    progress.attach(Rank(rank))
    for event in (fit_begun(), step_done(1), epoch_done(1), fit_ended()):
        progress(event)
    assert bool(lines_of(console)) == (rank == 0)


class Terminal(io.StringIO):
    """Stands for stderr with somebody before it."""

    def isatty(self):
        return True


def test_a_fit_is_shown_where_somebody_looks_on(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert progress_for(None, ()) is None
    assert progress_for(True, ()) is not None
    monkeypatch.setattr("sys.stderr", Terminal())
    assert progress_for(None, ()) is not None
    assert progress_for(False, ()) is None
    assert progress_for(None, (Progress(),)) is progress_for(True, (Progress(),)) is None
    monkeypatch.setattr("sys.stderr", None)
    assert progress_for(None, ()) is None


def test_a_fit_shows_itself_and_puts_the_screen_back(monkeypatch):
    def loss(outputs, targets):
        if fails:
            raise KeyError("loss")
        return nn.functional.mse_loss(outputs, targets)

    fails, heard = [], []
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    data = [(torch.ones(4, 3), torch.zeros(4, 1))] * 2
    with phalanx.Trainer(
        nn.Linear(3, 1), loss, sgd, microbatches=None, replicas=1, callbacks=[heard.append]
    ) as trainer:
        trainer.fit(data, progress=False)
        assert sys.stderr.getvalue() == ""
        trainer.fit(data)
        shown = sys.stderr.getvalue()
        assert "epoch 2/2" in shown
        assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 1  # the cursor
        fails.append(True)
        with pytest.raises(KeyError):
            trainer.fit(data)
        assert sys.stderr.getvalue().count("\x1b[?25h") == 2
    kinds = [type(event).__name__ for event in heard]
    assert kinds.count("FitBegun") == kinds.count("FitEnded") == 3
    assert kinds[0] == "FitBegun"
    assert kinds[-1] == "FitEnded"

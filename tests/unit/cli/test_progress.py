"""Progress shows what the last steps say, and no more often than it should."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from phalanx.cli.progress import (
    LiveProgress,
    Meter,
    PlainProgress,
    Plan,
    choose_progress,
    describe_epoch,
    describe_formation,
    describe_step,
)
from phalanx.train import FormationChosen
from tests.unit.cli.events import epoch_done, step_done

PLAN = Plan(epochs=3, steps_per_epoch=10)


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
    assert describe_epoch(epoch_done(1), 40, PLAN) == (
        "epoch 2/3: loss 0.5000, accuracy 75.0 %, "
        "test loss 0.6000, test accuracy 70.0 %, 40 samples/s"
    )
    untested = epoch_done(9, validation=None, train={"loss": 0.25})
    assert describe_epoch(untested, 80, Plan(epochs=10, steps_per_epoch=None)) == (
        "epoch 10/10: loss 0.2500, 80 samples/s"
    )


def test_a_formation_is_one_line():
    chosen = FormationChosen(replicas=2, intra_op=1, reason="measured")
    assert describe_formation(chosen) == "Formation: 2 replicas × 1 thread (measured)"


def test_plain_lines_come_at_an_interval_and_at_the_end_of_an_epoch():
    console = text_console()
    progress = PlainProgress(console, PLAN, interval_s=2.0, clock=Clock(0.5))
    with progress:
        for step in range(1, 11):
            progress(step_done(step))
        progress(epoch_done(0))
    batches = [line.split(":")[0] for line in lines_of(console)]
    assert batches == ["epoch 1/3, batch 4/10", "epoch 1/3, batch 8/10", "epoch 1/3"]


def test_plain_lines_are_not_broken():
    console = text_console()
    progress = PlainProgress(console, PLAN, interval_s=0.0)
    progress(step_done(1, replicas=8))
    assert len(lines_of(console)) == 1
    assert "\x1b" not in lines_of(console)[0]


def test_a_live_display_is_drawn_at_most_so_often():
    def num_drawn(tick_s: float) -> int:
        console = text_console(is_terminal=True)
        with LiveProgress(console, PLAN, interval_s=0.125, clock=Clock(tick_s)) as progress:
            for step in range(1, 201):
                progress(step_done(step))
            return console.file.getvalue().count("samples/s")

    # A drawing reads the clock twice more, so it seems to take one tick: at a small tick the
    # interval decides, at a large one the share of the time that drawing may take.
    assert num_drawn(0.0) == 1
    assert num_drawn(0.005) == pytest.approx(200 * 0.005 / 0.125, abs=2)
    assert num_drawn(1.0) == pytest.approx(200 / 20, abs=2)


def test_a_live_display_shows_epoch_and_replicas_and_leaves_the_lines():
    console = text_console(is_terminal=True)
    with LiveProgress(console, PLAN, interval_s=0.0, clock=Clock(0.0)) as progress:
        progress(step_done(3))
        drawn = console.file.getvalue()
        progress(epoch_done(0))
    for words in ("epoch 1/3", "3/10", "loss", "samples/s", "replica 0", "replica 1", " 80% busy"):
        assert words in drawn
    assert "test accuracy 70.0 %" in console.file.getvalue()
    assert console.file.getvalue().rstrip().endswith("\x1b[2K")  # what was live is wiped away


def test_a_loader_without_a_length_is_shown_without_one():
    console = text_console(is_terminal=True)
    unknown = Plan(epochs=1, steps_per_epoch=None)
    with LiveProgress(console, unknown, interval_s=0.0) as progress:
        progress(step_done(3))
    assert "samples/s" in console.file.getvalue()
    assert " left" not in console.file.getvalue()


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, LiveProgress), (False, PlainProgress)])
def test_the_display_suits_where_it_goes(is_terminal, kind):
    assert isinstance(choose_progress(text_console(is_terminal=is_terminal), PLAN), kind)

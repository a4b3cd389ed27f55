"""Progress: a line for each epoch and event, and a bar that is not drawn too often."""

from __future__ import annotations

import io
import sys
from functools import partial

import pytest
import torch
from rich.console import Console
from torch import nn

import phalanx
from phalanx.callbacks import Progress, RanksChanged, progress_for
from tests.unit.callbacks.events import epoch_done, fit_begun, fit_ended, step_done

sgd = partial(torch.optim.SGD, lr=0.1)


def text_console(*, is_terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=is_terminal, width=100, soft_wrap=True, highlight=False,
        legacy_windows=False, _environ={"TERM": "xterm"},
    )  # fmt: skip


def lines_of(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


def test_an_epoch_and_an_event_are_one_line_each():
    console = text_console()
    progress = Progress(console)
    progress(fit_begun())
    for step in range(1, 11):
        progress(step_done(step))
    progress(epoch_done(1))
    progress(RanksChanged(step=7, rank=0, ranks=(0, 2), pids=(11, 13), lost=(1,), came=()))
    progress(fit_ended())
    assert lines_of(console) == [
        "epoch 1/3: loss 0.5000, accuracy 75.0 %, validation loss 0.6000, "
        "validation accuracy 70.0 %, 80 samples/s",
        "Step 7: rank 1 was lost; ranks 0, 2 train.",
    ]


@pytest.mark.parametrize(
    ("last_epoch", "start"), [(12, "epoch  5/12: loss"), (None, "epoch 5: loss")]
)
def test_epochs_are_counted_from_the_start_of_the_run(last_epoch, start):
    console = text_console()
    progress = Progress(console)
    progress(fit_begun(epochs=4, last_epoch=last_epoch))
    progress(epoch_done(5))
    assert lines_of(console)[0].startswith(start)


def test_a_bar_is_drawn_at_most_so_often():
    console = text_console(is_terminal=True)
    progress = Progress(console)
    progress(fit_begun())
    before = console.file.getvalue().count("samples/s")
    for step in range(1, 201):
        progress(step_done(step))
    assert console.file.getvalue().count("samples/s") - before < 20  # within a second or two
    progress(fit_ended())


@pytest.mark.parametrize(("length", "counts"), [(10, "3/10"), (None, "3/?")])
def test_a_bar_shows_the_epoch_and_leaves_the_lines(length, counts):
    console = text_console(is_terminal=True)
    progress = Progress(console)
    progress(fit_begun(steps_per_epoch=length))
    progress(step_done(3))
    drawn = console.file.getvalue()
    progress(epoch_done(1))
    progress(fit_ended())
    for words in ("epoch 1/3", counts, "loss 0.3333", "samples/s"):
        assert words in drawn, words
    assert "validation accuracy 70.0 %" in console.file.getvalue()
    assert console.file.getvalue().rstrip().endswith("\x1b[2K")  # the bar is wiped away


class Rank:
    """Stands for a trainer that is one of two ranks."""

    def __init__(self, rank):
        self.is_first_rank = rank == 0
        self.devices, self.intra_op = (torch.device("cpu"),), 1


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


@pytest.mark.promise("defaults-are-printed")
def test_the_replicas_that_a_default_chose_are_printed():
    console = text_console()
    batches = [(torch.ones(8, 3), torch.ones(8, 1))]
    with phalanx.Trainer(
        nn.Linear(3, 1), nn.functional.mse_loss, sgd, callbacks=[Progress(console)]
    ) as trainer:
        trainer.fit(batches)
        replicas = len(trainer.devices)
    noun = "replica" if replicas == 1 else "replicas"
    assert lines_of(console)[0] == f"{replicas} {noun} × 1 thread"

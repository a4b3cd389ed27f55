"""A history keeps what the run folder and the figure need, and gives each record out once."""

from __future__ import annotations

import json
import math

import pytest

from phalanx.cli.history import History, Totals
from tests.unit.cli.events import epoch_done, step_done


def played(num_steps, per_epoch=10):
    history = History()
    for step in range(1, num_steps + 1):
        history(step_done(step, per_epoch=per_epoch))
        if step % per_epoch == 0:
            history(epoch_done(step // per_epoch - 1, per_epoch=per_epoch))
    return history


def test_every_event_becomes_one_record():
    history = played(20)
    records = history.take_records()
    assert [record["kind"] for record in records] == (["step"] * 10 + ["epoch"]) * 2
    assert [record["step"] for record in records if record["kind"] == "step"] == [*range(1, 21)]
    assert [record["last_step"] for record in records if record["kind"] == "epoch"] == [10, 20]
    assert history.take_records() == []


def test_a_history_that_was_written_and_restored_is_the_same():
    history = played(20)
    written = json.loads(json.dumps(history.take_records()))
    twin = History()
    twin.restore(written)
    assert twin.losses == history.losses
    assert twin.epochs == history.epochs
    assert twin.take_records() == []


def test_a_loss_that_json_cannot_hold_comes_back_as_not_a_number():
    history = History()
    history.restore([{"kind": "step", "step": 1, "loss": None}])
    assert math.isnan(history.losses[0])


def test_only_the_last_steps_are_kept_in_full():
    history = played(200)
    assert len(history.losses) == 200
    assert len(history.last_steps) < 20
    assert history.last_steps[-1].step == 200


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

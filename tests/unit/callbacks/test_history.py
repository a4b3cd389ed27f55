"""A history keeps losses and epochs, also through a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

from phalanx.callbacks import History
from tests.unit.callbacks.events import events_of_run


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

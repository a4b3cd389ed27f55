"""What callbacks have counted, on its way to a checkpoint and back.

A callback takes part that has ``state_dict()`` and ``load_state_dict(state)``, under its class's
name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from phalanx.callbacks import AttachedTrainer, Callback
from phalanx.errors import CheckpointError, ConfigError
from phalanx.train.checkpoint import check_storable

__all__ = [
    "CallbackStates",
    "StatefulCallback",
    "attach_callbacks",
    "find_stateful",
    "load_state",
    "states_of",
]

# Any: a tensor, or a plain value.
CallbackStates = Mapping[str, Mapping[str, Any]]


@runtime_checkable
class StatefulCallback(Protocol):
    """A callback whose state a checkpoint holds."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors and plain values by name."""

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Take them over, or raise before anything changes."""


def attach_callbacks(callbacks: Sequence[Callback], trainer: AttachedTrainer) -> None:
    """Show ``trainer`` to those that want to see it."""
    for callback in callbacks:
        attach = getattr(callback, "attach", None)
        if attach is not None:
            attach(trainer)


def find_stateful(callbacks: Sequence[Callback]) -> dict[str, StatefulCallback]:
    """Return those that have a state, by their classes' names; the second `EMA` is "EMA 2"."""
    count: Counter[str] = Counter()
    found: dict[str, StatefulCallback] = {}
    for callback in callbacks:
        if isinstance(callback, StatefulCallback):
            name = type(callback).__name__
            count[name] += 1
            found[name if count[name] == 1 else f"{name} {count[name]}"] = callback
    return found


def states_of(callbacks: Mapping[str, StatefulCallback]) -> CallbackStates:
    """Return their states of now, by their names.

    Raises:
        ConfigError: A state is no mapping by names.
        UnsupportedError: It holds something that a checkpoint cannot.
    """
    states = {label: _state_of(label, callback) for label, callback in callbacks.items()}
    for label, state in states.items():
        check_storable(f"{label}.state_dict()", state)
    return states


def load_state(
    label: str, callback: StatefulCallback, state: Mapping[str, Any], folder: Path
) -> None:
    """Give it the state that ``folder`` holds.

    Raises:
        CheckpointError: It does not take it.
    """
    try:
        callback.load_state_dict(state)
    except Exception as error:  # whatever code of the user's raises
        raise CheckpointError(
            f"Checkpoint `{folder}` must hold what callback {label!r} takes, but that raised "
            f"{error!r}. Nothing has changed. Give the callbacks that were saved."
        ) from error


def _state_of(label: str, callback: StatefulCallback) -> Mapping[str, Any]:
    state: Any = callback.state_dict()  # Any: whatever the user's code returns
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(
            f"`state_dict()` of callback {label!r} must return a mapping of names to tensors and "
            f"plain values, but returned {state!r:.80}. Give every value a name."
        )
    return state

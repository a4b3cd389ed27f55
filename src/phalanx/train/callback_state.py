"""What callbacks have counted, on its way to a checkpoint and back.

A callback takes part that has ``state_dict()`` and ``load_state_dict(state)``. Its tensors lie in
`callbacks.safetensors`, the rest in the document, both under the name of its class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from phalanx.callbacks import AttachedTrainer, Callback
from phalanx.errors import CheckpointError, ConfigError
from phalanx.train.checkpoint import Stored, check_packed, pack_state, unpack_like

__all__ = [
    "CallbackStates",
    "StatefulCallback",
    "attach_callbacks",
    "copied_state",
    "find_stateful",
    "load_state",
    "read_callback_states",
    "store_callbacks",
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


def store_callbacks(callbacks: Mapping[str, StatefulCallback], stored: Stored) -> None:
    """Add their states to what becomes a checkpoint.

    Raises:
        ConfigError: A state is no mapping by names.
        CheckpointError: It holds something that is not plain.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}  # Any: JSON
    for label, callback in callbacks.items():
        values[label] = {}
        for name, value in _state_of(label, callback).items():
            if isinstance(value, Tensor):
                tensors[f"{label}.{name}"] = value
            else:
                values[label][name] = pack_state(value)
    stored.tensors["callbacks"], stored.values["callbacks"] = tensors, values


def read_callback_states(
    stored: Stored, callbacks: Mapping[str, StatefulCallback]
) -> CallbackStates:
    """Return the states of those ``callbacks`` that a checkpoint knows; others are left aside.

    Raises:
        AttributeError, TypeError, ValueError: It holds what :func:`store_callbacks` does not.
    """
    states: dict[str, dict[str, Any]] = {}
    for label, values in stored.values["callbacks"].items():
        for value in values.values():
            check_packed(value)
        states[label] = {name: unpack_like(value, None) for name, value in values.items()}
    for place, tensor in stored.tensors["callbacks"].items():
        label, dot, name = place.partition(".")
        if not dot or label not in states or name in states[label]:
            raise ValueError(f"{place!r:.80} is no tensor of a callback")
        states[label][name] = tensor
    return {label: state for label, state in states.items() if label in callbacks}


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


def copied_state(label: str, callback: StatefulCallback) -> dict[str, Any]:
    """Return its state of now, just as a checkpoint would give it back."""
    return {
        name: value.clone() if isinstance(value, Tensor) else unpack_like(pack_state(value), None)
        for name, value in _state_of(label, callback).items()
    }


def _state_of(label: str, callback: StatefulCallback) -> Mapping[str, Any]:
    state: Any = callback.state_dict()  # Any: whatever the user's code returns
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(
            f"`state_dict()` of callback {label!r} must return a mapping of names to tensors and "
            f"plain values, but returned {state!r:.80}. Give every value a name."
        )
    return state

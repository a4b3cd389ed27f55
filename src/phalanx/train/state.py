"""The state of a training run: from a trainer to a checkpoint, or to another rank, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.callbacks import Callback
from phalanx.distributed import ElasticExchange
from phalanx.errors import CheckpointError, PhalanxError, StateError
from phalanx.metrics import Metrics
from phalanx.replicas import generator_states, set_generators
from phalanx.torch_internals import pytree
from phalanx.train.checkpoint import Content, check_storable, copied, pack, unpack
from phalanx.train.position import Position
from phalanx.warning import warn_user

__all__ = [
    "RunProgress",
    "StatefulCallback",
    "TrainerState",
    "capture_state",
    "find_stateful",
    "join_ranks",
    "pack_state",
    "restore_state",
    "warn_of_changes",
    "warn_of_other_loader",
]

_EXTRA = "_extra_state"  # torch's name for what `get_extra_state()` returns


@runtime_checkable
class StatefulCallback(Protocol):
    """A callback whose state a checkpoint holds."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors and plain values by name."""

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Take them over, or raise before anything changes."""


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


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run has come, and with which settings.

    Attributes:
        loader: Options of the last loader that `fit` was given.
    """

    position: Position
    loader: dict[str, int]
    seed: int
    microbatches: int | None


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that decides how a run continues; ``callbacks`` are those with a state, by name.

    Attributes:
        written: Names of the buffers that training has written.
        metrics: Those of the running epoch; or, to restore them, those that have counted nothing.
    """

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    written: set[str]
    callbacks: Mapping[str, StatefulCallback]
    metrics: Metrics
    progress: RunProgress


def capture_state(state: TrainerState) -> Content:
    """Return what a checkpoint of ``state`` holds; its tensors are those of now, and no copies.

    Raises:
        UnsupportedError: A state holds something that a checkpoint cannot.
    """
    content = _capture(state)
    kinds = {key: content[key] for key in ("optimizer", "scheduler", "metrics")}
    for name, each in {"module": content["model"], **kinds, **content["callbacks"]}.items():
        check_storable(f"{name}.state_dict()", each)
    return content


def _capture(state: TrainerState) -> Content:
    progress, model = state.progress, state.module.state_dict()
    written = {k: v for k, v in _all_tensors(state.module).items() if k in state.written}
    return {
        "made of": _made_of(state),
        "model": model,
        "buffers": {k: v for k, v in written.items() if k not in model},  # `persistent=False`
        "optimizer": state.optimizer.state_dict(),
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
        "callbacks": {label: each.state_dict() for label, each in state.callbacks.items()},
        "metrics": state.metrics.capture() if progress.position.batch > 0 else {},
        "generators": generator_states(),  # which an optimizer or a callback may draw from
        "progress": {**vars(progress), "position": tuple(progress.position)},
    }


def _made_of(state: TrainerState) -> dict[str, Any]:
    """Return what must be the same where a checkpoint is restored, and torch does not compare."""
    names = {id(each): name for name, each in state.module.named_parameters()}
    groups = [group["params"] for group in state.optimizer.param_groups]
    return {
        "optimizer": type(state.optimizer).__name__,
        "parameter groups": [[names.get(id(each)) for each in group] for group in groups],
        "scheduler": None if state.scheduler is None else type(state.scheduler).__name__,
    }


def restore_state(state: TrainerState, content: Content, source: str) -> RunProgress:
    """Put ``content`` into module, optimizer, scheduler, callbacks and metrics; return the rest.

    Args:
        source: The content's source, for messages.

    Raises:
        CheckpointError: It is of another model, optimizer or scheduler, or one of them does not
            take it. Nothing has changed then.
    """
    _check_alike(state, content, source)
    position = Position(*content["progress"]["position"])
    progress = RunProgress(**{**content["progress"], "position": position})
    every_buffer = replace(state, written=set(_all_tensors(state.module)))
    before, begun = copied(_capture(every_buffer)), list[str]()
    loads = _loads(state, content)
    try:
        for name, load in loads.items():
            begun.append(name)
            load(content)
    except BaseException as error:
        for name in reversed(begun):
            try:
                loads[name](before)
            except Exception as failure:  # of the user's code: the others are put back all the same
                error.add_note(f"Also failed, to put the {name} back: {failure!r}.")
        if isinstance(error, Exception) and not isinstance(error, PhalanxError):
            raise CheckpointError(
                f"{source} must hold what the {begun[-1]} takes, but that raised {error!r}. "
                "Nothing has changed. Make module, optimizer, scheduler and callbacks as they were "
                "saved."
            ) from error
        raise
    state.written.clear()
    state.written.update(content["buffers"])
    return progress


# Any: state of all kinds.
def _loads(state: TrainerState, content: Content) -> dict[str, Callable[[Content], Any]]:
    """Return functions that put a content into one holder of state each, in order.

    ``content`` tells which callbacks have a state in it.
    """
    loads: dict[str, Callable[[Content], Any]] = {
        f"callback {label!r}": partial(_load_callback, state.callbacks[label], label)
        for label in content["callbacks"]
        if label in state.callbacks
    }
    loads["metrics"] = lambda held: state.metrics.restore(held["metrics"])
    loads["generators"] = lambda held: set_generators(held["generators"])
    scheduler = state.scheduler
    if scheduler is not None:
        loads["scheduler"] = lambda held: scheduler.load_state_dict(held["scheduler"])
    loads["optimizer"] = lambda held: _load_optimizer(state.optimizer, held["optimizer"])
    loads["module"] = lambda held: _load_module(state.module, held)
    return loads


def _load_callback(callback: StatefulCallback, label: str, content: Content) -> None:
    callback.load_state_dict(content["callbacks"][label])


def _load_optimizer(optimizer: Optimizer, stored: Any) -> None:
    """Load a state dict as it is: torch casts it to the parameter's dtype, and spoils texts."""
    optimizer.load_state_dict(stored)
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    with suppress(AttributeError, KeyError, TypeError):  # a state dict of another layout
        for index, values in stored["state"].items():
            parameter = parameters[index]
            entry = optimizer.state[parameter]
            for key in entry.keys() & values.keys():
                entry[key] = _as_stored(entry[key], values[key], parameter.device)


# Any: what an optimizer keeps of a parameter.
def _as_stored(loaded: Any, stored: Any, device: torch.device) -> Any:
    """Return ``loaded`` with the dtypes and texts of ``stored``, unless the optimizer made it."""
    if isinstance(loaded, Tensor) and isinstance(stored, Tensor):
        return loaded if loaded.dtype == stored.dtype else stored.to(loaded.device)
    if isinstance(loaded, Tensor) or type(loaded) is not type(stored):
        return loaded
    return pytree.tree_map_only(Tensor, lambda each: each.to(device), stored)


@torch.no_grad()
def _load_module(module: nn.Module, content: Content) -> None:
    module.load_state_dict(content["model"])
    ours = _all_tensors(module)
    for name, value in content["buffers"].items():
        ours[name].copy_(value)


def _check_alike(state: TrainerState, content: Content, source: str) -> None:
    """Refuse where the wrong values would be loaded without an error of torch's."""
    ours, stored = _made_of(state), content["made of"]
    for name, value in ours.items():
        if value != stored[name]:
            raise CheckpointError(
                f"{source} must have {name} {value!r:.300} as this trainer has, but has "
                f"{stored[name]!r:.300}. Make what was saved; a parameter group that was added "
                "later is added before `resume()`."
            )
    saved = {**content["model"], **content["buffers"]}
    for name, tensor in _all_tensors(state.module).items():
        other = saved.get(name)
        if not isinstance(other, Tensor) or name.endswith(_EXTRA):
            continue
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            raise CheckpointError(
                f"{source} must hold `{name}` as {_kind(tensor)}, which this model has, but holds "
                f"{_kind(other)}. Build the model that was saved."
            )


def warn_of_changes(restored: RunProgress, now: RunProgress) -> None:
    """Warn, at the line that calls `resume()`, of what keeps a run from continuing bit for bit."""
    for name in ("microbatches", "seed"):
        was, given = getattr(restored, name), getattr(now, name)
        if was != given:
            warn_user(
                f"`{name}` must be {was!r} as in the checkpoint to continue bit for bit, but is "
                f"{given!r}.",
            )


def warn_of_other_loader(saved: dict[str, int], given: dict[str, int]) -> None:
    """Warn of a loader whose batches may differ from those of the run that was saved."""
    for name in saved.keys() & given.keys():
        if saved[name] != given[name]:
            drawn = " where the data set draws random numbers" if name == "num_workers" else ""
            warn_user(
                f"`{name}` of the loader must be {saved[name]} as in the checkpoint to continue "
                f"bit for bit{drawn}, but is {given[name]}."
            )


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state dict, and the buffers that stand in none."""
    model = {k: v for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    return {**dict(module.named_buffers(remove_duplicate=False)), **model}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


# -- from rank to rank ---------------------------------------------


def pack_state(state: TrainerState, last_step: int | None) -> bytes:
    """Return all that another process needs to continue from ``state``.

    Args:
        last_step: The step at which the `fit` under way ends; None where it counts epochs.

    Raises:
        UnsupportedError: As for `capture_state`.
    """
    return pack({"content": capture_state(state), "last step": last_step})


def join_ranks(
    elastic: ElasticExchange,
    describe: Callable[[], dict[str, Any]],  # Any: JSON
    give: Callable[[], bytes],
    restore: Callable[[Content, str], None],
) -> int | None:
    """Become one of the ranks; return where the others' `fit` ends, if that is at a step.

    Args:
        describe, give: As `ElasticExchange.enter` takes them.
        restore: Takes over a content, and its source for messages.

    Raises:
        Exception: As `ElasticExchange.enter`, or ``restore``; this is none of the ranks then.
    """
    received = elastic.enter(describe, give)
    if received is None:
        return None
    try:
        message = unpack(received)
        restore(message["content"], "What a peer has sent")
    except BaseException as error:
        elastic.leave(finished=False)
        if isinstance(error, CheckpointError):
            raise StateError(
                "Every rank must train the same model with the same optimizer, but what this one "
                f"has been given by a peer does not fit: {error}"
            ) from error
        raise
    last_step: int | None = message["last step"]
    return last_step

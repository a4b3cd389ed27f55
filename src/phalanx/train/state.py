"""From a trainer to a checkpoint and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.errors import CheckpointError, PhalanxError
from phalanx.execution import ELEMENTWISE, MOMENTS
from phalanx.memory import is_expanded
from phalanx.train.callback_state import CallbackStates, StatefulCallback, load_state, states_of
from phalanx.train.checkpoint import Stored, check_storable, load_stored, save_stored
from phalanx.train.order import EpochOrder
from phalanx.train.position import Position, RunHistory
from phalanx.train.stored_state import (
    check_name,
    read_formation,
    read_optional_whole,
    read_position,
    read_whole,
    read_workloads,
)

__all__ = [
    "RunProgress",
    "TrainerState",
    "capture_state",
    "check_states",
    "restore_state",
    "warn_of_changes",
]

_EXTRA = "_extra_state"  # torch's name for what `get_extra_state()` returns


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run has come, and with what.

    Attributes:
        counted: What the metrics of the running epoch have counted.
        formation: Number of replicas and threads inside each, or None when not chosen yet.
        workloads: The shares that balancing has come to, or None without it.
    """

    position: Position
    order: EpochOrder | None
    counted: Mapping[str, Any]
    seed: int
    microbatches: int | None
    formation: tuple[int, int] | None
    workloads: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that decides how a run goes on; ``callbacks`` are those with a state, by name."""

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    history: RunHistory
    callbacks: Mapping[str, StatefulCallback]
    progress: RunProgress


def check_states(module: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Refuse states that a checkpoint could not hold, before anything is trained.

    Raises:
        UnsupportedError: One holds more than tensors and plain values.
    """
    for name, value in _extra_state(module).items():
        check_storable(f"state_dict()[{name!r}]", value)
    check_storable("optimizer.state_dict()", optimizer.state_dict())
    if scheduler is not None:
        check_storable("scheduler.state_dict()", scheduler.state_dict())


def capture_state(state: TrainerState, folder: Path) -> None:
    """Write ``state`` to ``folder``.

    Raises:
        UnsupportedError: A state holds something that a checkpoint cannot.
    """
    check_states(state.module, state.optimizer, state.scheduler)
    for name, value in state.progress.counted.items():
        check_storable(f"metrics[{name!r}]", value)
    progress, scheduler = state.progress, state.scheduler
    model = state.module.state_dict()
    stored = Stored(
        model={name: value for name, value in model.items() if isinstance(value, Tensor)},
        state={
            "extra": {k: value for k, value in model.items() if not isinstance(value, Tensor)},
            "buffers": _buffers_aside(state.module, state.history.buffers),
            "optimizer": state.optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "callbacks": states_of(state.callbacks),
            "metrics": dict(progress.counted),
            "order": None if progress.order is None else progress.order.pack(),
        },
        values={
            "position": progress.position._asdict(),
            "plain_steps": state.history.steps_whole,
            "seed": progress.seed,
            "microbatches": progress.microbatches,
            "formation": progress.formation,
            "workloads": progress.workloads,
            "optimizer": type(state.optimizer).__name__,
            "scheduler": _type_of(scheduler),
        },
    )
    save_stored(stored, folder)


def restore_state(
    state: TrainerState, folder: Path, accept: Callable[[RunProgress], None]
) -> RunProgress:
    """Put what ``folder`` holds into module, optimizer and scheduler, and return the rest.

    Args:
        accept: Called with the rest before anything changes; raises what it cannot take.

    Raises:
        CheckpointError: It is missing, damaged, or of another model; nothing has changed then.
    """
    stored = load_stored(folder)
    try:
        progress = _read_progress(stored)
        model, buffers = {**stored.model, **stored.state["extra"]}, stored.state["buffers"]
        _check_model(state.module, model, folder)  # first: it says most
        _check_buffers(state.module, buffers, folder)
        _check_apart(state.module, {*model, *buffers})
        _check_types(state, stored.values, folder)
        optimizer, scheduler = stored.state["optimizer"], stored.state["scheduler"]
        _check_optimizer(state.optimizer, optimizer, folder)
        heard = {k: v for k, v in stored.state["callbacks"].items() if k in state.callbacks}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"Checkpoint `{folder}` must hold what `save()` writes, but does not: {error!r}. Give "
            "a folder that `save()` has written."
        ) from error
    accept(progress)
    with _all_or_nothing(state, heard, folder):
        for label, each in heard.items():
            load_state(label, state.callbacks[label], each, folder)
        if state.scheduler is not None:
            state.scheduler.load_state_dict(scheduler)
        state.optimizer.load_state_dict(optimizer)
        _keep_dtypes(state.optimizer, optimizer)
        state.module.load_state_dict(model)
        with torch.no_grad():
            for name, value in buffers.items():
                state.module.get_buffer(name).copy_(value)
    state.history.buffers = set(buffers)
    state.history.steps_whole = stored.values["plain_steps"]
    return progress


def _read_progress(stored: Stored) -> RunProgress:
    """Read what a checkpoint says beside module, optimizer and scheduler.

    Raises:
        KeyError, TypeError, ValueError: Something is missing, or not of its kind.
    """
    values, order = stored.values, stored.state["order"]
    for name in ("optimizer", "scheduler"):
        check_name(name, values[name])
    if not isinstance(values["plain_steps"], bool):
        raise ValueError(f"`plain_steps` is {values['plain_steps']!r:.80}, neither true nor false")
    return RunProgress(
        position=read_position(values["position"]),
        order=None if order is None else EpochOrder.unpack(order),
        counted=stored.state["metrics"],
        seed=read_whole("seed", values["seed"], -(2**63), 2**64),
        microbatches=read_optional_whole("microbatches", values["microbatches"], 1),
        formation=read_formation(values["formation"]),
        workloads=read_workloads(values["workloads"]),
    )


@contextmanager
def _all_or_nothing(state: TrainerState, heard: CallbackStates, folder: Path) -> Iterator[None]:
    """Put everything back if the body fails, as code of the user's may.

    Args:
        heard: The callbacks that are given a state, by name.
    """
    callbacks = {k: deepcopy(dict(state.callbacks[k].state_dict())) for k in heard}
    module = {
        name: value.detach().cpu().clone()
        for name, value in _all_tensors(state.module).items()
        if not is_expanded(value)  # nothing is loaded into those
    }
    extra = _extra_state(state.module)
    options = {"state": state.optimizer.state, "param_groups": state.optimizer.param_groups}
    optimizer = deepcopy(state.optimizer.state_dict())
    scheduler = None if state.scheduler is None else deepcopy(state.scheduler.state_dict())
    try:
        yield
    except BaseException as error:
        with torch.no_grad():
            ours = _all_tensors(state.module)
            for name, value in module.items():
                ours[name].copy_(value)
        if extra:
            state.module.load_state_dict(extra, strict=False)
        state.optimizer.load_state_dict(optimizer)  # for what it keeps elsewhere
        state.optimizer.__setstate__(options)  # its `load_state_dict` makes new ones of both
        if state.scheduler is not None and scheduler is not None:
            state.scheduler.load_state_dict(scheduler)
        for label, before in callbacks.items():
            state.callbacks[label].load_state_dict(before)
        if isinstance(error, Exception) and not isinstance(error, PhalanxError):
            raise CheckpointError(
                f"Checkpoint `{folder}` must hold what the module, the optimizer and the scheduler "
                f"take, but one of them raised {error!r}. Nothing has changed."
            ) from error
        raise


def warn_of_changes(restored: RunProgress, now: RunProgress) -> None:
    """Warn, at the line that calls `resume()`, of what keeps a run from going on bit for bit."""
    for name in ("microbatches", "seed"):
        was, given = getattr(restored, name), getattr(now, name)
        if was != given:
            warnings.warn(
                f"`{name}` must be {was!r} as in the checkpoint to continue bit for bit, but is "
                f"{given!r}.",
                stacklevel=4,
            )


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state dict, and the buffers that stand in none."""
    model = {k: v for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    return {**dict(module.named_buffers(remove_duplicate=False)), **model}


def _extra_state(module: nn.Module) -> dict[str, Any]:
    """Return what `get_extra_state()` of all parts of the module returned."""
    state = module.state_dict()
    return {k: v for k, v in state.items() if k.endswith(_EXTRA) or not isinstance(v, Tensor)}


def _buffers_aside(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return those of ``names`` that stand in no state dict, as `persistent=False` has it."""
    ours = module.state_dict()
    everything = module.named_buffers(remove_duplicate=False)
    return {k: v for k, v in everything if k in names and k not in ours}


def _check_model(module: nn.Module, stored: Mapping[str, Any], folder: Path) -> None:
    ours = module.state_dict()
    lacks, holds = _named(ours.keys() - stored.keys()), _named(stored.keys() - ours.keys())
    if lacks or holds:
        told = [f"lacks {lacks}"] * bool(lacks)
        told += [f"holds {holds}, which the model does not have"] * bool(holds)
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of this model, but {' and '.join(told)}. Build the "
            "model that was saved."
        )
    for name, tensor in ours.items():
        if name.endswith(_EXTRA) or not isinstance(tensor, Tensor):
            continue
        if tensor.shape != stored[name].shape or tensor.dtype != stored[name].dtype:
            raise CheckpointError(
                f"Checkpoint `{folder}` must hold `{name}` as {_kind(tensor)}, but holds "
                f"{_kind(stored[name])}. Build the model that was saved."
            )


def _named(names: Collection[str]) -> str:
    shown = [f"`{name}`" for name in sorted(names)]
    return ", ".join(shown[:3] + ["…"] * (len(shown) > 3))


def _check_apart(module: nn.Module, names: Collection[str]) -> None:
    """Refuse to load into elements that are one and the same in memory."""
    for name, tensor in _all_tensors(module).items():
        if name in names and is_expanded(tensor):
            raise CheckpointError(
                f"`{name}` of the model must have memory for each of its elements to be loaded, "
                "but is expanded. Register a `.clone()` of it."
            )


def _check_buffers(module: nn.Module, stored: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse what training wrote into buffers outside of the state dict that are not here."""
    ours = dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in stored.items():
        here = _kind(ours[name]) if name in ours else "no such buffer"
        if here != _kind(tensor):
            raise CheckpointError(
                f"Checkpoint `{folder}` holds buffer `{name}`, which training writes, as "
                f"{_kind(tensor)}, but the model has {here}. Build the model that was saved."
            )


# Any, here and below: a state dict.
def _keep_dtypes(optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    """Give state its stored dtype back: torch casts what it loads to the parameter's."""
    if not _is_torchs(stored):
        return
    for parameter, key, tensor in _entries(optimizer, stored):
        loaded = optimizer.state[parameter].get(key)
        if isinstance(loaded, Tensor) and loaded.dtype != tensor.dtype:
            optimizer.state[parameter][key] = tensor.to(loaded.device)


def _entries(
    optimizer: Optimizer, stored: Mapping[str, Any]
) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yield the tensors of a state dict that is made as torch makes it, with their parameters."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for index, entries in stored.get("state", {}).items():
        if index in parameters:
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    yield parameters[index], key, value


def _is_torchs(state: Any) -> bool:
    """Tell whether a state dict is made as torch makes it; its own optimizer reads any other."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        return False
    entries = state["state"]
    return isinstance(entries, Mapping) and all(
        isinstance(value, Mapping) for key, value in entries.items() if isinstance(key, int)
    )


def _check_optimizer(optimizer: Optimizer, stored: Mapping[str, Any], folder: Path) -> None:
    ours = optimizer.state_dict()
    if not _is_torchs(ours):
        return
    sizes, stored_sizes = (
        [len(group["params"]) for group in state.get("param_groups", ())]
        for state in (ours, stored)
    )
    if sizes != stored_sizes:
        raise CheckpointError(
            f"Checkpoint `{folder}` must hold parameter groups of {sizes} parameters, but holds "
            f"{stored_sizes}. Make the optimizer that was saved; add a group that was added later "
            "before `resume()`."
        )
    if type(optimizer) not in ELEMENTWISE:
        return
    for parameter, key, tensor in _entries(optimizer, stored):
        if key in MOMENTS and tensor.shape != parameter.shape:
            raise CheckpointError(
                f"Checkpoint `{folder}` must hold `{key}` of a parameter of the optimizer in its "
                f"shape {tuple(parameter.shape)}, but holds it in {tuple(tensor.shape)}. Give the "
                "optimizer its parameters in the order that was saved."
            )


def _check_types(state: TrainerState, values: Mapping[str, Any], folder: Path) -> None:
    """Refuse an optimizer or a scheduler where the checkpoint is of another, or of none."""
    ours, theirs = type(state.optimizer).__name__, values["optimizer"]
    if ours != theirs:
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of optimizer {ours!r}, but is of {theirs!r}. Make the "
            "optimizer that was saved."
        )
    scheduler, stored = _type_of(state.scheduler), values["scheduler"]
    if scheduler != stored:
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of a run with scheduler {scheduler} like this "
            f"trainer's, but is of one with {stored}. Give `scheduler=` as it was."
        )


def _type_of(scheduler: LRScheduler | None) -> str | None:
    return None if scheduler is None else type(scheduler).__name__


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(torch.Size(tensor.shape))}"

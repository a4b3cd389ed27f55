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

from phalanx.errors import CheckpointError, PhalanxError, UnsupportedError
from phalanx.execution import ELEMENTWISE, MOMENTS
from phalanx.memory import is_expanded
from phalanx.train.callback_state import (
    CallbackStates,
    StatefulCallback,
    copied_state,
    load_state,
    read_callback_states,
    store_callbacks,
)
from phalanx.train.checkpoint import (
    Stored,
    check_packed,
    load_stored,
    pack_state,
    save_stored,
    unpack_like,
)
from phalanx.train.order import EpochOrder
from phalanx.train.position import Position, RunHistory
from phalanx.train.stored_state import (
    check_groups,
    check_name,
    check_optimizer_entries,
    check_scheduler_state,
    read_formation,
    read_optional_whole,
    read_position,
    read_whole,
    read_workloads,
)

__all__ = ["RunProgress", "TrainerState", "capture_state", "restore_state", "warn_of_changes"]


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
    counted: Mapping[str, Tensor]
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


def capture_state(state: TrainerState, folder: Path) -> None:
    """Write ``state`` to ``folder``.

    Raises:
        UnsupportedError: The module's state dict holds something that is no tensor.
        CheckpointError: The optimizer's, the scheduler's or a callback's state is not plain.
    """
    tensors, scalars = _optimizer_state(state.optimizer)
    groups = state.optimizer.state_dict()["param_groups"]
    progress, scheduler = state.progress, state.scheduler
    order, order_values = ({}, None) if progress.order is None else progress.order.pack()
    stored = Stored(
        tensors={
            "model": _module_state(state.module),
            "buffers": _buffers_aside(state.module, state.history.buffers),
            "optimizer": tensors,
            "order": order,
            "metrics": dict(progress.counted),
        },
        values={
            "position": progress.position._asdict(),
            "plain_steps": state.history.steps_whole,
            "order": order_values,
            "seed": progress.seed,
            "microbatches": progress.microbatches,
            "formation": progress.formation,
            "workloads": progress.workloads,
            "optimizer": type(state.optimizer).__name__,
            "optimizer_scalars": scalars,
            "optimizer_order": _optimizer_order(state.optimizer),
            "groups": [pack_state(group) for group in groups],
            "scheduler_type": _type_of(scheduler),
            "scheduler": None if scheduler is None else pack_state(scheduler.state_dict()),
        },
    )
    store_callbacks(state.callbacks, stored)
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
        _upgrade(stored)
        progress = _read_progress(stored)
        _check_model(state.module, stored.tensors["model"], folder)  # first: it says most
        optimizer = _read_optimizer(stored, state.optimizer)
        scheduler = _read_scheduler(stored.values["scheduler"], state.scheduler)
        _check_buffers(state.module, stored.tensors["buffers"], folder)
        _check_apart(state.module, {*stored.tensors["model"], *stored.tensors["buffers"]})
        _check_optimizer(state.optimizer, optimizer, stored, folder)
        _check_types(state, stored.values, folder)
        check_groups(optimizer["param_groups"], state.optimizer)
        if state.scheduler is not None:
            check_scheduler_state(scheduler, state.scheduler)
        heard = read_callback_states(stored, state.callbacks)
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
        _keep_dtypes(state.optimizer, stored.tensors["optimizer"])
        state.module.load_state_dict(stored.tensors["model"])
        with torch.no_grad():
            for name, value in stored.tensors["buffers"].items():
                state.module.get_buffer(name).copy_(value)
    state.history.buffers = set(stored.tensors["buffers"])
    state.history.steps_whole = stored.values["plain_steps"]
    return progress


def _upgrade(stored: Stored) -> None:
    """Fill in what checkpoints of older versions have not."""
    for name in ("buffers", "callbacks"):
        stored.tensors.setdefault(name, {})
    for name in ("scheduler_type", "workloads", "optimizer_order"):
        stored.values.setdefault(name, None)
    stored.values.setdefault("plain_steps", False)
    stored.values.setdefault("callbacks", {})


def _read_progress(stored: Stored) -> RunProgress:
    """Read what a checkpoint says beside module, optimizer and scheduler.

    Raises:
        KeyError, TypeError, ValueError: Something is missing, or not of its kind.
    """
    values = stored.values
    for name in ("model", "optimizer", "metrics"):
        if name not in stored.tensors:
            raise ValueError(f"`{name}.safetensors` is none of its files")
    for name in ("optimizer", "scheduler_type"):
        check_name(name, values[name])
    if not isinstance(values["plain_steps"], bool):
        raise ValueError(f"`plain_steps` is {values['plain_steps']!r:.80}, neither true nor false")
    order = values["order"]
    return RunProgress(
        position=read_position(values["position"]),
        order=None if order is None else EpochOrder.unpack(stored.tensors["order"], order),
        counted=stored.tensors["metrics"],
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
    callbacks = {label: copied_state(label, state.callbacks[label]) for label in heard}
    module = {
        name: value.detach().cpu().clone()
        for name, value in _all_tensors(state.module).items()
        if not is_expanded(value)  # nothing is loaded into those
    }
    options = {"state": state.optimizer.state, "param_groups": state.optimizer.param_groups}
    scheduler = None if state.scheduler is None else deepcopy(state.scheduler.state_dict())
    try:
        yield
    except BaseException as error:
        with torch.no_grad():
            ours = _all_tensors(state.module)
            for name, value in module.items():
                ours[name].copy_(value)
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
    """Warn, at the line of our caller's caller, of what keeps a run from going on bit for bit."""
    for name in ("microbatches", "seed"):
        was, given = getattr(restored, name), getattr(now, name)
        if was != given:
            warnings.warn(
                f"`{name}` must be {was!r} as in the checkpoint to continue bit for bit, but is "
                f"{given!r}.",
                stacklevel=3,
            )


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what a state dict holds, and the buffers that stand in none."""
    return {**dict(module.named_buffers(remove_duplicate=False)), **_module_state(module)}


def _module_state(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"`state_dict()` must hold tensors only to be saved without pickle, but `{name}` "
                f"is {type(value).__name__!r}. Keep extra state in a buffer."
            )
    return dict(state)


def _buffers_aside(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return those of ``names`` that stand in no state dict, as `persistent=False` has it."""
    ours = module.state_dict()
    everything = module.named_buffers(remove_duplicate=False)
    return {k: v for k, v in everything if k in names and k not in ours}


def _optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                scalars[f"{index}.{key}"] = pack_state(value)
    return tensors, scalars


def _optimizer_order(optimizer: Optimizer) -> list[str]:
    state = optimizer.state_dict()["state"]
    return [f"{index}.{key}" for index, entries in state.items() for key in entries]


# Any: JSON, and what is made of it.
def _read_scheduler(packed: Any, scheduler: LRScheduler | None) -> Any:
    check_packed(packed)
    return unpack_like(packed, None if scheduler is None else scheduler.state_dict())


def _read_optimizer(stored: Stored, optimizer: Optimizer) -> dict[str, Any]:
    """Return a state dict for ``optimizer``."""
    packed_groups, scalars = stored.values["groups"], stored.values["optimizer_scalars"]
    for each in (*scalars.values(), *packed_groups):
        check_packed(each)
    likes = optimizer.state_dict()["param_groups"]
    likes += [{}] * (len(packed_groups) - len(likes))
    groups = [unpack_like(each, like) for each, like in zip(packed_groups, likes, strict=False)]
    if not all(isinstance(group["params"], list) for group in groups):
        raise ValueError("`groups` holds one without a list of parameters")
    entries = dict(stored.tensors["optimizer"])
    entries |= {name: unpack_like(value, None) for name, value in scalars.items()}
    check_optimizer_entries(entries, optimizer)
    # Files of tensors have an order of their own; who goes over the state finds that of before.
    places = {name: place for place, name in enumerate(stored.values["optimizer_order"] or ())}
    entries = dict(sorted(entries.items(), key=lambda entry: places.get(entry[0], len(places))))
    state: dict[int, dict[str, Any]] = {}
    for name, value in entries.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": groups}


def _check_model(module: nn.Module, stored: Mapping[str, Tensor], folder: Path) -> None:
    ours = module.state_dict()
    missing = [name for name in ours if name not in stored]
    extra = [name for name in stored if name not in ours]
    if missing or extra:
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of this model, but lacks {missing[:3]} and holds "
            f"{extra[:3]} that the model does not have. Build the model that was saved."
        )
    for name, tensor in ours.items():
        if tensor.shape != stored[name].shape or tensor.dtype != stored[name].dtype:
            raise CheckpointError(
                f"Checkpoint `{folder}` must hold `{name}` as {_kind(tensor)}, but holds "
                f"{_kind(stored[name])}. Build the model that was saved."
            )


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


def _keep_dtypes(optimizer: Optimizer, stored: Mapping[str, Tensor]) -> None:
    """Give state its stored dtype back: torch casts what it loads to the parameter's."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in stored.items():
        index, key = name.split(".", 1)
        entry = optimizer.state[parameters[int(index)]]
        if entry[key].dtype != tensor.dtype:
            entry[key] = tensor.to(entry[key].device)


def _check_optimizer(
    optimizer: Optimizer, read: Mapping[str, Any], stored: Stored, folder: Path
) -> None:
    ours, theirs = type(optimizer).__name__, stored.values["optimizer"]
    if ours != theirs:
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of optimizer {ours!r}, but is of {theirs!r}. Make the "
            "optimizer that was saved."
        )
    sizes, stored_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, read["param_groups"])
    )
    if sizes != stored_sizes:
        raise CheckpointError(
            f"Checkpoint `{folder}` must hold parameter groups of {sizes} parameters, but holds "
            f"{stored_sizes}. Make the optimizer that was saved."
        )
    _check_moments(optimizer, stored.tensors["optimizer"], folder)


def _check_moments(optimizer: Optimizer, stored: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse what an elementwise optimizer has kept of parameters of other shapes."""
    if type(optimizer) not in ELEMENTWISE:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in stored.items():
        index, key = name.split(".", 1)
        shape = tuple(parameters[int(index)].shape)
        if key in MOMENTS and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"Checkpoint `{folder}` must hold `{key}` of the optimizer's parameter {index} in "
                f"its shape {shape}, but holds it in {tuple(tensor.shape)}. Give the optimizer its "
                "parameters in the order that was saved."
            )


def _check_types(state: TrainerState, values: Mapping[str, Any], folder: Path) -> None:
    """Refuse a scheduler where the checkpoint is of another, or of none."""
    ours, theirs = _type_of(state.scheduler), values["scheduler_type"]
    if ours != theirs:
        raise CheckpointError(
            f"Checkpoint `{folder}` must be of a run with scheduler {ours} like this trainer's, "
            f"but is of one with {theirs}. Give `scheduler=` as it was."
        )


def _type_of(scheduler: LRScheduler | None) -> str | None:
    return None if scheduler is None else type(scheduler).__name__


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(torch.Size(tensor.shape))}"

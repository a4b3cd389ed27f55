"""A trainer's arguments: refused where they cannot work, and made into what it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset

from phalanx.environment import num_ranks_here
from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.execution import ExecutorChoice, default_intra_op
from phalanx.plan import (
    check_argument,
    check_function,
    check_microbatches,
    read_count,
    read_number,
    read_whole,
)
from phalanx.replicas import num_cores, resolve_devices
from phalanx.types import Device


def check_options(
    microbatches: int | None,
    clip_norm: float | None,
    seed: int,
    weight: Any,
    callbacks: Sequence[Any],  # Any: whatever the user wrote
) -> None:
    """Refuse values of a trainer's options that cannot work, before anything is made."""
    check_microbatches(microbatches)
    if clip_norm is not None and not read_number("clip_norm", clip_norm) > 0:
        raise ConfigError(
            f"`clip_norm` must be above 0, but is {clip_norm!r}. Leave it out not to clip."
        )
    read_whole("seed", seed)
    if weight is not None:
        check_function("weight", weight)
    is_list = isinstance(callbacks, Sequence)
    check_argument(is_list, "callbacks", "be a list", callbacks, "Write callbacks=[…].")
    for place, callback in enumerate(callbacks):
        check_function(f"callbacks[{place}]", callback)


def read_replicas(
    replicas: int | str | Sequence[Device] | None,
    microbatches: int | None,
    module: nn.Module,
    choice: ExecutorChoice,
) -> tuple[torch.device, ...]:
    """Return the device of each replica.

    "auto" is one for each core, as far as there are microbatches for them. It is one on an
    accelerator, in the caller's own thread, and for each rank.
    """
    home = next((each.device for each in module.parameters()), torch.device("cpu"))
    if replicas is None and microbatches is not None:
        replicas = "auto"
    if replicas == "auto":
        check_argument(
            microbatches is not None,
            "replicas",
            "be a number, such as 2, or devices for microbatches=None (each computes one slice)",
            replicas,
        )
        if choice.kind in ("ranks", "inline") or home.type != "cpu":
            replicas = 1
        else:
            replicas = min(microbatches or 1, num_cores())
    devices = resolve_devices(1 if replicas is None else replicas, home, name="replicas")
    others = {str(each) for each in devices if each.type != "cpu"}
    if others and choice.kind == "processes":
        raise UnsupportedError(
            "`replicas` must be on CPUs for executor='processes', but are on "
            f"{', '.join(sorted(others))}. Use executor='threads'."
        )
    if microbatches is not None and len(devices) > microbatches:
        raise ConfigError(
            f"`replicas` must be at most as many as there are microbatches ({microbatches}), but "
            f"are {len(devices)}. Give fewer replicas, or begin a run with "
            f"microbatches={len(devices)} or more."
        )
    if choice.kind == "inline" and len(devices) != 1:
        raise ConfigError(
            "`replicas` must be 1 for executor='inline', which is the caller's own thread, but is "
            f"{len(devices)}. Use executor='threads' for more."
        )
    return devices


def read_intra_op(
    devices: Sequence[torch.device], microbatches: int | None, choice: ExecutorChoice
) -> int:
    """Return the number of threads inside operators, for each replica.

    With microbatches it is 1, as that number decides the bits. Else all replicas of this host share
    its cores.
    """
    if microbatches is not None:
        return 1
    return default_intra_op([*devices] * (num_ranks_here() if choice.kind == "ranks" else 1))


def check_between_steps(*, closed: bool, in_step: bool = False) -> None:
    """Refuse a call to a trainer that was closed, or in the middle of its step."""
    if closed:
        raise StateError("The trainer must be open, but was closed. Make a new one and `resume()`.")
    if in_step:
        raise StateError(
            "`step()`, `save()`, `resume()` and `join()` must be called between two steps, but one "
            "is called during a step. Let a signal's handler or another thread call `stop()`, and "
            "save after `fit()`."
        )


def check_loader(name: str, loader: Any) -> None:  # Any: whatever the user wrote
    """Refuse what yields no batches."""
    fits = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    fits = fits and not isinstance(loader, (str, bytes, Mapping))
    way_out = "Give a `DataLoader`, or a list of batches."
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        fits, way_out = False, "Give DataLoader(…, batch_size=64) of it."
    check_argument(fits, name, "yield batches", loader, way_out)


def check_fit(loader: Any, validate: Any, epochs: int | None, steps: int | None) -> None:
    """Refuse what yields no batches, and numbers of epochs or steps below 1."""
    check_loader("loader", loader)
    if validate is not None:
        check_loader("validate", validate)
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            read_count(name, value, 1)


def check_members(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer over parameters that the module has not, and hooks on gradients."""
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ConfigError(
                    f"`optimizer` must hold parameters of `module` only, but group {index} holds "
                    f"one of shape {tuple(parameter.shape)} that is not. Make it part of the "
                    "module (a loss with parameters too)."
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"Parameter `{own[id(parameter)]}` must have no gradient hooks in a `Trainer`, "
                    "but has. Remove them, train a deep copy (it has none), or use `DataParallel`, "
                    "which runs them."
                )


def make_optimizer(
    given: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None, module: nn.Module
) -> Optimizer:
    """Return the optimizer, or make it, and refuse one that a trainer cannot step."""
    parameters = list(module.parameters())
    if not parameters:
        raise ConfigError(
            "`module` must have at least one parameter to be trained, but has none. Call it "
            "directly, or in a `DataParallel`."
        )
    made = given
    if callable(given) and not isinstance(given, (Optimizer, nn.Module)):
        made = given(parameters)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            "`optimizer` must be a torch optimizer or a function that makes one from parameters, "
            f"but is or returned {made!r:.80}. Give lambda params: torch.optim.AdamW(params)."
        )
    if isinstance(made, (LBFGS, SparseAdam)):
        raise UnsupportedError(
            "`optimizer` must step once from dense gradients, but "
            f"{type(made).__name__!r} needs a closure or sparse gradients. Choose another."
        )
    check_members(module, made)
    return made


def make_scheduler(
    given: LRScheduler | Callable[[Optimizer], LRScheduler] | None,
    optimizer: Optimizer,
    interval: str,
) -> LRScheduler | None:
    """Return the scheduler, or make it, if any; refuse one that could not be stepped or saved."""
    if interval not in ("epoch", "step"):
        raise ConfigError(
            f"`scheduler_interval` must be 'epoch' or 'step', but is {interval!r}. Give 'step' for "
            "a schedule that counts updates."
        )
    if given is None:
        return None
    scheduler: Any = given
    if callable(given) and not isinstance(given, LRScheduler):
        scheduler = given(optimizer)
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            "`scheduler` must be one torch scheduler or a function that makes one from the "
            f"optimizer, but is or returned {scheduler!r:.80}. Give "
            "lambda optimizer: StepLR(optimizer, 10); combine several by SequentialLR."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "`scheduler` must be of the trainer's optimizer, but is of another. Give the optimizer "
            "itself as `optimizer`, or a function that makes the scheduler."
        )
    if interval == "step" and isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "`scheduler_interval` must be 'epoch' for ReduceLROnPlateau, which is stepped by an "
            "epoch's loss, but is 'step'."
        )
    made: LRScheduler = scheduler
    return made

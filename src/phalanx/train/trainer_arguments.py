"""What a trainer is given: refused where it cannot work, and made into what it uses."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.plan import (
    Layout,
    check_argument,
    check_function,
    check_iterable,
    check_microbatches,
    read_count,
    read_number,
    read_whole,
)
from phalanx.replicas import refuse_scripts
from phalanx.types import Device, WeightFn

__all__ = [
    "check_callables",
    "check_fit",
    "check_loader",
    "check_members",
    "check_moment",
    "check_options",
    "check_ranks",
    "check_replicas",
    "check_resize",
    "check_splitting",
    "make_optimizer",
    "make_scheduler",
    "read_folder",
]

_BATCHES = "yield batches"
_A_LOADER = "Give a `DataLoader`, or a list of batches."


def check_options(
    module: nn.Module,
    microbatches: int | None,
    intra_op: int | None,
    clip_norm: float | None,
) -> None:
    """Refuse options that cannot work."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"`module` must be an `nn.Module`, but is {type(module).__name__!r}.")
    refuse_scripts(module)
    check_microbatches(microbatches, intra_op)
    if clip_norm is not None and not read_number("clip_norm", clip_norm) > 0:
        raise ConfigError(
            f"`clip_norm` must be above 0, but is {clip_norm!r}. Give None not to clip."
        )


# Any, here and below: whatever the user wrote.
def check_callables(seed: Any, metrics: Any, callbacks: Any) -> None:
    """Refuse a seed, functions to be called and other words of the wrong kind."""
    read_whole("seed", seed)
    if metrics is not None:
        fits = isinstance(metrics, Mapping)
        way_out = "Give a name to each: {'accuracy': …}, say."
        check_argument(fits, "metrics", "map names to metrics", metrics, way_out)
    fits = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
    check_argument(fits, "callbacks", "hold functions", callbacks, "Give a list of them.")
    for place, callback in enumerate(callbacks):
        _check_callback(f"callbacks[{place}]", callback)
        if any(callback is other for other in callbacks[:place]):
            raise ConfigError(
                f"`callbacks[{place}]` must be another than those before, but is one of them "
                "again. Leave it out."
            )


def _check_callback(name: str, callback: Any) -> None:
    """Refuse what cannot be called, and half of what has a state."""
    check_function(name, callback)
    if isinstance(callback, type):
        called = callback.__name__
        raise ConfigError(
            f"`{name}` must be an object, but is the class {called!r}. Write {called}()."
        )
    for method in ("attach", "state_dict", "load_state_dict"):
        if hasattr(callback, method):
            check_function(f"{name}.{method}", getattr(callback, method))
    if hasattr(callback, "state_dict") != hasattr(callback, "load_state_dict"):
        raise ConfigError(
            f"`{name}` must have both `state_dict` and `load_state_dict`, or neither, but has one "
            "of them. Add the other."
        )


def read_folder(folder: Any) -> Path:
    """Read a path."""
    check_argument(isinstance(folder, (str, os.PathLike)), "folder", "be a path", folder)
    return Path(folder)


def check_replicas(
    replicas: int | str | Sequence[Device], microbatches: int | None, executor: str
) -> None:
    """Refuse replicas that are neither a number nor devices, or too many."""
    if isinstance(replicas, str) and replicas != "auto":
        raise ConfigError(
            f"`replicas` must be a number, a sequence of devices or 'auto', but is {replicas!r}. "
            f"Give {replicas.split(',')!r} for a replica on each."
        )
    number = isinstance(replicas, Integral) and not isinstance(replicas, bool)
    several = isinstance(replicas, Sequence)
    check_argument(
        number or several,
        "replicas",
        "be a number, a sequence of devices or 'auto'",
        replicas,
        "Give 2, or ['cpu', 'cpu'].",
    )
    if replicas == "auto" and microbatches is None:
        raise ConfigError(
            "`replicas` must be a number or devices for microbatches=None, where each replica "
            "computes one slice, but is 'auto'. Give replicas=2, say, or a number of microbatches."
        )
    count: Any = len(replicas) if isinstance(replicas, (tuple, list)) else replicas
    if microbatches is not None and isinstance(count, Integral) and int(count) > microbatches:
        raise ConfigError(
            f"`replicas` must be at most as many as there are microbatches ({microbatches}), but "
            f"are {count}. Give microbatches={count} or more, or fewer replicas."
        )
    if executor == "inline" and count not in ("auto", 1):
        raise ConfigError(
            f"`replicas` must be 1 for executor='inline', which is the caller's own thread, but is "
            f"{count!r}. Use executor='threads' for more."
        )


def check_ranks(executor: str, workloads: Any) -> None:
    """Refuse what ranks cannot do together."""
    if executor == "ranks" and isinstance(workloads, str):
        raise UnsupportedError(
            "`workloads` must be numbers for executor='ranks', whose ranks would measure different "
            f"ones, but is {workloads!r}. Give this rank's replicas' shares."
        )


def check_resize(executor: str) -> None:
    """Refuse another number of replicas where others would have to know of it."""
    if executor == "ranks":
        raise UnsupportedError(
            "`resize()` must be called in one process that owns all replicas, but executor='ranks' "
            "has several. Call `save()`, and `resume()` in a job of another size."
        )


def check_moment(*, closed: bool, in_step: bool = False) -> None:
    """Refuse a call to a trainer that was closed, or in the middle of its step."""
    if closed:
        raise StateError("The trainer must be open, but was closed. Make a new one and `resume()`.")
    if in_step:
        raise StateError(
            "`step()`, `save()`, `resume()` and `join()` must be called between two steps, but one "
            "is called during a step. Let a signal's handler or another thread call `stop()`, and "
            "save after `fit()`."
        )


def check_splitting(weight: WeightFn | None, layout: Layout | None) -> None:
    """Refuse options of the wrong kind."""
    if weight is not None:
        check_function("weight", weight)
    if layout is not None:
        fits = isinstance(layout, Layout)
        check_argument(fits, "layout", "be a `Layout`", layout, "Give Layout(dim=1), say.")


def check_loader(loader: Any) -> None:
    """Refuse what yields no batches."""
    check_iterable("loader", loader, _BATCHES, _A_LOADER)


def check_fit(loader: Any, validate: Any, epochs: int | None, steps: int | None) -> None:
    """Refuse what yields no batches, and numbers of epochs or steps below 1."""
    check_loader(loader)
    if validate is not None:
        check_iterable("validate", validate, _BATCHES, _A_LOADER)
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
    given: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None,
    parameters: list[nn.Parameter],
) -> Optimizer:
    """Return the optimizer, or make it, and refuse one that a trainer cannot step."""
    told = "not given" if given is None else repr(type(given).__name__)
    if given is None or not (isinstance(given, Optimizer) or callable(given)):
        raise ConfigError(
            "`optimizer` must be a torch optimizer or a function that makes one from parameters, "
            f"but is {told}. Give lambda params: torch.optim.AdamW(params, lr=1e-3)."
        )
    if not parameters:
        raise ConfigError(
            "`module` must have at least one parameter to be trained, but has none. Run it as it "
            "is, or in a `DataParallel`."
        )
    if isinstance(given, Optimizer):
        optimizer = given
    elif isinstance(given, nn.Module) or not _takes_one(given):
        raise ConfigError(
            "`optimizer` must be a function of the parameters alone, but is "
            f"{getattr(given, '__name__', type(given).__name__)!r}. Give Trainer(module, loss, "
            "optimizer), in this order."
        )
    else:
        optimizer = given(parameters)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "`optimizer` must return a `torch.optim.Optimizer`, but returned "
            f"{type(optimizer).__name__!r}."
        )
    if isinstance(optimizer, (LBFGS, SparseAdam)):
        raise UnsupportedError(
            "`optimizer` must step once from dense gradients, but "
            f"{type(optimizer).__name__!r} needs a closure or sparse gradients. Choose another."
        )
    return optimizer


def _takes_one(function: Callable[..., object]) -> bool:
    """Tell whether ``function`` can be called with one argument, as far as it says."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # some built-in functions do not say
        return True
    return True


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
    if isinstance(scheduler, (list, tuple)):
        raise ConfigError(
            f"`scheduler` must be one scheduler, but is {len(scheduler)} of them. Combine them: "
            "SequentialLR one after another, ChainedScheduler all at once."
        )
    for name in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(scheduler, name, None)):
            raise ConfigError(
                "`scheduler` must be a torch scheduler or a function that makes one from the "
                f"optimizer, but is {type(scheduler).__name__!r} without `{name}()`. Give "
                "lambda optimizer: StepLR(optimizer, 10)."
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

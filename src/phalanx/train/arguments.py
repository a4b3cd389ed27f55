"""What a trainer is given: refused where it cannot work, and made into what it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.plan import Layout
from phalanx.train.crews import CREWS
from phalanx.types import Device, WeightFn

__all__ = [
    "check_counts",
    "check_options",
    "check_replicas",
    "check_shard_loading",
    "make_optimizer",
    "make_scheduler",
]


def check_options(
    module: nn.Module,
    replicas: int | str | Sequence[Device],
    microbatches: int | None,
    intra_op: int | None,
    crew: str,
    clip_norm: float | None,
    timeout_s: float,
    max_failures: int | None,
) -> None:
    """Refuse options that cannot work."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"`module` must be an `nn.Module`, but is {type(module).__name__!r}.")
    if microbatches is not None and microbatches < 1:
        raise ConfigError(
            f"`microbatches` must be at least 1, but is {microbatches!r}. Give None for one slice "
            "per replica."
        )
    if intra_op is not None and intra_op < 1:
        raise ConfigError(f"`intra_op` must be at least 1 thread, but is {intra_op!r}.")
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(
            f"`clip_norm` must be above 0, but is {clip_norm!r}. Give None not to clip."
        )
    if crew not in CREWS:
        raise ConfigError(f"`crew` must be one of {', '.join(map(repr, CREWS))}, but is {crew!r}.")
    check_replicas(replicas, crew)
    if not timeout_s > 0:
        raise ConfigError(f"`timeout_s` must be above 0 seconds, but is {timeout_s!r}.")
    if max_failures is not None and max_failures < 0:
        raise ConfigError(
            f"`max_failures` must be at least 0, but is {max_failures!r}. Give None for any number."
        )


def check_replicas(replicas: int | str | Sequence[Device], crew: str) -> None:
    """Refuse replicas that are neither a number nor devices, or too many for the crew."""
    if isinstance(replicas, str) and replicas != "auto":
        raise ConfigError(
            f"`replicas` must be a number, a sequence of devices or 'auto', but is {replicas!r}. "
            f"Give [{replicas!r}] for one replica there."
        )
    count = len(replicas) if isinstance(replicas, (tuple, list)) else replicas
    if crew == "inline" and count not in ("auto", 1):
        raise ConfigError(
            f"`replicas` must be 1 for crew='inline', which is the caller's own thread, but is "
            f"{count!r}. Use crew='threads' for more."
        )


def check_shard_loading(
    shard_loading: bool, weight: WeightFn | None, layout: Layout | None
) -> bool:
    """Refuse options that need the rows before they are read."""
    for name, value in (("weight", weight), ("layout", layout)):
        if shard_loading and value is not None:
            raise ConfigError(
                f"`{name}` must be None for shard_loading=True, where rows are read only by those "
                "who compute with them, but is given. Use shard_loading=False."
            )
    return shard_loading


def check_counts(epochs: int | None, steps: int | None) -> None:
    """Refuse numbers of epochs or steps below 1."""
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and value < 1:
            raise ConfigError(f"`{name}` must be at least 1, but is {value!r}.")


def make_optimizer(
    make: Callable[[list[nn.Parameter]], Optimizer], parameters: list[nn.Parameter]
) -> Optimizer:
    """Make the optimizer, and refuse one that a trainer cannot step."""
    if not callable(make):
        raise ConfigError(
            "`optimizer` must be a function that makes one from parameters, but is "
            f"{type(make).__name__!r}. Give lambda params: torch.optim.AdamW(params, lr=1e-3)."
        )
    optimizer = make(parameters)
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


def make_scheduler(
    make: Callable[[Optimizer], LRScheduler] | None, optimizer: Optimizer
) -> LRScheduler | None:
    """Make the scheduler, if any, and refuse one that needs a metric."""
    if make is None:
        return None
    if not callable(make):
        raise ConfigError(
            "`scheduler` must be a function that makes one from the optimizer, but is "
            f"{type(make).__name__!r}. Give lambda optimizer: StepLR(optimizer, 10)."
        )
    scheduler = make(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UnsupportedError(
            "`scheduler` must need nothing to be stepped after every update, but "
            "'ReduceLROnPlateau' needs a metric. Step it yourself after `evaluate()`, outside of "
            "the trainer."
        )
    return scheduler

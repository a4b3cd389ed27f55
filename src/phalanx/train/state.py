"""The state of a training run: from a trainer to a checkpoint, or to another rank, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.callbacks import Callback, EventHandler
from phalanx.distributed import ElasticExchange
from phalanx.errors import CheckpointError, PhalanxError, StateError
from phalanx.metrics import Metrics
from phalanx.replicas import generator_states, set_generators
from phalanx.torch_internals import pytree
from phalanx.train.checkpoint import Content, check_storable, copied, from_bytes
from phalanx.train.position import RunPosition

_EXTRA = "_extra_state"  # torch's name for what `get_extra_state()` returns
_MADE_OF = "made of"


# Any, in this file: state of all kinds.
@runtime_checkable
class Stateful(Protocol):
    """A part of a run that a checkpoint holds."""

    def state_dict(self) -> Any:
        """Return tensors and plain values."""

    def load_state_dict(self, state: Any, /) -> object:
        """Take them over, or raise."""


@dataclass(frozen=True)
class _Part:
    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], object]


class TrainerState:
    """Everything that decides how a run continues, in parts that each have a `state_dict`.

    Args:
        callbacks: Those that are `Stateful` are parts.
        metrics: The counts of the running epoch.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        *,
        callbacks: Sequence[EventHandler],
        metrics: Metrics,
        run_position: RunPosition,
    ) -> None:
        self._module, self._optimizer, self._scheduler = module, optimizer, scheduler
        self._parts: dict[str, Stateful] = {
            **_named(callbacks),
            "metrics": metrics,
            "generators": _Part(generator_states, set_generators),  # optimizers may draw from them
            **({} if scheduler is None else {"scheduler": scheduler}),
            "optimizer": _Part(optimizer.state_dict, partial(_load_optimizer, optimizer)),
            "module": _Part(partial(_module_state, module), partial(_load_module, module)),
            "progress": run_position,
        }

    def capture(self) -> Content:
        """Return what a checkpoint holds; its tensors are those of now, and no copies.

        Raises:
            UnsupportedError: A state holds something that a checkpoint cannot.
        """
        content = self._states()
        for name, state in content.items():
            check_storable(name, state)
        return {_MADE_OF: self._made_of(), **content}

    def restore(self, content: Content, source: str) -> None:
        """Let each part take its state in ``content`` over; others stay as they are.

        Args:
            source: The content's source, for messages.

        Raises:
            CheckpointError: It is of another model, optimizer or scheduler, or a part does not take
                its state. Nothing has changed then.
        """
        self._check_alike(content[_MADE_OF], source)
        before, begun = copied(self._states()), list[str]()
        try:
            for name in [name for name in self._parts if name in content]:
                begun.append(name)
                self._parts[name].load_state_dict(content[name])
        except BaseException as error:
            for name in begun:
                try:
                    self._parts[name].load_state_dict(before[name])
                except Exception as failure:  # of the user's code: others are put back all the same
                    error.add_note(f"Also failed, to put the {name} back: {failure!r}.")
            if isinstance(error, Exception) and not isinstance(error, PhalanxError):
                raise CheckpointError(
                    f"{source} must hold what the {begun[-1]} takes, but that raised {error!r}. "
                    "Nothing has changed. Make module, optimizer, scheduler and callbacks as they "
                    "were saved."
                ) from error
            raise

    def _states(self) -> Content:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def _made_of(self) -> dict[str, Any]:
        """Return what must be the same where a state is restored, and torch does not compare."""
        names = {id(each): name for name, each in self._module.named_parameters()}
        groups = [group["params"] for group in self._optimizer.param_groups]
        held = _module_state(self._module)
        tensors = {**held["buffers"], **held["model"]}
        return {
            "optimizer": type(self._optimizer).__name__,
            "scheduler": None if self._scheduler is None else type(self._scheduler).__name__,
            "parameter groups": [[names.get(id(each)) for each in group] for group in groups],
            **{f"`{k}`": _kind(v) for k, v in tensors.items() if not k.endswith(_EXTRA)},
        }

    def _check_alike(self, stored: dict[str, Any], source: str) -> None:
        """Refuse where the wrong values would be loaded without an error of torch's."""
        for name, ours in self._made_of().items():
            if name in stored and stored[name] != ours:
                raise CheckpointError(
                    f"{source} must have {name} {ours!r:.300} as this trainer has, but has "
                    f"{stored[name]!r:.300}. Make what was saved; a parameter group that was added "
                    "later is added before `resume()`."
                )


def _named(callbacks: Sequence[EventHandler]) -> dict[str, Stateful]:
    """Return callbacks that have a state by their classes' names; the second is "EMA 2"."""
    count: Counter[str] = Counter()
    found: dict[str, Stateful] = {}
    for callback in callbacks:
        stateless = getattr(type(callback), "state_dict", None) is Callback.state_dict
        if isinstance(callback, Stateful) and not stateless:
            name = type(callback).__name__
            count[name] += 1
            found[f"callback {name if count[name] == 1 else f'{name} {count[name]}'!r}"] = callback
    return found


def _load_optimizer(optimizer: Optimizer, stored: Any) -> None:
    """Load a state dict unchanged: torch casts it to the parameter's dtype, and spoils texts."""
    optimizer.load_state_dict(stored)
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    with suppress(AttributeError, KeyError, TypeError):  # a state dict of another layout
        for index, values in stored["state"].items():
            parameter = parameters[index]
            entry = optimizer.state[parameter]
            for key in entry.keys() & values.keys():
                entry[key] = _as_stored(entry[key], values[key], parameter.device)


def _as_stored(loaded: Any, stored: Any, device: torch.device) -> Any:
    """Return ``loaded`` with the dtypes and texts of ``stored``, unless the optimizer made it."""
    if isinstance(loaded, Tensor) and isinstance(stored, Tensor):
        return loaded if loaded.dtype == stored.dtype else stored.to(loaded.device)
    if isinstance(loaded, Tensor) or type(loaded) is not type(stored):
        return loaded
    return pytree.tree_map_only(Tensor, lambda each: each.to(device), stored)


def _module_state(module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict, and its buffers that are in none."""
    model = module.state_dict()
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {"model": model, "buffers": {k: v for k, v in buffers.items() if k not in model}}


@torch.no_grad()
def _load_module(module: nn.Module, state: dict[str, Any]) -> None:
    module.load_state_dict(state["model"])
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name, value in state["buffers"].items():
        buffers[name].copy_(value)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def join_ranks(
    elastic: ElasticExchange,
    describe: Callable[[], dict[str, Any]],
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
        message = from_bytes(received)
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

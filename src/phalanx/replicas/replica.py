"""One full copy of the model on one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from phalanx.errors import ConfigError, PhalanxError, UnsupportedError
from phalanx.memory import has_memory, in_memory_order
from phalanx.plan import BufferRules
from phalanx.replicas.attributes import Attributes
from phalanx.replicas.compiling import refuse_compiled_in_place, shared_compilers
from phalanx.replicas.flat_layout import sent_at_once
from phalanx.replicas.hooks import (
    Hooks,
    kept_outside,
    shared_hooks,
    warn_of_kept_tensors,
    went_back_outside,
)
from phalanx.replicas.packing import span_bytes
from phalanx.replicas.parameter_copies import ParameterCopies
from phalanx.replicas.source_gradients import SourceGradients
from phalanx.replicas.statistics import StatisticsOfReplica
from phalanx.replicas.unchanged import SameParameters
from phalanx.torch_internals import foreach_add, make_subclass

__all__ = [
    "Replica",
    "add_gradients",
    "apart",
    "refuse_aliases",
    "refuse_lazy",
    "refuse_other_parameters",
    "refuse_scripts",
]

_TABLES = ("_parameters", "_buffers", "_modules")
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Replica:
    """A copy of ``source`` that one thread runs.

    On the source's own device the copy's parameters lie in the very memory of the source's, so
    there is nothing to refresh. On another device they lie in copies that all replicas there share,
    and that the executor brings up to date. Buffers are always the replica's own. Hooks that the
    user registers on the source, now or later, run in the replica.

    Args:
        source: The module that the user trains.
        device: Where this replica computes.
        index: Its number, for errors.
        all_parameters: Those of the whole executor, in whose order gradients are returned.
        prefix: What stands before the names of the source's buffers.
        rules: What becomes of buffers that the replica writes.
        copies: The source's parameters elsewhere; one for all replicas of the source.
        reaching: Catches gradients that reach the source itself; one for the whole executor.
        only_one: Whether there is no other replica of ``source``.

    Attributes:
        module: The copy.
        parameters: Its parameters, in the order of ``source.parameters()``.
    """

    def __init__(
        self,
        source: nn.Module,
        device: torch.device,
        index: int,
        *,
        all_parameters: Sequence[nn.Parameter] | None = None,
        prefix: str = "",
        rules: BufferRules | None = None,
        copies: ParameterCopies | None = None,
        reaching: SourceGradients | None = None,
        only_one: bool = False,
    ) -> None:
        self.index = index
        self.device = device
        self._originals = list(source.parameters())
        homes = (copies or ParameterCopies(self._originals)).values_on(device)
        with torch.inference_mode(False), torch.no_grad():
            self.module = _copy_module(source, device, homes)
        self.parameters = list(self.module.parameters())
        self.statistics = StatisticsOfReplica(
            source, self.module, prefix, rules if rules is not None else BufferRules()
        )
        self._attributes = Attributes(source, self.module)
        self._hooks = Hooks(source, self.module)
        if index == 0:
            warn_of_kept_tensors(source)
        everything = self._originals if all_parameters is None else all_parameters
        place_of = {id(parameter): place for place, parameter in enumerate(everything)}
        self._places = [place_of[id(original)] for original in self._originals]
        self._everything = everything
        self._reaching = SourceGradients(everything) if reaching is None else reaching
        self._caught: dict[int, Tensor] = {}
        self._same = SameParameters(source, self.parameters, homes, only_one=only_one)

    def matches_source(self) -> bool:
        """Tell whether all that has changed in the source is what :meth:`refresh` takes over."""
        return self._attributes.can_follow() and self._hooks.can_follow()

    def refresh(self) -> None:
        """Take over what has changed in the source: attributes, freezing, buffers.

        Attributes are plain values such as ``training`` or a dropout's ``p``.
        """
        self._attributes.refresh(self.device)
        for original, own in zip(self._originals, self.parameters, strict=True):
            if own.requires_grad != original.requires_grad:
                own.requires_grad_(original.requires_grad)
                self._reaching.watch(original)
        self.statistics.refresh()

    def outdate(self) -> None:
        """Make the next :meth:`refresh` copy all buffers, whatever their versions say."""
        self.statistics.outdate()

    @contextlib.contextmanager
    def running(self, *, forward: bool = True) -> Iterator[None]:
        """Run the model in the body, and its backward pass where that comes at once.

        What backward passes of the body bring to the source itself is this replica's. They run in
        this thread: torch has one thread for all backward passes on an accelerator, where replicas
        would wait for each other, and for the caller's own backward pass, which waits for them.

        Args:
            forward: False for a backward pass on its own: the source may be another by now.

        Raises:
            UnsupportedError: The body has changed parameters, or buffers of the source itself; or
                a graph of the replica was gone back through from outside.
        """
        before = self._same.note() if forward else None
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.drop_gradients()
                raise went_back_outside()
        self._caught = self._reaching.begin(self.index)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        except Exception as error:
            explained = kept_outside(error, self.module)
            if explained is not None:
                raise explained from error
            raise
        finally:
            self._reaching.end()
        if before is not None:
            self._same.check(before)
            self.statistics.check_source()

    def take_gradients(self, *, travel: bool = True) -> list[Tensor | None]:
        """Return and forget all gradients, in memory order, on the source's device.

        They stand in the order of the executor's parameters, with None for those of others. Those
        of one dtype travel from another device in one buffer.

        Args:
            travel: False leaves them on the replica's device.
        """
        gradients: list[Tensor | None] = [None] * len(self._everything)
        elsewhere: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for place, parameter, original in zip(
            self._places, self.parameters, self._originals, strict=True
        ):
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = None
                gradients[place] = gradient = in_memory_order(gradient, parameter)
                if travel and gradient.device != original.device:
                    kind = original.device, gradient.dtype
                    elsewhere.setdefault(kind, {})[place] = gradient
        for (home, _), sent in elsewhere.items():
            arrived = sent_at_once(list(sent.values()), home)
            for place, gradient in zip(sent, arrived, strict=True):
                gradients[place] = gradient
        caught, self._caught = self._caught, {}
        for place, other in caught.items():
            more, own = in_memory_order(other, self._everything[place]), gradients[place]
            more = more if travel else more.to(self.device)
            gradients[place] = more if own is None else own + more  # `own` may be another's, too
        return gradients

    def drop_gradients(self) -> None:
        """Forget what a failed microbatch left behind."""
        self._caught = {}
        for parameter in self.parameters:
            parameter.grad = None


def _copy_module(source: nn.Module, device: torch.device, homes: Sequence[Tensor]) -> nn.Module:
    """Deep-copy ``source`` with each parameter in the memory of its place in ``homes``."""
    refuse_lazy(source)
    refuse_scripts(source)
    _refuse_graphs(source)
    refuse_aliases(source)
    refuse_compiled_in_place(source)
    aliases = {id(p): _alias(p, home) for p, home in zip(source.parameters(), homes, strict=True)}
    memo: dict[int, object] = dict(aliases)
    memo.update(shared_hooks(source))
    memo.update(_compressed(source))
    memo.update(shared_compilers(source))
    try:
        module = copy.deepcopy(source, memo)
    except Exception as error:
        error.add_note(
            f"`{type(source).__name__}` must be copyable by `copy.deepcopy` to be run on replicas."
        )
        raise
    frozen = [p for p in source.parameters() if not p.requires_grad]  # a copy may share those
    refuse_other_parameters(module, [*(memo[id(p)] for p in source.parameters()), *frozen])
    for parameter in module.parameters():
        parameter.grad = None
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters = _stay  # type: ignore[method-assign]
    module.to(device)
    for own, home in zip(aliases.values(), homes, strict=True):
        if own.data_ptr() != home.data_ptr():  # a module may do so when it is moved
            own.data = home.data
    return module


def _stay() -> None:
    """Leave weights where they are: cuDNN's layout would be memory of the replica's own."""


def refuse_other_parameters(module: nn.Module, own: Iterable[object]) -> None:
    """Refuse a copy of a module that has made parameters: they would not follow the training.

    Args:
        module: The copy.
        own: The parameters that were given to it.
    """
    known = {id(parameter) for parameter in own}
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            raise UnsupportedError(
                f"Parameter `{name}` must be copied with its module to be run on replicas, but a "
                f"copy of `{type(module).__name__}` makes one of its own, which would not follow "
                "the training: by a `__deepcopy__`, `__getstate__` or `__reduce__` of it, or of a "
                "module in it. Let that return `copy.deepcopy(self.__dict__, memo)`, or "
                "`self.__dict__`, without what cannot be copied."
            )


def refuse_lazy(source: nn.Module) -> None:
    """Refuse parameters that have no shape yet."""
    for name, parameter in source.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"Parameter `{name}` must have a shape before the module is copied, but "
                "is lazy. Run the module once on a sample batch first."
            )


def refuse_scripts(source: nn.Module) -> None:
    """Refuse what TorchScript has made: its copies do not share memory with their source."""
    for name, module in source.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            told = f"Module `{name}`" if name else "`module`"
            raise UnsupportedError(
                f"{told} must be an ordinary module to be run on replicas, but is a "
                f"{type(module).__name__!r} of TorchScript. Give the module that it was made from."
            )


def _refuse_graphs(source: nn.Module) -> None:
    """Refuse attributes with a gradient of their own: copies would keep it to themselves."""
    for path, tensor in _attributes_of(source):
        if tensor.requires_grad:
            raise _no_attribute(path, tensor)


def refuse_aliases(source: nn.Module) -> None:
    """Refuse attributes in a parameter's memory: they would not follow it in a replica."""
    spans = [
        (parameter.device, *_span(parameter), name)
        for name, parameter in source.named_parameters()
        if _lies_somewhere(parameter)
    ]
    for path, tensor in _attributes_of(source):
        if not _lies_somewhere(tensor):
            continue
        first, last = _span(tensor)
        for device, start, stop, name in spans:
            if first < stop and start < last and device == tensor.device:
                raise UnsupportedError(
                    f"Attribute `{path}` must have memory of its own to be copied to replicas, but "
                    f"shares that of parameter `{name}`. Give it a clone, or take "
                    f"`{name}.detach()` in `forward()`."
                )


def _lies_somewhere(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and tensor.device.type != "meta"
    return strided and tensor.numel() > 0 and has_memory(tensor)


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + span_bytes(tensor)


def _attributes_of(source: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that modules hold in buffers and plain attributes, with their paths."""
    known = {id(parameter) for parameter in source.parameters()}
    for name, module in source.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            path = f"{name}.{key}" if name else key
            for tensor in _tensors_in(value) if key not in _TABLES else ():
                if id(tensor) not in known:
                    yield path, tensor


def _no_attribute(path: str, tensor: Tensor) -> PhalanxError:
    if tensor.is_leaf:
        return ConfigError(
            f"Attribute `{path}` must be an `nn.Parameter` to get a gradient from "
            "replicas, but is a tensor that requires one. Register it as a parameter."
        )
    return UnsupportedError(
        f"Attribute `{path}` must carry no graph to be copied to replicas, but was computed from "
        "tensors that require a gradient. Detach it, compute it in `forward()`, or give it as an "
        "input; instead of `weight_norm` use that of `torch.nn.utils.parametrizations`, and make "
        "pruning permanent by `prune.remove()`."
    )


# Any: an attribute of the user's own module.
def _tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors of an attribute: itself, or what a list, a tuple or a dict holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each, depth - 1)


def _compressed(source: nn.Module) -> dict[int, object]:
    """Return copies, by id, of tensors in compressed sparse formats, which deepcopy cannot make."""
    return {
        id(tensor): tensor.detach().clone()
        for module in source.modules()
        for value in vars(module).values()
        for tensor in _tensors_in(value)
        if tensor.layout in _COMPRESSED
    }


def _alias(parameter: nn.Parameter, home: Tensor) -> Tensor:
    # Not of `data`: with the version counter shared, autograd notices a change before backward.
    with torch.inference_mode(home.is_inference()):  # it has none then
        alias: Tensor = make_subclass(type(parameter), home.detach(), parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias


def add_gradients(
    left: Sequence[Tensor | None], right: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Add ``right`` to ``left``, in place, and return the sum; None stands for no gradient."""
    left = apart(left)
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        foreach_add([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def apart(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Give those gradients memory of their own that share it, before somebody adds to them.

    Autograd hands the gradient of a sum to both operands, reshaped where they are.
    """
    found = list(gradients)
    spans = [
        (gradient.data_ptr(), gradient.nbytes, place)
        for place, gradient in enumerate(gradients)
        if gradient is not None and has_memory(gradient)
    ]
    reached = 0
    for start, size, place in sorted(spans):
        gradient = found[place]
        if start < reached and size and gradient is not None:
            found[place] = gradient.clone()
        reached = max(reached, start + size)
    return found

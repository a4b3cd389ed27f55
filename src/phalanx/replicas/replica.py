"""One replica of the model: a shell of it on one device, and the gradients that it leaves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx.errors import ConfigError, UnsupportedError
from phalanx.memory import has_memory, laid_out_as
from phalanx.replicas.buffers import ReplicaBuffers
from phalanx.replicas.compiling import has_compiled
from phalanx.replicas.shell import Shell, alias_of
from phalanx.replicas.source import Source
from phalanx.replicas.source_gradients import SourceGradients
from phalanx.torch_internals import TorchDispatchMode


class Replica:
    """A shell of ``source`` that one thread runs: ``with replica:``, then each microbatch.

    On the source's own device the shell's parameters lie in the memory of the source's. On another
    device they lie in copies that all replicas there share, filled again before each forward run.
    Buffers are the replica's own.

    Args:
        source: The module that the user trains; one for all its replicas.
        device: Where this replica computes.
        index: Its number, for errors.
        source_gradients: Catches gradients that reach the source itself; one for the whole
            executor, in the order of whose parameters gradients are returned.

    Attributes:
        module: The shell's module.
        parameters: Its parameters, in the order of ``source.parameters``.
        buffers: Its buffers, and what microbatches write to them.
    """

    module: nn.Module
    buffers: ReplicaBuffers

    def __init__(
        self,
        source: Source,
        device: torch.device,
        index: int,
        source_gradients: SourceGradients,
    ) -> None:
        self.index = index
        self.device = device
        self._source = source
        originals, homes = source.parameters, source.on(device)
        self.parameters = list(map(alias_of, originals, homes))
        self._source_gradients = source_gradients
        places = [source_gradients.index_of[id(original)] for original in originals]
        self._columns = list(zip(places, self.parameters, originals, homes, strict=True))
        self._caught: dict[int, Tensor] = {}
        self._here: list[torch.autograd.set_multithreading_enabled] = []
        self._make_shell()

    def _make_shell(self) -> None:
        """Make a new shell. The leaves stay: graphs of earlier ones leave their gradients there."""
        source = self._source
        for _, own, original, home in self._columns:
            if own.requires_grad != original.requires_grad:
                own.requires_grad_(original.requires_grad)
                self._source_gradients.watch(original)
            if has_memory(home) and own.data_ptr() != home.data_ptr():
                own.data = home.data
        leaves = {id(original): own for _, own, original, _ in self._columns}
        self._shell = Shell(source.module, leaves)
        self.module = self._shell.module
        self.buffers = ReplicaBuffers(
            source.module, self.module, self.device, source.prefix, source.averages
        )
        self.buffers.start()  # or a forward pass would write to the source's
        self._fingerprint = source.fingerprint

    def assigned(self) -> list[str]:
        """Return the names of the attributes that `forward` has assigned in the present shell."""
        return self._shell.assigned()

    def __enter__(self) -> None:
        """Begin to run microbatches in this thread.

        Gradients that their backward passes bring to the source itself belong to this replica.

        Backward passes run in this thread, too. Torch has one thread for all of them on an
        accelerator: there, replicas would wait for each other, and for the caller's own backward
        pass, which waits for them.
        """
        self._source_gradients.begin(self.index, self._caught)
        self._here.append(torch.autograd.set_multithreading_enabled(False))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drop gradients and buffers if a microbatch has failed."""
        self._here.pop().__exit__(None, None, None)
        self._source_gradients.end(self.index)
        if kind is not None:
            self._discard()

    def begin(self, *, forward: bool = True) -> None:
        """Begin a microbatch, with the source's buffers as they are now.

        There is a new shell if `Source.outdate_shells` was called since the last one.

        Args:
            forward: False for a backward pass on its own: the source may be another by now.

        Raises:
            UnsupportedError: A backward pass from outside has run through a graph of the replica.
        """
        if any(parameter.grad is not None for parameter in self.parameters):
            raise UnsupportedError(
                "A backward pass from outside of a replica has reached its parameters: a tensor of "
                "its graph was kept, by a hook or in an attribute, and used in another loss. Its "
                "gradients are dropped. Let `forward()` return the tensors that the loss needs, or "
                "compute the loss in `forward=`, from the module that it is given."
            )
        if forward and self._fingerprint is not self._source.fingerprint:
            self._make_shell()
        if forward and self.buffers.are_there:
            self.buffers.start()

    def pop_gradients(self) -> list[Tensor | None]:
        """Return and forget all gradients, laid out as the parameters, on the source's device.

        They have the order of the executor's parameters, with None for parameters of other replicas
        and those without a gradient. No two of them share memory.
        """
        gradients: list[Tensor | None] = [None] * len(self._source_gradients.parameters)
        for place, parameter, original, home in self._columns:
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = None
                gradient = laid_out_as(parameter, gradient)
                if home is not original:
                    device = original.device
                    gradient = gradient.to(device, non_blocking=device.type != "cpu")
                gradients[place] = gradient
        for place, other in self._caught.items():
            more = laid_out_as(self._source_gradients.parameters[place], other)
            own = gradients[place]
            gradients[place] = more if own is None else own + more  # `own` may be another's, too
        self._caught.clear()
        return _apart(gradients)

    def originals_of(self, leaves: Collection[int]) -> frozenset[int]:
        """Return the ids of the source's parameters, given the ids of leaves of this replica."""
        pairs = [(own, theirs) for _, own, theirs, _ in self._columns]
        return frozenset(id(theirs) for own, theirs in pairs if {id(own), id(theirs)} & {*leaves})

    def _discard(self) -> None:
        """Forget the gradients and the buffers that a failed microbatch has left."""
        self.buffers.outdate()
        self._caught.clear()
        for parameter in self.parameters:
            parameter.grad = None


def check_replicable(source: nn.Module) -> None:
    """Refuse a module of which no shells can be made.

    Raises:
        ConfigError: It is no module, or a parameter holds no numbers.
        UnsupportedError: A part of it was made by TorchScript, or compiled by its own method; or
            this torch does not compile models whose random numbers are their own.
    """
    if not isinstance(source, nn.Module):
        raise ConfigError(
            f"`module` must be an `nn.Module`, but is {source!r:.80}. For a function, make one "
            "whose `forward` calls it."
        )
    for name, parameter in source.named_parameters():
        kind = "on the meta device" if parameter.is_meta else ""
        if kind or is_lazy(parameter):
            raise ConfigError(
                f"Parameter `{name}` must hold numbers, but is {kind or 'not initialized'}. Call a "
                "lazy module on a batch first, and `to_empty(device='cpu')` of others."
            )
    for name, part in source.named_modules():
        told = f"Module `{name}`" if name else "`module`"
        if isinstance(part, torch.jit.ScriptModule):  # its parameters are out of Python's reach
            raise UnsupportedError(
                f"{told} must be an ordinary module to be run on replicas, but is a "
                f"{type(part).__name__!r} of TorchScript. Give the module that it was made from."
            )
        if part._compiled_call_impl is not None:
            raise UnsupportedError(
                f"{told} must be compiled by `torch.compile(module)` to be run on replicas, but "
                "was by its own `compile()`, which is bound to the module itself. Put "
                "`torch.compile(module)` in its place."
            )
    if not hasattr(TorchDispatchMode, "ignore_compile_internals") and has_compiled(source):
        raise UnsupportedError(
            "`module` must not be compiled to be run on replicas with torch "
            f"{torch.__version__}, but is. Take a newer torch (2.13 does), or do not compile it."
        )


def _apart(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy gradients that share memory with others: they are going to be added to.

    Autograd gives the gradient of a sum to both operands, reshaped where they are.
    """
    found = list(gradients)
    spans = [
        (gradient.data_ptr(), gradient.nbytes, place)
        for place, gradient in enumerate(gradients)
        if gradient is not None
    ]
    reached = 0
    for start, size, place in sorted(spans):
        gradient = found[place]
        if start < reached and size and gradient is not None:
            found[place] = gradient.clone()
        reached = max(reached, start + size)
    return found

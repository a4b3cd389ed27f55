"""The containers of fbcunn, cunn and nn by their own names; dims and indices count from 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx import parallel
from phalanx.compat.torch7.explicit import Explicit, inner_module
from phalanx.errors import ConfigError, StateError
from phalanx.execution import ThreadExecutor
from phalanx.plan import Layout, check_argument, read_whole
from phalanx.replicas import known_devices, resolve_device
from phalanx.types import Device

Gpu = Device | int


class _Columns(parallel.AbstractParallel):
    """Columns whose inputs a container of Torch7's distributes."""

    def __init__(self, owner: AbstractParallel, dim: int) -> None:
        super().__init__(dim)
        self._owner = owner

    # Any, here and below: inputs, nested.
    def distribute(self, inputs: Any) -> Sequence[Any]:
        return self._owner._distributeInput(inputs)


class AbstractParallel(Explicit):
    """Run columns at the same time, and concatenate their outputs along ``dim``.

    A subclass says in ``_distributeInput(input)`` what each column gets: it returns one input per
    column. Give `Explicit(phalanx.AbstractParallel)` a ``merge(outputs)`` for another output.

    Args:
        dim: Along which outputs are concatenated.

    Example:
        >>> class Halves(AbstractParallel):
        ...     def _distributeInput(self, input):
        ...         return input.chunk(len(self))
        >>> with Halves(0).add(nn.Linear(4, 2), "cpu").add(nn.Linear(4, 2), "cpu") as net:
        ...     net.forward(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    Source: fbcunn's ``AbstractParallel``, whose subclasses wrote the way back by hand, too; here
    gradients follow by autograd.
    """

    module: _Columns

    def __init__(self, dim: int) -> None:
        super().__init__(_Columns(self, dim))

    def __len__(self) -> int:
        return len(self.module)

    def _distributeInput(self, input: Any) -> Sequence[Any]:
        raise NotImplementedError("`_distributeInput(input)` must return one input per column.")

    def add(self, module: nn.Module | Explicit, gpuid: Gpu | None = None) -> Self:
        """Append ``module`` as the next column, on ``gpuid`` or on :meth:`nextGPU`; return self."""
        place = None if gpuid is None else resolve_device(_name(gpuid))
        self.module.add(inner_module(module), place)
        return self

    def get(self, index: int) -> nn.Module:
        """Return column ``index``, counted from 0."""
        return self.module.get(index)

    def nextGPU(self) -> torch.device:
        """Return the device with the fewest columns, where the next one goes."""
        return self.module.next_device()

    def gpuSend(self, dest: Tensor, source: Tensor) -> Tensor:
        """Copy ``source`` into ``dest``, and return that.

        Any strides, devices and dtypes. Between accelerators the copy is asynchronous and ordered
        with the current streams of both; from or to the CPU it is finished when this returns.

        Raises:
            ConfigError: The shapes differ.

        Source: fbcunn's ``gpuSend(dest, source)``, where nothing kept ``source`` from changing.
        """
        if dest.shape != source.shape:
            raise ConfigError(
                f"`dest` must have the shape of `source`, {tuple(source.shape)}, but has "
                f"{tuple(dest.shape)}."
            )
        with torch.no_grad():
            on_cpu = "cpu" in (source.device.type, dest.device.type)
            return dest.copy_(source, non_blocking=not on_cpu)


class ModelParallel(AbstractParallel):
    """Give the whole input to every column, and concatenate their outputs along ``dim``.

    Args:
        dim: Along which outputs are concatenated.

    Example:
        >>> net = ModelParallel(1).add(nn.Linear(4, 2), "cpu").add(nn.Linear(4, 3), "cpu")
        >>> with net:
        ...     net.forward(torch.ones(2, 4)).shape
        torch.Size([2, 5])

    Source: fbcunn's ``ModelParallel``, which changed the columns' own gradInput.
    """

    def _distributeInput(self, input: Any) -> Sequence[Any]:
        return [input] * len(self)


class _Replicas(parallel.DataParallel):
    """Replicas as Torch7 has them: outputs of any size along `dim`, and functions for threads."""

    _checks_rows = False
    initialisers: tuple[Callable[[], object], ...] = ()

    def _make_executor(self) -> ThreadExecutor:
        executor = super()._make_executor()
        try:
            for init in self.initialisers:
                executor.each(lambda _, init=init: init())  # type: ignore[misc]
            executor.follow_attributes()  # what they have assigned
        except BaseException:
            executor.close()
            raise
        return executor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "initialisers": ()}


class _NoModule(nn.Module):
    """Stands for the module until there is one."""

    def forward(self, *_: Any) -> Any:
        raise StateError("The container needs a module. Call `add()` first.")


class DataParallelTable(Explicit):
    """Split nested inputs along ``dim`` over replicas of one module, and concatenate outputs.

    Outputs may have any size along ``dim``; scalars become one value per replica in use.

    Args:
        dim: Along which all input leaves are split and all outputs concatenated.
        flattenParams: Let parameters, and their gradients, lie one after another in memory.
        useNCCL: Changes nothing: gradients are added in a fixed order, which NCCL has none of.

    Raises:
        ConfigError: ``useNCCL`` without ``flattenParams``.

    Example:
        >>> net = DataParallelTable(0).add(nn.Linear(4, 2), ["cpu", "cpu"])
        >>> with net:
        ...     output = net.forward(torch.ones(3, 4))
        ...     net.backward(torch.ones(3, 4), torch.ones(3, 2)).shape
        torch.Size([3, 4])

    Source: torch/cunn's ``DataParallelTable``.
    """

    module: _Replicas

    def __init__(self, dim: int, flattenParams: bool = False, useNCCL: bool = False) -> None:
        if useNCCL and not flattenParams:
            raise ConfigError(
                "`useNCCL` must come with `flattenParams`, but that is False. Give "
                "DataParallelTable(dim, True, True)."
            )
        self.dim, self.flattenParams = read_whole("dim", dim), flattenParams
        self._gpus: list[torch.device] = []
        super().__init__(_Replicas(_NoModule(), ["cpu"]))

    def get(self, index: int) -> nn.Module:  # noqa: ARG002
        """Return the module, of which every column is a replica, whatever ``index``."""
        return self.module.module

    def nextGPU(self) -> torch.device:
        """Return the device with fewest replicas."""
        return min(known_devices(), key=self._gpus.count)

    def add(self, module: nn.Module | Explicit, gpus: Gpu | Sequence[Gpu] | None = None) -> Self:
        """Replicate ``module`` on ``gpus``; return self.

        Args:
            gpus: Indices of accelerators from 0, or devices such as ``"cpu"``; once, as a list, or
                one by one (default: :meth:`nextGPU`) with a module equal to the first each time,
                which is not needed any more.

        Raises:
            ConfigError: There is no such device, the list is empty, or a later module differs from
                the first.
            StateError: A list is given though something was added before.
        """
        if gpus is None:
            gpus = [self.nextGPU()]
        elif isinstance(gpus, (int, str, torch.device)):
            gpus = [gpus]
        elif self._gpus:
            raise StateError(
                "`add(module, gpus)` with a list must be the only `add()`, but there was one. Give "
                "all devices at once."
            )
        wanted = "be a list with a device for each replica, at least one"
        fits = isinstance(gpus, (list, tuple)) and len(gpus) > 0
        check_argument(fits, "gpus", wanted, gpus)
        places = [resolve_device(_name(gpu)) for gpu in gpus]
        own = inner_module(module)
        if self._gpus:
            _check_equal(self.get(0), own)
            own = self.get(0)
        made = _Replicas(own, self._gpus + places, layout=Layout(self.dim))
        if not self._gpus:
            own.to(places[0])
        self.close()
        self._gpus += places
        made.initialisers = self.module.initialisers
        self.module = made
        if self.flattenParams:
            self.getParameters()
        return self

    def threads(
        self,
        initFunc: Callable[[], object] | None = None,
        syncCopies: bool = True,  # noqa: ARG002
    ) -> Self:
        """Run ``initFunc()`` once in every replica's thread, before the first forward pass in it.

        Called several times, all functions run, in order. Replicas have threads anyway, and are
        always copied one at a time, so ``syncCopies`` asks for nothing more. Functions are not
        saved.

        Source: torch/cunn's ``DataParallelTable:threads``, where a second call before the first
        forward pass failed.
        """
        if initFunc is not None:
            self.close()
            self.module.initialisers += (initFunc,)
        return self

    def syncParameters(self) -> None:
        """Make all replicas equal to the module now; every forward pass does by itself."""
        self.module.sync_parameters()


class DataParallel(DataParallelTable):
    """Split the input along ``dim`` over equal columns, and concatenate their outputs.

    Columns are replicas of the first one, so their gradients are summed in it, once per pass back.
    Any size is split: the first columns get one more.

    Args:
        dim: Along which inputs are split and outputs concatenated.

    Example:
        >>> import copy
        >>> column = nn.Linear(4, 2)
        >>> net = DataParallel(0).add(column, "cpu").add(copy.deepcopy(column), "cpu")
        >>> with net:
        ...     net.forward(torch.ones(5, 4)).shape
        torch.Size([5, 2])

    Source: fbcunn's ``DataParallel``, which summed gradients that were summed already when two
    passes back followed each other.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)


class GPU(Explicit):
    """Run a module on one device, wherever its inputs come from.

    Args:
        module: It is moved, in place.
        device: An accelerator's index from 0, or a device. Without that device, the module
            runs where it is, with one warning.
        outdevice: Where outputs go; default: ``device``.

    Example:
        >>> net = GPU(nn.Linear(4, 2), "cpu")
        >>> net.forward(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    Source: torch/nn's ``nn.GPU``.
    """

    def __init__(
        self, module: nn.Module | Explicit, device: Gpu, outdevice: Gpu | None = None
    ) -> None:
        out = None if outdevice is None else _name(outdevice)
        super().__init__(parallel.OnDevice(inner_module(module), _name(device), out))


def _name(gpu: Gpu) -> Device:
    """Return the accelerator of an index, or the device that is given."""
    kind = known_devices()[0].type
    return f"{'cuda' if kind == 'cpu' else kind}:{gpu}" if isinstance(gpu, int) else gpu


def _check_equal(first: nn.Module, other: nn.Module) -> None:
    """Refuse a column that is no copy of the first, rather than drop it silently."""
    theirs, own = other.state_dict(), first.state_dict()
    same_layers = repr(first) == repr(other) and theirs.keys() == own.keys()
    if not same_layers or not all(
        torch.equal(theirs[name].to(value.device), value) for name, value in own.items()
    ):
        raise ConfigError(
            "`module` must be equal to the first column, whose replica it becomes, but has other "
            f"{'values' if same_layers else 'layers'}. Add `copy.deepcopy(first)`, or use "
            "`ModelParallel` for columns that differ."
        )

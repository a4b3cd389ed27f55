"""Data parallelism as an `nn.Module`: every replica takes its slice, outputs are merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.parallel.graph import Call, ReplicaGraph
from phalanx.plan import Layout, check_workloads, cut, num_rows, workload_sizes
from phalanx.replicas import (
    Report,
    Statistic,
    ThreadCrew,
    Turn,
    advance_process_generator,
    check_statistics,
    hold_caller_at_one_thread,
    merge_statistics,
    resolve_devices,
    restore_memory_format,
    seed_of_process,
    use_channels_last,
    wants_channels_last,
    write_statistics,
)
from phalanx.types import Device, Nested

__all__ = ["DataParallel"]

_INNER = "module."


class DataParallel(nn.Module):
    """Run ``module`` on several devices of this process, each replica on its slice of the batch.

    Output, input gradients and parameter gradients are those of the unwrapped module within float
    rounding (sums are taken in another order); only what looks across the batch, such as batch norm
    in training, sees its slice. Any optimizer over ``parameters()``, any loss, autograd as usual.
    Nested inputs are cut along dim 0 of every tensor leaf; tensors without dims and other values
    are given whole. Outputs are concatenated along dim 0, scalars stacked to one value per replica
    in use. Statistics that replicas write into buffers are averaged, weighted by rows; counters are
    not. `state_dict()` has the keys of the unwrapped module, and loads from either.

    Args:
        module: The module; it is trained in place (its parameters are the replicas' own memory).
        devices: One per replica, such as ``["cpu", "cpu"]``; default one for each device of its
            kind (two on a CPU).
        workloads: Relative share of each replica; equal by default; 0 switches one off.
        layout: Which dim of which input leaf is split; default dim 0 of all. Leaves are named by
            position or keyword (``"0"``, ``"mask"``, ``"0.items"``).
        intra_op: Threads inside operators per replica; default: cores divided by replicas.
        channels_last: Lay convolution weights out channels_last, which CPUs run faster; default:
            where the model has convolutions and runs so.

    Shapes:
        B: rows of the batch, 0 or more. Every split leaf is [B, …]; every merged output is [B, …].

    Raises:
        ConfigError: Devices or workloads do not fit; leaves differ in their rows; an output has no
            batch dim.
        UnsupportedError: In a second derivative (``create_graph=True``).

    Determinism: bitwise equal from run to run for the same devices and workloads.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> with DataParallel(net, devices=["cpu", "cpu"]) as model:
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> net.weight.grad.tolist()
        [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]

    Source: torch/cunn's DataParallelTable and fbcunn's DataParallel; unlike them any batch size is
    cut, leaves of different batch size are refused, and buffers do not drift apart.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device] | int | None = None,
        *,
        workloads: Sequence[float] | None = None,
        layout: Layout | None = None,
        intra_op: int | None = None,
        channels_last: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"`module` must be an `nn.Module`, but is {type(module).__name__!r}.")
        home = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._devices = resolve_devices(devices, home)
        self._workloads = [1.0] * len(self._devices) if workloads is None else list(workloads)
        check_workloads(self._workloads, len(self._devices))
        if intra_op is not None and intra_op < 1:
            raise ConfigError(f"`intra_op` must be at least 1 thread, but is {intra_op!r}.")
        self._layout = layout if layout is not None else Layout()
        self._intra_op = intra_op
        self._channels_last = channels_last
        self._crew: ThreadCrew | None = None
        self._restore_caller: Callable[[], object] | None = None
        self.module = module
        self.register_state_dict_post_hook(_strip_inner)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_prefix_inner)  # type: ignore[no-untyped-call]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each replica."""
        return self._devices

    # Any: the module's own signature.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all replicas and merge their outputs."""
        call = Call(args, kwargs)
        sizes = workload_sizes(num_rows(call.leaves, self._layout), self._workloads)
        if self._crew is None and self._wants_channels_last():
            return self._first_forward(call, sizes)
        return self._run(call, sizes)

    def close(self) -> None:
        """Dismiss the replicas' threads; the next forward pass makes new ones."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None
        if self._restore_caller is not None:
            self._restore_caller()
            self._restore_caller = None

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def extra_repr(self) -> str:
        names = [str(device) for device in self._devices]
        kinds = ", ".join(f"{name}×{names.count(name)}" for name in dict.fromkeys(names))
        return f"{len(names)} replicas on {kinds}, dim=0"

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under the names that the unwrapped module gives them."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers under the names that the unwrapped module gives them."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    # Any: what torch's own method takes and returns.
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the unwrapped module, or one whose keys begin with ``module.``."""
        plain = dict(state_dict)
        prefixed = bool(plain) and all(key.startswith(_INNER) for key in plain)
        if prefixed and "module" not in self.module._modules:
            plain = {key.removeprefix(_INNER): value for key, value in plain.items()}
        return self.module.load_state_dict(plain, *args, **kwargs)

    # Any: an attribute of the user's own module.
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        # Threads belong to this object in this process.
        return {**self.__dict__, "_crew": None, "_restore_caller": None}

    def _wants_channels_last(self) -> bool:
        wanted = self._channels_last
        return wants_channels_last(self.module) if wanted is None else wanted

    def _first_forward(self, call: Call, sizes: list[int]) -> Nested:
        """Try channels_last weights; a model that calls `view` may not run with them."""
        use_channels_last(self.module)
        if self._channels_last:
            return self._run(call, sizes)
        try:
            return self._run(call, sizes)
        except Exception:  # whatever a user's model raises; a true fault is raised again below
            restore_memory_format(self.module)
        try:
            outputs = self._run(call, sizes)
        except Exception:  # the user's own fault, raised again
            self.close()  # nothing was found out: the next batch is tried again
            raise
        self._channels_last = False
        return outputs

    def _open_crew(self) -> ThreadCrew:
        if self._crew is not None and not self._crew.matches_source():
            self.close()
        if self._crew is None:
            self._crew = ThreadCrew(
                self.module, self._devices, workloads=self._workloads, intra_op=self._intra_op
            )
            self._quiet_caller()
        return self._crew

    def _quiet_caller(self) -> None:
        """Let the caller's operators run on one thread while replicas share its CPU.

        The pool behind them (loss, optimizer) would go on spinning beside the replicas after each
        of them: at best 1.2 times the step of an MLP, 1.45 times that of a CNN.
        """
        if sum(device.type == "cpu" for device in self._devices) > 1:
            self._restore_caller = hold_caller_at_one_thread(self)

    def _run(self, call: Call, sizes: list[int]) -> Nested:
        crew = self._open_crew()
        used = (
            sizes if any(sizes) else [1] + [0] * (len(sizes) - 1)
        )  # an empty batch runs on replica 0
        graph = ReplicaGraph(crew, call, self._layout)

        def run(turn: Turn) -> Nested:
            args, kwargs = graph.inputs_of(turn)
            with turn.drawing():
                outputs = turn.replica.module(*args, **kwargs)
            return graph.keep_outputs(turn, outputs)

        seed = (seed_of_process(),) if crew.draws is not False else (0,)
        report = crew.run(
            cut(call.leaves, sizes, self._layout), run, weights=used, seed=seed, pinned=True
        )
        if crew.draws:
            advance_process_generator()
        self._write_statistics(report)
        return graph.merge([rows for rows, weight in zip(sizes, used, strict=True) if weight])

    def _write_statistics(self, report: Report) -> None:
        merged: dict[str, Statistic] = {}
        for operand in report.operands:
            merge_statistics(merged, operand.statistics)
        if merged:
            buffers = dict(self.module.named_buffers(remove_duplicate=False))
            check_statistics(buffers, merged)
            write_statistics(buffers, merged)


# Any: torch's own signatures for hooks.
def _strip_inner(_: nn.Module, state_dict: Any, prefix: str, __: Any) -> None:
    """Take our own level out of the keys, so that they are the unwrapped module's."""
    inner = prefix + _INNER
    for key in [key for key in state_dict if key.startswith(inner)]:
        state_dict[prefix + key[len(inner) :]] = state_dict.pop(key)
    metadata = getattr(state_dict, "_metadata", {})
    for key in [key for key in metadata if key == inner[:-1] or key.startswith(inner)]:
        metadata[prefix[:-1] + key[len(inner) - 1 :] if prefix else key[len(inner) :]] = (
            metadata.pop(key)
        )


def _prefix_inner(module: DataParallel, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put our own level back into the keys; files written by torch's wrappers have it already."""
    keys = [key for key in state_dict if key.startswith(prefix)]
    inner = prefix + _INNER
    if (
        keys
        and all(key.startswith(inner) for key in keys)
        and "module" not in module.module._modules
    ):
        return
    renamed = {inner + key[len(prefix) :]: state_dict.pop(key) for key in keys}
    state_dict.update(renamed)

"""MXNet's executor group: a module on several devices behind named inputs.

    batch ── binding: names, layouts ── parts ── DataParallel.forward_parts ── outputs by device
      │                                                                            │
      └── input gradients ───────────────────── autograd ─────────────────── whole outputs

Methods have the names of MXNet in Python (``get_outputs``) and in Scala (``getOutputs``). In Scala
the plain name returns tensors by device, and ``getOutputsMerged`` returns whole ones.

Shape legend: B rows of the batch; device i has rows_i of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.compat.mxnet.binding import Binding, BoundBatch, read_descs
from phalanx.compat.mxnet.eval_metrics import EvalMetric, one_or_all
from phalanx.compat.mxnet.monitor import Monitor
from phalanx.compat.mxnet.outputs import Outputs
from phalanx.compat.mxnet.parameters import copy_into, copy_out, share_tensors
from phalanx.errors import StateError
from phalanx.metrics import update_metric
from phalanx.parallel import DataParallel
from phalanx.plan import check_argument, workload_sizes
from phalanx.types import Device, Nested

# Any, in all signatures: descriptions, batches and labels in any of their forms; what a module
# returns.


@dataclass
class _Pass:
    """The last forward pass.

    Attributes:
        has_graph: Whether gradients can go back through it.
        went_back: Whether they have.
    """

    batch: BoundBatch
    outputs: Outputs
    has_graph: bool
    went_back: bool = False


class DataParallelExecutorGroup:
    """Run ``module`` on several devices, with inputs, labels and outputs by name.

    Args:
        module: Its forward takes the named inputs. If it returns losses (a number per device, the
            mean over its rows), :meth:`backward` needs no gradients. It is trained in place.
        contexts: A device for each replica; default as for `DataParallel`.
        workload: Relative share of each device; 0 switches one off.
        data_shapes: `DataDesc`s or (name, shape) of the inputs.
        label_shapes: Likewise. The module gets those that its forward names; metrics get all.
        for_training: Whether passes keep what a backward pass needs, unless told otherwise.
        inputs_need_grad: Whether :meth:`backward` computes gradients of the data, too.
        shared_group: A group whose parameters and buffers this module takes where names are equal.
            Make optimizers after it.
        grad_req: "write" replaces the parameters' `grad` in each backward pass, "add" adds to it. A
            parameter that shall get none is frozen: ``requires_grad_(False)``.
        output_shapes: `DataDesc`s of all outputs, for their names and layouts. Default: cut along
            the data's batch axis.

    Shapes:
        B: rows of the batch, 0 or more. Tensors with an N in their layout have B there.

    Raises:
        ConfigError: Something does not fit; the module is as it was.

    Determinism: as for `DataParallel`.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> with DataParallelExecutorGroup(net, 2, data_shapes=[("input", (3, 4))]) as group:
        ...     group.forward(torch.ones(3, 4))
        ...     group.backward([torch.ones(3, 2)])
        ...     [tuple(part.shape) for part in group.getOutputs()[0]]
        ...     [tuple(whole.shape) for whole in group.get_outputs()]
        [(2, 2), (1, 2)]
        [(3, 2)]
        >>> net.bias.grad
        tensor([3., 3.])

    Source: MXNet's ``module/executor_group.py`` and ``DataParallelExecutorGroup.scala``; unlike
    them any batch size is cut, padded rows count nowhere, and there is one set of parameters, not
    one per device.
    """

    _binding: Binding
    _pass: _Pass | None

    def __init__(
        self,
        module: nn.Module,
        contexts: Sequence[Device] | int | None = None,
        workload: Sequence[float] | None = None,
        data_shapes: Any = (),
        label_shapes: Any = None,
        *,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        shared_group: DataParallelExecutorGroup | None = None,
        grad_req: str = "write",
        output_shapes: Any = None,
    ) -> None:
        self._model = DataParallel(module, contexts, workloads=workload)
        self._declared = read_descs(output_shapes, "output_shapes")
        wanted = "be 'write' or 'add'"
        check_argument(grad_req in ("write", "add"), "grad_req", wanted, grad_req)
        self.bind_exec(data_shapes, label_shapes, shared_group)
        self._adds = grad_req == "add"
        self.for_training = for_training
        self.inputs_need_grad = inputs_need_grad

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the replicas' threads; the next forward pass makes new ones."""
        self._model.close()

    # -- facts -------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module, whose parameters are those of all devices."""
        module: nn.Module = self._model.module
        return module

    @property
    def contexts(self) -> tuple[torch.device, ...]:
        """The device of each replica."""
        return self._model.devices

    @property
    def workload(self) -> tuple[float, ...]:
        """Each device's relative share of the next batch."""
        return self._model.workloads

    def getBatchSize(self) -> int:
        """Return B; see ``batch_size``."""
        return self.batch_size

    @property
    def slices(self) -> list[slice]:
        """Each device's rows in the last batch, without padded ones; of the next one before it."""
        stops = list(accumulate(self._sizes))
        return [slice(stop - size, stop) for stop, size in zip(stops, self._sizes, strict=True)]

    def get_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of the outputs of the last pass, without padded rows.

        Before it, those that ``output_shapes`` declares.

        Raises:
            StateError: There was no forward pass yet, and none are declared.
        """
        if self._pass is None and self._declared:
            return [(each.name, each.shape) for each in self._declared]
        outputs = self._last().outputs.whole
        return [(name, tuple(getattr(each, "shape", ()))) for name, each in outputs.items()]

    getOutputShapes = get_output_shapes

    # -- binding -----------------------------------------------------

    def bind_exec(
        self,
        data_shapes: Any,
        label_shapes: Any = None,
        shared_group: DataParallelExecutorGroup | None = None,
        reshape: bool = False,
    ) -> None:
        """Bind to other shapes, dtypes, layouts or names.

        Args:
            data_shapes: As for the class.
            label_shapes: Likewise; None for no labels.
            shared_group: As for the class.
            reshape: Keep labels that are not given, as :meth:`reshape` does.

        Raises:
            ConfigError: They do not fit; the group stays bound as it was.
        """
        if reshape and label_shapes is None:
            label_shapes = self._binding.labels
        binding = Binding(self.module, data_shapes, label_shapes)
        if shared_group is not None:
            share_tensors(self.module, shared_group.module)
        self._binding = binding
        self._pass = None
        #: Rows of the last batch, padded ones included; before it, of the data as bound.
        self.batch_size = binding.batch_size
        self._sizes = workload_sizes(binding.batch_size, self.workload)

    bindExec = bind_exec

    def reshape(self, data_shapes: Any, label_shapes: Any = None) -> None:
        """Bind to other shapes, dtypes or layouts; labels that are not given stay as they are.

        Nothing is allocated: shapes may alternate at no cost. A batch of another size needs no call
        of it at all.
        """
        self.bind_exec(data_shapes, label_shapes, reshape=True)

    # -- passes ------------------------------------------------------

    def forward(self, data_batch: Any, is_train: bool | None = None) -> None:
        """Run the module on every device's share of a batch; :meth:`get_outputs` has the result.

        Args:
            data_batch: A `DataBatch`, inputs by name, a tuple of inputs, or the one input. Another
                batch size or image size than bound is bound by itself. Labels are left out where
                none are bound.
            is_train: Whether dropout and batch norm train, and gradients can follow; default:
                ``for_training``.

        Raises:
            ConfigError: The batch does not fit; the group is as it was.
        """
        trains = self.for_training if is_train is None else bool(is_train)
        has_graph = trains and self.for_training and not torch.is_inference_mode_enabled()
        read: list[Outputs] = []
        with _mode(self.module, trains, has_graph):
            needs_grad = has_graph and self.inputs_need_grad
            batch = self._binding.read(data_batch, needs_grad=needs_grad)
            sizes = workload_sizes(batch.rows, self.workload)
            used = sizes if any(sizes) else [1] + [0] * (len(sizes) - 1)  # an empty batch runs once
            calls = self._binding.calls(batch, sizes)
            parts = [call if size else None for call, size in zip(calls, used, strict=True)]

            def check(found: Sequence[Nested]) -> None:  # before the module's buffers change
                axis, home = self._binding.batch_axis, self.contexts[0]
                read.append(Outputs(found, sizes, self._declared, axis, home))

            self._model.forward_parts(parts, sizes, check=check)
        self.batch_size = batch.rows + batch.pad
        self._sizes = sizes
        self._pass = _Pass(batch, read[0], has_graph)

    def backward(self, out_grads: Nested = None) -> None:
        """Compute gradients of the last forward pass: of the whole batch, as on one device.

        Args:
            out_grads: One tensor or array for each output, in their order, shaped like the merged
                output. None for an output without one. Default: losses are differentiated, other
                outputs have no gradient.

        Raises:
            StateError: There is no forward pass to go back through, or it was none of training, or
                `torch.inference_mode` was on in it or is now; nothing is changed.
            ConfigError: ``out_grads`` does not fit; the pass can still be gone back through.
        """
        last = self._pass
        if last is None or not last.has_graph or torch.is_inference_mode_enabled():
            raise StateError(
                "`backward()` needs a forward pass in training mode before, of a group with "
                "for_training=True and outside of `torch.inference_mode()`. Call `forward()` first."
            )
        pairs = last.outputs.gradients(out_grads)
        last.has_graph = False  # whatever becomes of it: torch frees a graph on the way back
        if not self._adds:
            self.module.zero_grad()
        if pairs:
            tensors, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, gradients)
        last.went_back = True

    def get_outputs(self, merge_multi_context: bool = True) -> list[Any]:
        """Return the outputs, without padded rows and without a graph.

        Args:
            merge_multi_context: Whole ones, on the first device: joined along their batch axis;
                losses are the mean over all rows. Otherwise a list per output, None for devices
                that rested.

        Raises:
            StateError: There was no forward pass.
        """
        outputs = self._last().outputs
        if not merge_multi_context:
            return outputs.by_device()
        return outputs.detached(outputs.names)

    getOutputs = partialmethod(get_outputs, merge_multi_context=False)
    getOutputsMerged = get_outputs

    def get_input_grads(self, merge_multi_context: bool = True) -> list[Any]:
        """Return the gradients of the data in the order of their names, None for integers.

        Args:
            merge_multi_context: Whole ones, on the first device: joined along the batch axis,
                without padded rows; summed where the input was given whole. Otherwise a list per
                input; of one that was given whole, the first device has the sum.

        Raises:
            StateError: They are not computed, or there was no backward pass, or it failed.
        """
        if not self.inputs_need_grad:
            raise StateError(
                "`get_input_grads()` needs a group with inputs_need_grad=True, but it is False."
            )
        last = self._last()
        if not last.went_back:
            raise StateError("`get_input_grads()` needs a backward pass. Call `backward()` first.")
        grads = [
            torch.zeros_like(leaf) if leaf.requires_grad and leaf.grad is None else leaf.grad
            for leaf in last.batch.data.values()
        ]
        if merge_multi_context:
            return [None if grad is None else grad.to(self.contexts[0]) for grad in grads]
        axes = [each.batch_axis for each in self._binding.data]
        return [self._by_device(grad, axis) for grad, axis in zip(grads, axes, strict=True)]

    getInputGrads = partialmethod(get_input_grads, merge_multi_context=False)
    getInputGradsMerged = get_input_grads

    # -- parameters --------------------------------------------------

    def get_params(
        self,
        arg_params: MutableMapping[str, Any] | None = None,
        aux_params: MutableMapping[str, Any] | None = None,
    ) -> tuple[MutableMapping[str, Any], MutableMapping[str, Any]]:
        """Copy parameters and buffers into two mappings, and return these.

        Tensors and arrays that are there are written to, other names are left alone, and what is
        missing is added.

        Raises:
            ConfigError: One has another shape; nothing is written then.
        """
        arg_params = {} if arg_params is None else arg_params
        aux_params = {} if aux_params is None else aux_params
        parameters, buffers = self.module.named_parameters(), self.module.named_buffers()
        copy_out((dict(parameters), arg_params), (dict(buffers), aux_params))
        return arg_params, aux_params

    getParams = get_params

    def set_params(
        self,
        arg_params: Mapping[str, Any],
        aux_params: Mapping[str, Any] | None = None,
        allow_extra: bool = False,
        allow_missing: bool = True,
    ) -> None:
        """Copy parameters and buffers, tensors or arrays, into the module of all devices.

        Other parameters keep their values, unless ``allow_missing`` is False.

        Raises:
            ConfigError: Names are extra or missing and that is not allowed, or a shape differs;
                nothing is changed then.
        """
        known: dict[str, Tensor] = dict(self.module.named_parameters())
        if aux_params is not None:
            known.update(self.module.named_buffers())
        given = {**arg_params, **(aux_params or {})}
        copy_into(known, given, allow_extra=allow_extra, allow_missing=allow_missing)

    setParams = set_params

    # -- metrics and monitors ----------------------------------------

    def update_metric(self, eval_metric: Any, labels: Any = None) -> None:
        """Update a metric once with the last batch, whole and in order, without padded rows.

        Args:
            eval_metric: A `torchmetrics.Metric`, a collection, or an object with ``update(outputs,
                labels)``: one tensor each, or a list of several. Labels are left out where it takes
                none. It gets all outputs with dims; else the losses. Or an `EvalMetric`.
            labels: Of the whole batch; default: the batch's.

        Raises:
            StateError: There was no forward pass.
            ConfigError: Labels do not fit.
        """
        outputs, batch = self._last().outputs, self._last().batch
        own = batch.labels
        if labels is not None:
            own = self._binding.read_labels(labels, batch.rows, batch.pad)
        whole = {name: label.to(self.contexts[0]) for name, label in own.items()}
        picks = getattr(eval_metric, "output_names", None) is not None
        names = outputs.names if picks else outputs.measured
        found = dict(zip(names, outputs.detached(names), strict=True))
        if isinstance(eval_metric, EvalMetric):
            eval_metric.update_dict(whole, found)
        else:
            update_metric(eval_metric, one_or_all(found.values()), one_or_all(whole.values()))

    updateMetric = update_metric

    def install_monitor(self, mon: Monitor) -> None:
        """Let a monitor watch the module on every device."""
        mon.install(self.module)

    installMonitor = install_monitor

    # -- inside ------------------------------------------------------

    def _last(self) -> _Pass:
        if self._pass is None:
            raise StateError("The group must have run, but has not. Call `forward()` first.")
        return self._pass

    def _by_device(self, grad: Tensor | None, axis: int | None) -> list[Tensor | None]:
        """Return an input's gradient as the devices had its rows."""
        if grad is None or axis is None:
            return [grad, *[None] * (len(self._sizes) - 1)]
        parts = grad.split_with_sizes(self._sizes, axis)
        return [part.to(place) for part, place in zip(parts, self.contexts, strict=True)]


@contextlib.contextmanager
def _mode(module: nn.Module, trains: bool, has_graph: bool) -> Iterator[None]:
    """Train or evaluate in the body; parts that evaluate in a module that trains stay as they are.

    Args:
        has_graph: Whether a graph is recorded.
    """
    before = [(each, each.training) for each in module.modules()]
    if module.training != trains:
        module.train(trains)
    try:
        with torch.set_grad_enabled(has_graph):
            yield
    finally:
        for each, training in before:
            each.training = training

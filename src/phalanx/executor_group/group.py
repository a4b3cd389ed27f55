"""MXNet's executor group: a module on several devices behind named inputs.

    batch ── binding: names, layouts ── shares ── DataParallel.forward_parts ── outputs, per device
                                                        │                           │
                     input gradients, per device ───────┴───── backward ────────────┘

Methods have MXNet's names: those of Python (``get_outputs``) and those of Scala
(``getOutputs``), which take their arguments in either spelling.

Shape legend: B rows of the batch; device i has rows_i of them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, StateError
from phalanx.executor_group.batches import DataDesc, read_descs
from phalanx.executor_group.binding import Binding, resized
from phalanx.executor_group.feeding import feed, read_shares
from phalanx.executor_group.gradients import GradientRequests
from phalanx.executor_group.group_arguments import check_buffer_rules, check_devices, read_flag
from phalanx.executor_group.monitor import Monitor
from phalanx.executor_group.outputs import Output, measured, pick_gradients, read_outputs
from phalanx.executor_group.parameters import read_tensors, share_tensors, write_params
from phalanx.executor_group.passes import Pass, check_graph, mode_of, telling_shapes
from phalanx.executor_group.scala_names import takes_scala_names
from phalanx.executor_group.states import States
from phalanx.metrics import device_of, update_metric
from phalanx.parallel import DataParallel
from phalanx.plan import Decision, read_whole, workload_sizes
from phalanx.types import Device, Nested

__all__ = ["DataParallelExecutorGroup"]

# Any, in all signatures: descriptions, batches and labels in any of their forms; what a module
# returns.


class DataParallelExecutorGroup:
    """Run ``module`` on several devices, with inputs, labels and outputs by name.

    Args:
        module: Its forward takes the named inputs. If it returns losses (a number per device, the
            mean over its rows), :meth:`backward` needs no gradients. It is trained in place.
        contexts: A device for each replica; default as for `DataParallel`.
        workload: Relative share of each device, 0 switches one off; "auto" follows their speed.
        data_shapes: `DataDesc`s or (name, shape) of the inputs.
        label_shapes: Likewise. The module gets those that its forward names; metrics get all.
        for_training: Whether passes keep what a backward pass needs, unless told otherwise.
        inputs_need_grad: Whether :meth:`backward` computes gradients of the data, too.
        shared_group: A group whose parameters and buffers this module has from now on, wherever
            names are equal. Make optimizers after it.
        fixed_param_names: Names or patterns of parameters that get no gradient.
        grad_req: "write" replaces a parameter's `grad` in each backward pass, "add" adds to it,
            "null" computes none; or these by name or shell pattern.
        state_names: Which of ``data_shapes`` are states: they stay until they are set again, such
            as those of a recurrent net.
        output_shapes: `DataDesc`s of all outputs, for their names and layouts. Default: cut along
            the data's batch axis.
        buffers: What becomes of buffers that replicas write, as for `DataParallel`.

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

    @takes_scala_names
    def __init__(
        self,
        module: nn.Module,
        contexts: Sequence[Device] | int | None = None,
        workload: Sequence[float] | str | None = None,
        data_shapes: Any = (),
        label_shapes: Any = None,
        *,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        shared_group: DataParallelExecutorGroup | None = None,
        fixed_param_names: Sequence[str] | None = None,
        grad_req: str | Mapping[str, str] = "write",
        state_names: Sequence[str] | None = None,
        output_shapes: Any = None,
        buffers: str | Mapping[str, str] = "mean",
    ) -> None:
        if inputs_need_grad and not for_training:
            raise ConfigError(
                "`inputs_need_grad` must be False for a group that does not train, but is True. "
                "Give for_training=True."
            )
        check_devices(contexts)
        check_buffer_rules(buffers)
        self._model = DataParallel(module, contexts, workloads=workload, buffers=buffers)
        self._model._copies_inputs = True  # what the module writes to them stays in the replicas
        self._declared = read_descs(output_shapes, "output_shapes")
        self._binding = Binding.of(module, data_shapes, label_shapes, state_names)
        self._requests = GradientRequests(module, grad_req, fixed_param_names)
        self.for_training = for_training
        self.inputs_need_grad = inputs_need_grad
        self._states = States(len(self._model.devices))
        self._pass: Pass | None = None
        self._closed = False
        if shared_group is not None:
            self._share(shared_group)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{each.name} {each.shape}" for each in self._binding.data)
        return f"DataParallelExecutorGroup({self._model.extra_repr()}, {inputs})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the replicas' threads; idempotent."""
        self._closed = True
        self._model.close()

    # -- what it is --------------------------------------------------

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

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The last 10,000 decisions of `workload="auto"`, with their reasons."""
        return self._model.decisions

    @property
    def batch_size(self) -> int:
        """B, padded rows included."""
        return self._binding.batch_size

    def getBatchSize(self) -> int:
        """Return B; see ``batch_size``."""
        return self.batch_size

    @property
    def slices(self) -> list[slice]:
        """Each device's rows in the last batch, without padded ones; of the next one before it."""
        sizes = self._next_sizes() if self._pass is None else self._pass.sizes
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    @property
    def data_shapes(self) -> tuple[DataDesc, ...]:
        """The inputs, as bound now, without states."""
        return self._binding.data

    @property
    def label_shapes(self) -> tuple[DataDesc, ...]:
        """The labels, as bound now."""
        return self._binding.labels

    def get_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of the outputs for ``batch_size`` rows.

        Raises:
            StateError: They are not declared, and there was no forward pass yet.
        """
        if self._pass is not None:
            return [(each.name, each.shape(self.batch_size)) for each in self._pass.outputs]
        if not self._declared:
            raise StateError(
                "The group must have run to know its outputs, but has not. Call `forward()` first, "
                "or declare `output_shapes`."
            )
        known = [resized(each, self.batch_size) for each in self._declared]
        return [(each.name, each.shape) for each in known]

    getOutputShapes = get_output_shapes

    # -- binding -----------------------------------------------------

    @takes_scala_names
    def bind_exec(
        self,
        data_shapes: Any,
        label_shapes: Any = None,
        shared_group: DataParallelExecutorGroup | None = None,
        reshape: bool = False,  # noqa: ARG002 (nothing is allocated, so both ways are one)
    ) -> None:
        """Bind to other shapes, dtypes, layouts or names.

        Args:
            data_shapes: As for the class. States that are not among them follow the batch size.
            label_shapes: Likewise; None for no labels.
            shared_group: As for the class.
            reshape: MXNet's; taken and not used.

        Raises:
            StateError: The group is closed.
            ConfigError: They do not fit; the group stays bound as it was.
        """
        self._check_open()
        binding = self._binding.rebound(self.module, data_shapes, label_shapes)
        if shared_group is not None:
            self._share(shared_group)
        self._binding, self._pass = binding, None

    bindExec = bind_exec

    @takes_scala_names
    def reshape(self, data_shapes: Any, label_shapes: Any = None) -> None:
        """Bind to other shapes, dtypes or layouts; labels that are not given follow the batch size.

        Nothing is allocated: shapes may alternate at no cost. A batch of another size needs no call
        of it at all.
        """
        if label_shapes is None:
            label_shapes = self._binding.followed(data_shapes).labels
        self.bind_exec(data_shapes, label_shapes)

    # -- passes ------------------------------------------------------

    @takes_scala_names
    def forward(self, data_batch: Any, is_train: bool | None = None) -> None:
        """Run the module on every device's share of a batch; :meth:`get_outputs` has the result.

        Args:
            data_batch: A `DataBatch`, inputs by name (labels may be among them), a tuple of inputs,
                or the one input; or a list of `DataBatch`es, one per device, None for one that
                rests. Another batch size or image size than bound is bound by itself. Labels are
                left out where none are bound.
            is_train: Whether dropout and batch norm train, and gradients can follow; default:
                ``for_training``.

        Raises:
            ConfigError: The batch does not fit; the group is as it was.
        """
        self._check_open()
        trains = self.for_training if is_train is None else read_flag("is_train", is_train)
        binding, shares, pads = read_shares(self._binding, data_batch, self.workload)
        inferred = torch.is_inference_mode_enabled()
        graph = trains and self.for_training and not inferred
        fed = feed(
            binding,
            shares,
            self._states,
            self.contexts,
            pad=pads[0] if len(pads) == 1 else 0,
            graph=graph,
            needs_grad=self.inputs_need_grad,
        )

        def read(found: Sequence[Nested]) -> list[Output]:
            return read_outputs(found, fed.sizes, self._declared, fed.axis)

        with (
            telling_shapes(self._binding, binding),
            mode_of(self.module, trains, graph),
            self._requests.without_null(),
        ):
            outputs = read(self._model.forward_parts(fed.parts, fed.sizes, check=read))
        self._binding = binding
        self._pass = Pass(
            fed.shares, fed.leaves, outputs, sum(fed.sizes), pads, trains, graph, inferred
        )

    @takes_scala_names
    def backward(self, out_grads: Nested = None) -> None:
        """Compute gradients of the last forward pass: of the whole batch, as on one device.

        Args:
            out_grads: One tensor or array for each output, in their order or by name, shaped like
                the merged output; padded rows may be there or not. None for an output without one.
                Default: losses are differentiated, other outputs have no gradient.

        Raises:
            StateError: There is no forward pass to go back through, or it was none of training, or
                `torch.inference_mode` was on in it or is now; nothing is changed.
            ConfigError: ``out_grads`` does not fit; the pass can still be gone back through.
        """
        self._check_open()
        if not self.for_training:
            raise StateError(
                "`backward()` needs a group that is for training, but for_training is False."
            )
        last = check_graph(self._pass)
        given = pick_gradients(out_grads, last.outputs)
        pairs = [
            pair
            for output, gradient in zip(last.outputs, given, strict=True)
            if gradient is not None or out_grads is None
            for pair in output.gradients(gradient, last.rows, last.pad)
        ]
        last.graph = False  # whatever becomes of it: torch frees a graph on the way back
        tensors, gradients = zip(*pairs, strict=True) if pairs else ((), ())

        def compute() -> None:
            if tensors:
                torch.autograd.backward(tensors, gradients)

        self._requests.write(compute)
        last.went_back = True

    def get_outputs(
        self, merge_multi_context: bool = True, begin: int = 0, end: int | None = None
    ) -> list[Any]:
        """Return the outputs from ``begin`` to ``end``, without padded rows and without a graph.

        Args:
            merge_multi_context: Whole ones, on the first device: joined along their batch axis;
                losses are the mean over all rows. Otherwise a list per output, None for devices
                that rested.
            begin: The first output.
            end: The output behind the last; default: all that follow.

        Raises:
            StateError: There was no forward pass.
        """
        stop = None if end is None else read_whole("end", end)
        chosen = self._last().outputs[read_whole("begin", begin) : stop]
        home = self.contexts[0]
        return [each.merged(home) if merge_multi_context else each.per_device() for each in chosen]

    def getOutputs(self) -> list[Any]:
        """Return outputs by device; see ``get_outputs``."""
        return self.get_outputs(merge_multi_context=False)

    def getOutputsMerged(self) -> list[Any]:
        """Return whole outputs; see ``get_outputs``."""
        return self.get_outputs()

    def get_input_grads(self, merge_multi_context: bool = True) -> list[Any]:
        """Return the gradients of the data in the order of their names, None for integers.

        Args:
            merge_multi_context: Whole ones, on the first device: joined along the batch axis, with
                zeros for padded rows; summed where the input was given whole. Otherwise a list per
                input.

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
        home = self.contexts[0] if merge_multi_context else None
        return [last.input_gradient(desc, home) for desc in self._binding.data]

    def getInputGrads(self) -> list[Any]:
        """Return gradients of the data by device; see ``get_input_grads``."""
        return self.get_input_grads(merge_multi_context=False)

    def getInputGradsMerged(self) -> list[Any]:
        """Return whole gradients of the data; see ``get_input_grads``."""
        return self.get_input_grads()

    # -- states ------------------------------------------------------

    def get_states(self, merge_multi_context: bool = False) -> list[list[Tensor | None]]:
        """Return each state's parts by device; zeros before they are set.

        A part is None where :meth:`set_states` was given None for a device without rows.

        Raises:
            ConfigError: Whole ones are asked for, which MXNet had not either.
        """
        if merge_multi_context:
            raise ConfigError(
                "`merge_multi_context` must be False for states, but is True. Join the parts along "
                "their batch axis."
            )
        last = self._pass
        sizes, pad = (self._next_sizes(), 0) if last is None else (last.sizes, last.pad)
        parts = self._states.cut(self._binding.states, sizes, pad)
        return [[part.get(desc.name) for part in parts] for desc in self._binding.states]

    def set_states(self, states: Nested = None, value: float | None = None) -> None:
        """Set all states: to tensors, each whole or a list by device, or to one ``value``.

        Whether they have the next batch's rows is known when it comes: `forward` says so.

        Raises:
            ConfigError: Neither or both are given, or they do not fit what is bound or each other;
                they stay as they were.
        """
        self._states.set(self._binding.states, states, value)

    # -- parameters --------------------------------------------------

    @takes_scala_names
    def get_params(
        self,
        arg_params: MutableMapping[str, Any] | None = None,
        aux_params: MutableMapping[str, Any] | None = None,
    ) -> tuple[MutableMapping[str, Any], MutableMapping[str, Any]]:
        """Copy parameters and buffers into two mappings, and return these.

        Tensors and arrays that are there are written to, other names are left alone, and what is
        missing is added.

        Raises:
            ConfigError: One has another shape, or cannot be written to; nothing is written then.
        """
        arg_params = {} if arg_params is None else arg_params
        aux_params = {} if aux_params is None else aux_params
        read_tensors(
            (self.module.named_parameters(), arg_params), (self.module.named_buffers(), aux_params)
        )
        return arg_params, aux_params

    getParams = get_params

    @takes_scala_names
    def set_params(
        self,
        arg_params: Mapping[str, Any],
        aux_params: Mapping[str, Any] | None = None,
        allow_extra: bool = False,
        allow_missing: bool = True,
    ) -> None:
        """Copy parameters and buffers, tensors or arrays, into the module of all devices.

        What is not named stays as it is, unless ``allow_missing`` is False.

        Raises:
            ConfigError: Names are extra or missing and that is not allowed, or a shape differs;
                nothing is changed then.
        """
        write_params(
            self.module,
            arg_params,
            aux_params,
            allow_extra=allow_extra,
            allow_missing=allow_missing,
        )

    setParams = set_params

    # -- around it ---------------------------------------------------

    @takes_scala_names
    def update_metric(
        self,
        eval_metric: Any,
        labels: Any = None,
        pre_sliced: bool = False,
        output: str | None = None,
    ) -> None:
        """Update a metric once with the last batch, whole and in order, without padded rows.

        Args:
            eval_metric: A `torchmetrics.Metric`, a collection, or an object with ``update(outputs,
                labels)``: one tensor each, or a list of several. Labels are left out where it takes
                none. MXNet's have ``update_dict(labels, outputs)``, by name.
            labels: Of the whole batch, or one per device if ``pre_sliced``; default: the batch's.
            output: Which output is measured; default: those that MXNet's metric names, or all that
                are no losses; else the losses.

        Raises:
            StateError: There was no forward pass.
            ConfigError: Labels do not fit, or no output has that name.
        """
        last, home = self._last(), device_of(eval_metric, self.contexts[0])
        named = output is None and getattr(eval_metric, "output_names", None) is not None
        chosen = last.outputs if named else measured(last.outputs, output)
        outputs = {each.name: each.merged(home) for each in chosen}
        whole = last.labels(self._binding, labels, pre_sliced, home)
        if hasattr(eval_metric, "update_dict"):
            eval_metric.update_dict(whole, outputs)
        else:
            update_metric(eval_metric, _one_or_all(outputs), _one_or_all(whole))

    updateMetric = update_metric

    @takes_scala_names
    def install_monitor(self, mon: Monitor) -> None:
        """Let a monitor watch the module on every device."""
        mon.install(self.module)

    installMonitor = install_monitor

    # -- inside ------------------------------------------------------

    def _share(self, other: DataParallelExecutorGroup) -> None:
        if not isinstance(other, DataParallelExecutorGroup):
            raise ConfigError(
                f"`shared_group` must be a `DataParallelExecutorGroup`, but is {other!r:.80}."
            )
        if other.module is not self.module:
            share_tensors(self.module, other.module)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("A closed group must not be used, but is. Make a new one.")

    def _last(self) -> Pass:
        if self._pass is None:
            raise StateError("The group must have run, but has not. Call `forward()` first.")
        return self._pass

    def _next_sizes(self) -> list[int]:
        return workload_sizes(self.batch_size, self.workload)


def _one_or_all(tensors: Mapping[str, Tensor]) -> Nested:
    """Return the one of ``tensors``, or a list of all; None without any."""
    values = list(tensors.values())
    return values[0] if len(values) == 1 else values or None

"""MXNet's names, Python's and Scala's, over :class:`phalanx.DataParallelExecutorGroup`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from phalanx import executor_group
from phalanx.compat.mxnet_metrics import Accuracy, CustomMetric, EvalMetric
from phalanx.errors import ConfigError
from phalanx.executor_group import DataDesc, Monitor
from phalanx.plan import workload_sizes

__all__ = [
    "Accuracy",
    "CustomMetric",
    "DataBatch",
    "DataDesc",
    "DataParallelExecutorGroup",
    "EvalMetric",
    "Monitor",
    "_split_input_slice",
]

C = TypeVar("C", bound=Callable[..., Any])  # Any: each method's own arguments
_Group = executor_group.DataParallelExecutorGroup


def _also(method: C, **ours_by_theirs: str) -> C:
    """Let ``method`` take MXNet's keywords beside its own.

    None under a name of MXNet's means what leaving it out means: so its signatures had it.
    """
    optional = {
        each.name
        for each in inspect.signature(method).parameters.values()
        if each.default is not each.empty
    }

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:  # Any: the method's own
        for theirs in [name for name in kwargs if name in ours_by_theirs]:
            ours, value = ours_by_theirs[theirs], kwargs.pop(theirs)
            if ours in kwargs:
                raise ConfigError(
                    f"`{theirs}` must be given once, but is given as `{ours}`, too. Leave one out."
                )
            if value is not None or ours not in optional:
                kwargs[ours] = value
        return method(*args, **kwargs)

    return cast(C, call)


def _split_input_slice(batch_size: int, work_load_list: Sequence[float]) -> list[slice]:
    """Return each device's rows; unlike MXNet's, no case is refused, and none gets the remainder.

    Example:
        >>> _split_input_slice(6, [1, 1, 1, 1])
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 6, None)]

    Raises:
        ConfigError: A workload is negative or not finite, or all are zero.
    """
    sizes = workload_sizes(batch_size, work_load_list)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


_construct = _also(
    _Group.__init__,
    contexts="devices",
    workload="workloads",
    work_load_list="workloads",
    workLoadList="workloads",
    data_shapes="data",
    dataShapes="data",
    label_shapes="labels",
    labelShapes="labels",
    forTraining="for_training",
    inputsNeedGrad="inputs_need_grad",
    sharedGroup="shared_group",
    gradReq="grad_req",
    fixed_param_names="fixed_parameters",
    fixedParamNames="fixed_parameters",
)


# Any: whatever the user gave.
def _once(kwargs: dict[str, Any], *names: str) -> Any:
    """Take out the one of ``names`` that is given."""
    given = [kwargs.pop(name) for name in names if name in kwargs]
    if len(given) > 1:
        raise ConfigError(
            f"`{names[1]}` must be given once, but is given as `{names[0]}`, too. Leave one out."
        )
    return given[0] if given else None


# Any: whatever the user gave.
def _names(name: str, given: Any) -> list[str]:
    """Read one name, or several."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
        raise ConfigError(f"`{name}` must hold names, but is {given!r:.80}. Give ['h'], say.")
    return list(names)


# Any: descriptions in any of their forms.
def _descs(given: Any) -> list[DataDesc]:
    if isinstance(given, DataDesc):
        return [given]
    several = given.items() if isinstance(given, Mapping) else given or ()
    return [DataDesc.of(each) for each in several]


def _move_states(kwargs: dict[str, Any], names: Sequence[str]) -> None:
    """Take the descriptions of states out of those of the data, where MXNet's users may have them.

    Raises:
        ConfigError: One is described nowhere.
    """
    key = next((each for each in ("data_shapes", "dataShapes", "data") if each in kwargs), "data")
    data = _descs(kwargs.get(key))
    states = _descs(kwargs.get("states"))
    known = {each.name for each in states}
    states += [each for each in data if each.name in names and each.name not in known]
    for name in names:
        if name not in {each.name for each in states}:
            raise ConfigError(
                f"`state_names` must name states with a shape, but {name!r} has none. Give "
                f"states=[DataDesc({name!r}, …)]."
            )
    if key in kwargs:
        kwargs[key] = [each for each in data if each.name not in names]
    kwargs["states"] = states


def _with_names(construct: C) -> C:
    """Let a constructor take MXNet's lists of names, and its logger."""

    @functools.wraps(construct)
    def call(group: Any, *args: Any, **kwargs: Any) -> None:  # Any: the constructor's own
        kwargs.pop("logger", None)  # nothing is logged
        names = _once(kwargs, "param_names", "paramNames")
        states = _once(kwargs, "state_names", "stateNames")
        if states is not None:
            _move_states(kwargs, _names("state_names", states))
        construct(group, *args, **kwargs)
        if names is None:
            return
        known = [name for name, _ in group.module.named_parameters()]
        others = [each for each in _names("param_names", names) if each not in known]
        if others:
            group.close()
            raise ConfigError(
                f"`param_names` must name parameters of the module, but names {others}. It has "
                f"{', '.join(known) or 'none'}. It may be left out."
            )

    return cast(C, call)


# Any: a batch in any of its forms.
def _without_labels(batch: Any) -> Any:
    """Leave out the labels of a batch, as MXNet did where no labels were bound."""
    if isinstance(batch, list):
        return [_without_labels(each) for each in batch]
    if isinstance(batch, (Tensor, np.ndarray, Mapping)) or not hasattr(batch, "data"):
        return batch
    pad, weights = getattr(batch, "pad", None) or 0, getattr(batch, "weights", None)
    return executor_group.DataBatch(batch.data, None, pad, weights)


def _known(
    into: MutableMapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Return what ``into`` holds of ``names``, arrays as tensors, and what writes the rest back."""
    own: dict[str, Any] = {name: into[name] for name in names if name in into}
    for name, value in own.items():
        if isinstance(value, np.ndarray):
            if not value.flags.writeable:
                raise ConfigError(
                    f"`{name}` must be an array that can be written to, but is read-only. Give "
                    f"{name}.copy()."
                )
            own[name] = torch.from_numpy(value)

    def write_back() -> None:
        into.update({name: value for name, value in own.items() if name not in into})

    return own, write_back


class DataBatch(executor_group.DataBatch):
    """A batch by MXNet's positions and names: data, label, pad, index; or Scala's, index and pad.

    ``index`` and what follows it in MXNet are taken and not used: other shapes are bound by
    themselves. ``weights``, which MXNet had not, go by keyword.

    Example:
        >>> import torch
        >>> batch = DataBatch([torch.ones(4, 2)], [torch.tensor([0, 1, 1, 0])], 1, [7, 8, 9, 9])
        >>> batch.pad, batch.weights, batch.label
        (1, None, [tensor([0, 1, 1, 0])])
    """

    # Any, here and below: tensors in any of their forms; what is not used.
    def __init__(
        self,
        data: Any,
        label: Any = None,
        pad: Any = None,
        index: Any = None,
        bucket_key: Any = None,
        provide_data: Any = None,
        provide_label: Any = None,
        *,
        labels: Any = None,
        weights: Any = None,
    ) -> None:
        if isinstance(pad, (list, tuple, np.ndarray)):  # Scala's positions: index, pad
            pad, index = index, pad
        del index, bucket_key, provide_data, provide_label
        if label is not None and labels is not None:
            raise ConfigError(
                "`label` must be given once, but is given as `labels`, too. Leave one out."
            )
        super().__init__(data, labels if label is None else label, pad or 0, weights)

    @property
    def label(self) -> Any:
        """The labels."""
        return self.labels


class DataParallelExecutorGroup(executor_group.DataParallelExecutorGroup):
    """The group under MXNet's names; whatever is not named here has the same name there and here.

    Arguments go by position as in MXNet; by keyword under the names of MXNet (Python's and Scala's)
    or the group's own. The constructor takes, by keyword, ``contexts``, ``workload``,
    ``data_shapes``, ``label_shapes``, ``fixed_param_names`` and Scala's ``dataShapes``,
    ``forTraining`` and so on. ``state_names`` says which of the ``data_shapes`` are states;
    ``param_names`` is compared with the module's, and ``logger`` is not used.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(4, 2)
        >>> with DataParallelExecutorGroup(net, 2, data=[("input", (3, 4))]) as group:
        ...     group.forward(torch.ones(3, 4))
        ...     [tuple(part.shape) for part in group.getOutputs()[0]]
        ...     [tuple(whole.shape) for whole in group.get_outputs()]
        [(2, 2), (1, 2)]
        [(3, 2)]

    Source: MXNet's ``module/executor_group.py`` and ``DataParallelExecutorGroup.scala``.
    """

    __init__ = _with_names(_construct)

    # What the group has under the same name, with other names of arguments.
    _forward = _also(_Group.forward, data_batch="batch", dataBatch="batch", isTrain="is_train")
    backward = _also(_Group.backward, outGrads="out_grads")
    bind = _also(
        _Group.bind,
        data_shapes="data",
        label_shapes="labels",
        dataShapes="data",
        labelShapes="labels",
        sharedGroup="shared_group",
    )
    reshape = _also(
        _Group.reshape,
        data_shapes="data",
        label_shapes="labels",
        dataShapes="data",
        labelShapes="labels",
    )
    _set_params = _also(
        _Group.set_params,
        arg_params="params",
        aux_params="buffers",
        argParams="params",
        auxParams="buffers",
        allowExtra="allow_extra",
        allowMissing="allow_missing",
    )
    update_metric = _also(_Group.update_metric, eval_metric="metric", evalMetric="metric")
    install_monitor = _also(_Group.install_monitor, monitor="mon")

    # Any: a batch in any of its forms.
    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Run the module; labels are left out where none are bound, as in MXNet."""
        if not self.label_shapes:
            args = tuple(map(_without_labels, args[:1])) + args[1:]
            named = ("batch", "data_batch", "dataBatch")
            kwargs |= {key: _without_labels(kwargs[key]) for key in named if key in kwargs}
        self._forward(*args, **kwargs)

    # Any, here and below: tensors, or lists of them by device; descriptions in any of their forms.
    def get_outputs(
        self, merge_multi_context: bool = True, begin: int = 0, end: int | None = None
    ) -> list[Any]:
        """Return outputs; see ``outputs``."""
        return self.outputs(merge_multi_context, begin, end)

    def getOutputs(self) -> list[Any]:
        """Return outputs by device; see ``outputs``."""
        return self.outputs(merge=False)

    def getOutputsMerged(self) -> list[Any]:
        """Return whole outputs; see ``outputs``."""
        return self.outputs()

    def get_input_grads(self, merge_multi_context: bool = True) -> list[Any]:
        """Return gradients of the data; see ``input_grads``."""
        return self.input_grads(merge_multi_context)

    def getInputGrads(self) -> list[Any]:
        """Return gradients of the data by device; see ``input_grads``."""
        return self.input_grads(merge=False)

    def getInputGradsMerged(self) -> list[Any]:
        """Return whole gradients of the data; see ``input_grads``."""
        return self.input_grads()

    def get_states(self, merge_multi_context: bool = False) -> list[Any]:
        """Return states by device; whole ones were not there in MXNet either.

        Raises:
            ConfigError: Whole ones are asked for.
        """
        if merge_multi_context:
            raise ConfigError(
                "`merge_multi_context` must be False for states, but is True. Join the parts along "
                "their batch axis."
            )
        return self.states()

    def get_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes; see ``output_shapes``."""
        return self.output_shapes

    def getOutputShapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes; see ``output_shapes``."""
        return self.output_shapes

    def getBatchSize(self) -> int:
        """Return B; see ``batch_size``."""
        return self.batch_size

    def decide_slices(self, data_shapes: Any) -> list[slice]:
        """Return the rows that each device would get of a batch of these shapes.

        MXNet's kept them and returned batch axes; this one changes nothing.

        Raises:
            ConfigError: Two shapes have different numbers of rows.
        """
        descs = [DataDesc.of(each) for each in data_shapes]
        rows = [(each.name, each.rows) for each in descs if each.rows is not None]
        for name, num_rows in rows:
            if num_rows != rows[0][1]:
                raise ConfigError(
                    f"`{name}` must have {rows[0][1]} rows like `{rows[0][0]}`, but has "
                    f"{num_rows}. Give a layout without N to what is not per sample."
                )
        return _split_input_slice(rows[0][1] if rows else self.batch_size, self.workloads)

    def bind_exec(
        self,
        data_shapes: Any,
        label_shapes: Any = (),
        shared_group: executor_group.DataParallelExecutorGroup | None = None,
        reshape: bool = False,
    ) -> None:
        """Bind to other shapes; see ``bind``."""
        self.bind(data_shapes, label_shapes or (), shared_group, reshape)

    def bindExec(
        self,
        dataShapes: Any,
        labelShapes: Any = (),
        sharedGroup: executor_group.DataParallelExecutorGroup | None = None,
        reshape: bool = False,
    ) -> None:
        """Bind to other shapes; see ``bind``."""
        self.bind(dataShapes, labelShapes or (), sharedGroup, reshape)

    def get_params(
        self,
        into: Any = None,
        aux_params: MutableMapping[str, Tensor] | None = None,
        *,
        arg_params: MutableMapping[str, Tensor] | None = None,
    ) -> tuple[MutableMapping[str, Tensor], MutableMapping[str, Tensor]]:
        """Copy into MXNet's two mappings; or, given one argument or none, as the group does.

        Raises:
            ConfigError: The second mapping is missing, or the first is given twice.
        """
        if arg_params is not None:
            if into is not None:
                raise ConfigError(
                    "`arg_params` must be given once, but is given by position, too. Leave one out."
                )
            into = arg_params
        if aux_params is not None:
            into = {} if into is None else into
            names = [name for name, _ in self.module.named_parameters()]
            params, write_params = _known(into, names)
            names = [name for name, _ in self.module.named_buffers()]
            buffers, write_buffers = _known(aux_params, names)
            super().get_params((params, buffers))
            write_params()
            write_buffers()
            return into, aux_params
        if isinstance(into, Mapping):
            raise ConfigError("`aux_params` must be a mapping, but is None. Give {} for buffers.")
        return super().get_params(into)

    def getParams(
        self,
        argParams: MutableMapping[str, Tensor],
        auxParams: MutableMapping[str, Tensor],
    ) -> None:
        """Copy parameters and buffers into the mappings; see ``get_params``."""
        self.get_params(argParams, auxParams)

    def set_params(self, *args: Any, **kwargs: Any) -> None:
        """Copy parameters and buffers, tensors or arrays, into the module.

        By position or keyword: arg_params, aux_params, allow_extra, and allow_missing, which is
        True unless it is given, as MXNet's groups had it: what is not named stays as it is.

        Raises:
            ConfigError: Names are extra, or missing, and that is not allowed; a shape differs.
        """
        if len(args) < 4 and not {"allow_missing", "allowMissing"} & kwargs.keys():
            kwargs["allow_missing"] = True
        self._set_params(*args, **kwargs)

    def setParams(
        self,
        argParams: Mapping[str, Any],
        auxParams: Mapping[str, Any] | None = None,
        allowExtra: bool = False,
        allowMissing: bool = True,
    ) -> None:
        """Copy parameters and buffers into the module; see ``set_params``."""
        self.set_params(argParams, auxParams, allow_extra=allowExtra, allow_missing=allowMissing)

    def installMonitor(self, monitor: Monitor) -> None:
        """Let ``monitor`` watch; see ``install_monitor``."""
        self.install_monitor(monitor)

    def updateMetric(self, evalMetric: Any, labels: Any) -> None:
        """Count the last batch; see ``update_metric``."""
        self.update_metric(evalMetric, labels)

"""MXNet's names, Python's and Scala's, over :class:`phalanx.DataParallelExecutorGroup`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from phalanx import executor
from phalanx.errors import ConfigError
from phalanx.executor import DataBatch, DataDesc, Monitor
from phalanx.plan import workload_sizes

__all__ = ["DataBatch", "DataDesc", "DataParallelExecutorGroup", "Monitor", "_split_input_slice"]

C = TypeVar("C", bound=Callable[..., Any])  # Any: each method's own arguments
_Group = executor.DataParallelExecutorGroup


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


class DataParallelExecutorGroup(executor.DataParallelExecutorGroup):
    """The group under MXNet's names; whatever is not named here has the same name there and here.

    Arguments go by position as in MXNet; by keyword under the names of MXNet (Python's and Scala's)
    or the group's own. The constructor takes ``contexts``, ``workload``, ``data_shapes``,
    ``label_shapes`` and ``fixed_param_names``, by keyword.

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

    # What the group has under the same name, with other names of arguments.
    __init__ = _also(
        _Group.__init__,
        contexts="devices",
        workload="workloads",
        work_load_list="workloads",
        data_shapes="data",
        label_shapes="labels",
        fixed_param_names="fixed_parameters",
    )
    forward = _also(_Group.forward, data_batch="batch", dataBatch="batch", isTrain="is_train")
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
    set_params = _also(_Group.set_params, arg_params="params", aux_params="buffers")
    update_metric = _also(_Group.update_metric, eval_metric="metric")
    install_monitor = _also(_Group.install_monitor, mon="monitor")
    fit = _also(
        _Group.fit,
        train_data="loader",
        eval_data="validate",
        eval_metric="metrics",
        num_epoch="epochs",
    )
    score = _also(_Group.score, eval_data="loader", eval_metric="metrics")
    predict = _also(_Group.predict, eval_data="loader")

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
        shared_group: executor.DataParallelExecutorGroup | None = None,
        reshape: bool = False,
    ) -> None:
        """Bind to other shapes; see ``bind``."""
        self.bind(data_shapes, label_shapes or (), shared_group, reshape)

    def bindExec(
        self,
        dataShapes: Any,
        labelShapes: Any = (),
        sharedGroup: executor.DataParallelExecutorGroup | None = None,
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
            return super().get_params(({} if into is None else into, aux_params))
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

    def setParams(
        self,
        argParams: Mapping[str, Tensor],
        auxParams: Mapping[str, Tensor] | None = None,
        allowExtra: bool = False,
    ) -> None:
        """Copy parameters and buffers into the module; see ``set_params``."""
        self.set_params(argParams, auxParams, allow_extra=allowExtra)

    def installMonitor(self, monitor: Monitor) -> None:
        """Let ``monitor`` watch; see ``install_monitor``."""
        self.install_monitor(monitor)

    def updateMetric(self, evalMetric: Any, labels: Any) -> None:
        """Count the last batch; see ``update_metric``."""
        self.update_metric(evalMetric, labels)

"""MXNet's names, each once, against plain PyTorch on the whole batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from phalanx.compat import mxnet
from phalanx.compat.mxnet import DataBatch, Monitor
from phalanx.errors import ConfigError
from tests.contracts.containers import draw, joined
from tests.contracts.groups import (
    CLASSES,
    F64,
    THREE,
    TWO,
    WORKLOADS,
    Net,
    classes,
    desc,
    labels_desc,
)
from tests.zoo import assert_close, gradients_of

pytestmark = [pytest.mark.devices, pytest.mark.promise("mxnet")]

ROWS = 7
BATCH = draw(ROWS, 5), classes(ROWS)
G = draw(ROWS, CLASSES, seed=1)


def run_once(net: Net) -> tuple[mxnet.DataParallelExecutorGroup, Tensor, Tensor]:
    """Return a group after one pass there and back, and plain outputs and input gradients."""
    group = mxnet.DataParallelExecutorGroup(
        net,
        THREE,
        data_shapes=[desc("data", 15, 5)],
        label_shapes=[labels_desc(15)],
        workload=WORKLOADS,
        inputs_need_grad=True,
    )
    group.forward(DataBatch(draw(15, 5), classes(15)))
    group.backward([draw(15, 4, seed=1)])
    x = draw(15, 5).requires_grad_()
    expected = Net()(x)
    expected.backward(draw(15, 4, seed=1))
    assert x.grad is not None
    return group, expected.detach(), x.grad


def test_results_under_both_languages_names():
    net = Net()
    group, expected, gradient = run_once(net)
    with group:
        for whole in (group.get_outputs(), group.getOutputsMerged()):
            assert_close(whole[0], expected, F64)
        for parts in (group.getOutputs()[0], group.get_outputs(merge_multi_context=False)[0]):
            assert [len(part) for part in parts] == WORKLOADS
            assert_close(joined(parts), expected, F64)
        for whole in (group.get_input_grads(), group.getInputGradsMerged()):
            assert_close(whole[0], gradient, F64)
        for parts in (group.getInputGrads()[0], group.get_input_grads(False)[0]):
            assert_close(joined(parts), gradient, F64)
        assert group.get_output_shapes() == group.getOutputShapes() == [("output0", (15, 4))]
        assert group.getBatchSize() == 15
        metric = MulticlassAccuracy(CLASSES, average="micro")
        group.updateMetric(metric, classes(15))
        assert metric.compute() == (expected.argmax(1) == classes(15)).float().mean()


def test_binding_and_parameters_under_both_languages_names():
    net, other = Net(), Net()
    torch.nn.init.zeros_(other.head.bias)
    group, _, _ = run_once(net)
    with group:
        assert group.slices == [slice(0, 1), slice(1, 6), slice(6, 15)]
        group.bind_exec([desc("data", 7, 5)], [labels_desc(7)])
        assert group.getBatchSize() == 7
        group.bindExec([desc("data", 9, 5)], [labels_desc(9)], None, True)
        assert group.getBatchSize() == 9
        group.setParams({**dict(other.named_parameters()), "tail": torch.ones(1)}, allow_extra=True)
        params: dict[str, Tensor] = {}
        group.getParams(params, {})
        assert_close(list(params.values()), [each.detach() for each in other.parameters()], F64)
        by_python: dict[str, Tensor] = {}
        group.get_params(by_python, {})
        assert_close(list(by_python.values()), list(params.values()), F64)
        assert group.get_params()[0].keys() == params.keys()
        monitor = mxnet.Monitor()
        group.installMonitor(monitor)
        monitor.tic()
        group.forward(draw(9, 5))
        outputs = [name for _, name, _ in monitor.toc() if name.startswith("output")]
        assert outputs == [f"output@{index}" for index in range(len(THREE))]
    assert all(gradient is not None for gradient in gradients_of(net))


# --- MXNet's keywords -----------------------------------------------------------------------------


def mxnet_group(net: Net, **options: Any) -> mxnet.DataParallelExecutorGroup:
    given = {"contexts": TWO, "workload": [1, 3], "data_shapes": [desc("data", ROWS, 5)]}
    return mxnet.DataParallelExecutorGroup(net, **{**given, **options})


def test_the_constructor_takes_mxnets_keywords():
    net = Net()
    with mxnet_group(net, label_shapes=None, grad_req="add") as group:
        assert group.workload == (1, 3)
        assert len(group.contexts) == 2
        assert group.label_shapes == ()
    with pytest.raises(ConfigError, match="`grad_req` must be 'write' or 'add'"):
        mxnet_group(net, grad_req="null")


def test_methods_take_mxnets_keywords():
    net, twin = Net(), Net()
    with mxnet_group(net, label_shapes=[labels_desc(ROWS)]) as group:
        monitor = Monitor()
        group.install_monitor(mon=monitor)
        monitor.remove()
        group.forward(data_batch=DataBatch(*BATCH), is_train=True)
        group.backward(out_grads=[G])
        twin(BATCH[0]).backward(G)
        assert_close(gradients_of(net), gradients_of(twin), F64)
        group.forward(*[DataBatch(*BATCH)])
        group.backward(G.numpy())
        assert_close(gradients_of(net), gradients_of(twin), F64)
        assert len(group.get_outputs(merge_multi_context=False)[0]) == 2
        metric = MulticlassAccuracy(CLASSES, average="micro")
        group.update_metric(eval_metric=metric, labels=[BATCH[1]])
        assert metric.compute() == (twin(BATCH[0]).argmax(1) == BATCH[1]).float().mean()
        for rows, call in ((9, group.reshape), (ROWS, group.bind_exec)):
            call(data_shapes=[desc("data", rows, 5)], label_shapes=[labels_desc(rows)])
            assert group.batch_size == rows


# --- the page -------------------------------------------------------------------------------------


def test_every_bug_of_the_page_has_a_test_that_exists():
    here = Path(__file__).parent
    page = (here.parents[1] / "docs/migrating_mxnet.md").read_text()
    named = re.findall(r"`(test_\w+)` \|$", page, re.MULTILINE)
    texts = "".join(each.read_text() for each in here.glob("test_executor_group*.py"))
    assert len(named) > 10
    assert [name for name in named if f"def {name}(" not in texts] == []

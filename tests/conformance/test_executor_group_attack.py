"""What an attack on executor groups found, each as a user would meet it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from phalanx.compat import mxnet
from phalanx.errors import ConfigError, StateError
from phalanx.executor_group import DataBatch, gradients
from tests.conformance.containers import draw
from tests.conformance.groups import (
    CLASSES,
    F64,
    THREE,
    TWO,
    Loss,
    Net,
    classes,
    desc,
    group_of,
    labels_desc,
)
from tests.zoo import assert_close

pytestmark = pytest.mark.devices

X, Y, G = draw(7, 5), classes(7), draw(7, CLASSES, seed=1)
DATA = desc("data", 7, 5)


# --- inference mode -------------------------------------------------------------------------------


def test_backward_after_a_forward_in_inference_mode_is_refused_and_changes_nothing():
    net = Net()
    with group_of(net, DATA, inputs_need_grad=True) as group:
        group.forward(X)
        group.backward([G])
        before = [parameter.grad for parameter in net.parameters()]
        with torch.inference_mode():
            group.forward(X)
        with pytest.raises(StateError, match="inference_mode"):
            group.backward([G])
        with pytest.raises(StateError, match="backward"):
            group.input_grads()
        after = [parameter.grad for parameter in net.parameters()]
        assert all(a is b for a, b in zip(before, after, strict=True))


def test_backward_inside_inference_mode_is_refused_and_works_outside():
    net = Net()
    with group_of(net, DATA) as group:
        group.forward(X)
        with torch.inference_mode(), pytest.raises(StateError, match="outside"):
            group.backward([G])
        assert net.head.bias.grad is None
        group.backward([G])
        assert_close(net.head.bias.grad, G.sum(0), F64)


# --- failures on the way back ---------------------------------------------------------------------


def run_interrupted(line: int, call: Any) -> bool:
    """Run ``call`` with Ctrl-C at the line number ``line`` of gradients.py; tell if it came."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename != gradients.__file__:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_line_of_backward_loses_no_gradient():
    net = Net()
    with group_of(net, DATA) as group:
        group.forward(X)
        group.backward([G])
        before = [parameter.grad for parameter in net.parameters()]
        line = 1
        while True:
            group.forward(X)
            if not run_interrupted(line, lambda: group.backward([G])):
                break
            after = [parameter.grad for parameter in net.parameters()]
            assert all(a is b for a, b in zip(before, after, strict=True)), line
            line += 1
    assert line > len(before)  # at least once for each parameter that is written


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("broken")


class BreaksBack(Net):
    def forward(self, data: Tensor) -> Tensor:
        return Breaking.apply(super().forward(data))


def test_there_are_no_input_gradients_after_a_failed_backward():
    with group_of(BreaksBack(), DATA, inputs_need_grad=True) as group:
        group.forward(X)
        with pytest.raises(RuntimeError, match="broken"):
            group.backward([G])
        with pytest.raises(StateError, match="backward"):
            group.input_grads()


# --- states ---------------------------------------------------------------------------------------


class Shifted(nn.Module):
    def forward(self, data: Tensor, h: Tensor) -> Tensor:
        return data + h


class Counting(nn.Module):
    """Writes to what it is given."""

    def forward(self, data: Tensor, h: Tensor) -> Tensor:
        h.add_(1)
        return data + h


def whole(value: float) -> Tensor:
    return torch.full((1,), value, dtype=F64)


def test_states_without_rows_stay_with_their_device_beside_none():
    data, state = desc("data", 2, 1), desc("h", 1, layout="C")
    zeros = torch.zeros(2, 1, dtype=F64)
    with group_of(Shifted(), data, devices=THREE, workloads=[0, 1, 1], states=[state]) as group:
        group.set_states([[None, whole(10), whole(20)]])
        group.forward(zeros)
        assert group.outputs()[0].flatten().tolist() == [10, 20]
        assert group.states() == [[None, whole(10), whole(20)]]
        group.set_states([[whole(5), None, whole(20)]])
        with pytest.raises(ConfigError, match="device 1"):
            group.forward(zeros)


def test_states_with_rows_stay_with_their_device_beside_none():
    with group_of(
        Shifted(), desc("data", 3, 1), devices=THREE, workloads=[0, 2, 1], states=[desc("h", 3, 1)]
    ) as group:
        rows = torch.arange(3, dtype=F64)[:, None]
        group.set_states([[None, rows[:2], rows[2:]]])
        group.forward(torch.zeros(3, 1, dtype=F64))
        assert_close(group.outputs()[0], rows, F64)
        assert [len(part) for part in group.states()[0] if part is not None] == [0, 2, 1]


def test_states_are_told_for_what_forward_took_with_padded_rows():
    rows = torch.arange(8, dtype=F64)[:, None]
    with group_of(Shifted(), desc("data", 8, 1), devices=3, states=[desc("h", 8, 1)]) as group:
        group.set_states([rows])
        group.forward(DataBatch(torch.zeros(8, 1, dtype=F64), pad=3))
        assert_close(torch.cat([p for p in group.states()[0] if p is not None]), rows[:5], F64)


def test_states_that_fit_no_batch_are_refused_and_the_old_ones_stay():
    class Two(nn.Module):
        def forward(self, data: Tensor, h: Tensor, c: Tensor) -> Tensor:
            return data + h + c

    states = [desc("h", 7, 1), desc("c", 7, 1)]
    with group_of(Two(), desc("data", 7, 1), states=states) as group:
        group.set_states(value=2.0)
        with pytest.raises(ConfigError, match="`c`"):
            group.set_states([draw(6, 1), draw(7, 1)])
        group.forward(torch.zeros(7, 1, dtype=F64))
        assert group.outputs()[0].unique().tolist() == [4]


@pytest.mark.parametrize("as_state", [False, True])
@pytest.mark.parametrize("is_train", [False, True])
def test_what_is_given_whole_and_written_to_is_each_devices_own(as_state, is_train):
    h, data, own = whole(0), desc("data", 7, 1), desc("h", 1, layout="C")
    zeros = torch.zeros(7, 1, dtype=F64)
    inputs = (data,) if as_state else (data, own)
    with group_of(Counting(), *inputs, states=[own] if as_state else []) as group:
        if as_state:
            group.set_states([h])
        group.forward(zeros if as_state else (zeros, h), is_train=is_train)
        assert group.outputs()[0].unique().tolist() == [1]
        assert h.tolist() == [0]  # the user's stays as it is


# --- labels and weights ---------------------------------------------------------------------------


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2).double()

    def forward(self, data: Tensor, label: Tensor, weights: Tensor) -> Tensor:
        errors = ((self.fc(data) - label) ** 2).mean(1)
        return (errors * weights).sum() / weights.sum()


def test_labels_and_weights_are_cut_off_from_what_made_them():
    teacher = nn.Linear(5, 2).double()
    x, weights = draw(7, 5), draw(7).exp().requires_grad_()
    with group_of(Regression(), DATA, labels=[desc("label", 7, 2)]) as group:
        for _ in range(2):  # the second time, the graph of the labels would be gone
            group.forward(DataBatch(x, teacher(x), weights=weights))
            group.backward()
    assert teacher.weight.grad is None
    assert weights.grad is None


def test_labels_cut_by_the_user_must_have_each_devices_rows():
    with group_of(Net(), DATA, devices=THREE, labels=[labels_desc(7)]) as group:
        group.forward(DataBatch(X, Y))
        sizes = [each.stop - each.start for each in group.slices]
        assert sizes == [3, 2, 2]
        metric = MulticlassAccuracy(CLASSES, average="micro")
        for labels, match in [
            ([Y[:3], Y[3:5], Y[5:6]], "device 2"),
            ([Y[:2], Y[2:5], Y[5:]], "device 0"),
            ([Y[:3], None, Y[5:]], "device 1"),
            ([Y[:3], Y[3:]], "3"),
            (Y, "3"),
        ]:
            with pytest.raises(ConfigError, match=match):
                group.update_metric(metric, labels, pre_sliced=True)
        assert metric.update_count == 0
        group.update_metric(metric, list(Y.split(sizes)), pre_sliced=True)
        right = group.outputs()[0].argmax(1).cpu() == Y
        assert_close(metric.compute(), right.float().mean(), F64)


def test_labels_cut_by_the_user_may_hold_each_devices_padded_rows():
    with group_of(Net(), DATA, devices=TWO, labels=[labels_desc(7)]) as group:
        group.forward([DataBatch(X[:4], Y[:4], pad=1), DataBatch(X[4:], Y[4:])])
        metric = MulticlassAccuracy(CLASSES, average="micro")
        group.update_metric(metric, [Y[:4], Y[4:]], pre_sliced=True)
        assert metric.tp + metric.fn == 6


# --- shapes, flags and parameters -----------------------------------------------------------------


def test_declared_outputs_follow_the_bound_number_of_rows():
    with group_of(Net(), DATA, outputs=[desc("scores", 7, CLASSES)]) as group:
        assert group.output_shapes == [("scores", (7, CLASSES))]
        group.reshape([desc("data", 16, 5)])
        assert group.output_shapes == [("scores", (16, CLASSES))]


def test_is_train_must_be_a_flag():
    with group_of(Net(), DATA) as group, pytest.raises(ConfigError, match="is_train"):
        group.forward(X, is_train="no")


def test_parameters_that_are_swapped_are_read_before_they_are_written():
    net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)).double()
    first, second = (each.weight.detach().clone() for each in net)
    with group_of(net, desc("input", 7, 5)) as group:
        group.set_params({"0.weight": net[1].weight, "1.weight": net[0].weight.detach()})
    assert torch.equal(net[0].weight, second)
    assert torch.equal(net[1].weight, first)


def test_parameters_are_not_copied_into_an_expanded_tensor():
    net = Net()
    into = torch.zeros_like(net.body.weight), torch.zeros(CLASSES, 1, dtype=F64).expand(-1, 7)
    params: Any = {"body.weight": into[0], "head.weight": into[1]}
    with group_of(net, DATA) as group, pytest.raises(ConfigError, match=r"`head\.weight`.*expand"):
        group.get_params((params, {}))
    assert not into[0].any()


# --- MXNet's names --------------------------------------------------------------------------------


def test_a_batch_by_mxnets_positions_has_an_index_and_no_weights():
    batch = mxnet.DataBatch([X], [Y], 2, torch.arange(7))
    assert batch.weights is None
    assert batch.pad == 2
    by_name = mxnet.DataBatch(data=[X], label=[Y], pad=None, index=None, provide_data=[])
    assert by_name.pad == 0
    assert by_name.labels is by_name.label
    assert mxnet.DataBatch([X], labels=[Y], weights=[1] * 7).weights == [1] * 7
    with pytest.raises(ConfigError, match="`label`"):
        mxnet.DataBatch([X], label=[Y], labels=[Y])
    with group_of(Loss(), DATA, labels=[labels_desc(7)]) as group:
        mean = MeanMetric().set_dtype(F64)
        group.forward(batch)
        group.update_metric(mean)
        assert_close(mean.compute(), Loss()(X[:5], Y[:5]).detach(), F64)


def test_scalas_names_of_the_constructor():
    net = Loss()
    with mxnet.DataParallelExecutorGroup(
        net,
        contexts=TWO,
        workLoadList=[1, 2],
        dataShapes=[DATA],
        labelShapes=[labels_desc(7)],
        paramNames=["body.weight", "body.bias", "head.weight", "head.bias"],
        forTraining=True,
        inputsNeedGrad=True,
        sharedGroup=None,
        fixedParamNames=["body.*"],
        gradReq="add",
        logger=None,
    ) as group:
        assert group.workloads == (1, 2)
        assert group.inputs_need_grad
        assert not net.body.weight.requires_grad


def test_names_of_states_and_parameters_are_those_of_the_module():
    options: dict[str, Any] = {"contexts": TWO, "data_shapes": [desc("data", 2, 1)]}
    with_state = {**options, "data_shapes": [desc("data", 2, 1), desc("h", 2, 1)]}
    for given in (
        {**with_state, "state_names": ["h"]},
        {**options, "state_names": ["h"], "states": [desc("h", 2, 1)]},
    ):
        with mxnet.DataParallelExecutorGroup(Shifted(), **given) as group:
            group.set_states(value=3)
            group.forward(torch.zeros(2, 1, dtype=F64))
            assert group.outputs()[0].unique().tolist() == [3]
    with pytest.raises(ConfigError, match="state_names"):
        mxnet.DataParallelExecutorGroup(Shifted(), **options, state_names=["h"])
    with pytest.raises(ConfigError, match="param_names"):
        mxnet.DataParallelExecutorGroup(Shifted(), **with_state, param_names=["w"])


def test_the_ported_script_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "migrating_mxnet.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec("\n".join(blocks), {"__name__": "ported"})
    assert "probabilities: (6, 3)" in capsys.readouterr().out

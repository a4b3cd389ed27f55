"""Uses of a group that MXNet's tests did not ask for: several outputs, lists, auto."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from phalanx.errors import StateError
from tests.contracts.containers import draw
from tests.contracts.groups import (
    CLASSES,
    F64,
    WORKLOADS,
    Net,
    classes,
    desc,
    group_of,
    labels_desc,
)
from tests.multiprocess.fork_server import context
from tests.zoo import assert_close, gradients_of

pytestmark = [pytest.mark.devices, pytest.mark.promise("executor-groups")]


class Both(Net):
    """Its loss and its scores, as many users' models return them."""

    def forward(self, data: Tensor, label: Tensor | None = None) -> dict[str, Tensor]:
        scores = super().forward(data)
        loss = scores.sum() * 0 if label is None else F.cross_entropy(scores, label)
        return {"loss": loss, "scores": scores}


def test_a_loss_beside_scores_is_what_is_differentiated_and_scores_are_measured():
    net, twin = Both(), Both()
    x, y = draw(15, 5), classes(15)
    accuracy = MulticlassAccuracy(CLASSES, average="micro")
    with group_of(net, desc("data", 15, 5), label_shapes=[labels_desc(15)]) as group:
        group.forward({"data": x, "label": y})
        group.backward()
        expected = twin(x, y)
        expected["loss"].backward()
        assert [name for name, _ in group.get_output_shapes()] == ["loss", "scores"]
        group.update_metric(accuracy)
    assert_close(gradients_of(net), gradients_of(twin), F64)
    assert accuracy.compute() == (expected["scores"].argmax(1) == y).float().mean()


def test_out_grads_by_name_leave_others_without_gradient():
    net, twin = Both(), Both()
    x, g = draw(15, 5), draw(15, 4, seed=2)
    with group_of(net, desc("data", 15, 5)) as group:
        group.forward(x)
        group.backward({"scores": g})
    twin(x)["scores"].backward(g)
    assert_close(gradients_of(net), gradients_of(twin), F64)


@pytest.mark.parametrize("training", [True, False])
def test_the_module_keeps_its_mode_and_that_of_its_parts(training):
    net = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(5)).double().train(training)
    net[1].eval()
    before = [each.training for each in net.modules()]
    with group_of(net, desc("input", 9, 5), devices=2) as group:
        group.forward(draw(9, 5))
        assert [each.training for each in net.modules()] == before
        group.forward(draw(9, 5), is_train=False)
        assert [each.training for each in net.modules()] == before


class Breaking(torch.autograd.Function):
    breaks = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Breaking.breaks:
            raise ZeroDivisionError("asked to")
        return gradient


def test_a_backward_pass_that_fails_leaves_the_gradients_as_they_were(monkeypatch):
    class Fragile(Net):
        def forward(self, data: Tensor) -> Tensor:
            return Breaking.apply(super().forward(data))

    net = Fragile()
    with group_of(net, desc("data", 7, 5)) as group:
        group.forward(draw(7, 5))
        group.backward([draw(7, 4)])
        before = [gradient.clone() for gradient in gradients_of(net)]
        group.forward(draw(7, 5, seed=1))
        monkeypatch.setattr(Breaking, "breaks", True)
        with pytest.raises(ZeroDivisionError, match="asked to"):
            group.backward([draw(7, 4)])
        torch.testing.assert_close(gradients_of(net), before, rtol=0, atol=0)
        monkeypatch.setattr(Breaking, "breaks", False)
        group.forward(draw(7, 5))
        group.backward([draw(7, 4)])
        torch.testing.assert_close(gradients_of(net), before, rtol=0, atol=0)


def test_statistics_weigh_by_rows_wherever_the_batch_axis_is():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2, dtype=F64))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = x.mean((0, 1)).detach()
            return x

    net, x = Counting(), draw(3, 15, 2)
    with group_of(net, desc("x", 3, 15, 2, layout="TNC")) as group:
        group.forward(x)
    assert_close(net.mean, x.mean((0, 1)), F64)


def test_the_gradient_of_an_output_without_rows_is_counted_once():
    class Sums(Net):
        def forward(self, data: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(data), self.body.weight.sum(1)

    net, twin, g = Sums(), Sums(), draw(7, seed=4)
    outputs = [desc("scores", 15, 4), desc("sums", 7, layout="C")]
    with group_of(net, desc("data", 15, 5), output_shapes=outputs) as group:
        group.forward(draw(15, 5))
        group.backward({"sums": g})
    twin(draw(15, 5))[1].backward(g)
    assert_close(net.body.weight.grad, twin.body.weight.grad, F64)


@pytest.mark.skipif(hasattr(torch, "dev"), reason="weighs what lies on the CPU")
def test_reshape_back_and_forth_does_not_grow_memory():
    # In a process of its own: what other tests have left comes and goes at any moment.
    with context.Pool(1) as fresh:
        held = fresh.apply(bytes_held_while_shapes_alternate)
    assert held[-1] <= held[3]
    assert held[-2] <= held[2]


def bytes_held_while_shapes_alternate() -> list[int]:
    held = []
    with group_of(Net(), desc("data", 7, 5), devices=3, workload=WORKLOADS) as group:
        for rows in [7, 31] * 6:
            group.reshape([desc("data", rows, 5)])
            group.forward(draw(rows, 5))
            group.backward([draw(rows, 4)])
            held.append(bytes_of_living_tensors())
    return held


def bytes_of_living_tensors() -> int:
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, Tensor)
    }
    return sum(storages.values())


def test_backward_after_a_forward_in_inference_mode_is_refused_and_changes_nothing():
    net, x, g = Net(), draw(7, 5), draw(7, CLASSES, seed=1)
    with group_of(net, desc("data", 7, 5), inputs_need_grad=True) as group:
        group.forward(x)
        group.backward([g])
        before = [parameter.grad for parameter in net.parameters()]
        with torch.inference_mode():
            group.forward(x)
        with pytest.raises(StateError, match="inference_mode"):
            group.backward([g])
        with pytest.raises(StateError, match="backward"):
            group.get_input_grads()
        after = [parameter.grad for parameter in net.parameters()]
        assert all(a is b for a, b in zip(before, after, strict=True))


def test_the_ported_script_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "migrating_mxnet.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec("\n".join(blocks), {"__name__": "ported"})
    assert "probabilities: (6, 3)" in capsys.readouterr().out

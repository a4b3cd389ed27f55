"""What a group is given: of which kind it must be, in whatever memory; and what lies across groups.

Every refusal is checked for its sentence and for having changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from phalanx.errors import ConfigError, StateError
from phalanx.executor_group import DataBatch, DataParallelExecutorGroup
from tests.conformance.containers import draw
from tests.conformance.groups import (
    CLASSES,
    F64,
    THREE,
    Cell,
    Loss,
    Net,
    check_picture,
    classes,
    desc,
    group_of,
    labels_desc,
    picture,
)
from tests.zoo import assert_close, gradients_of

pytestmark = pytest.mark.devices

ROWS = 7
X, Y, G = draw(ROWS, 5), classes(ROWS), draw(ROWS, CLASSES, seed=1)


def frozen(module: nn.Module) -> list[str]:
    return [name for name, each in module.named_parameters() if not each.requires_grad]


# --- two groups on one module ---------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_a_parameter_fixed_by_two_groups_is_fixed_until_both_are_closed(first):
    net, data = Net(), desc("data", ROWS, 5)
    groups = [
        group_of(net, data, fixed_parameters=["head.*"]),
        group_of(net, data, grad_req={"head.bias": "null", "body.bias": "null"}),
    ]
    assert frozen(net) == ["body.bias", "head.weight", "head.bias"]
    groups.pop(first).close()
    (left,) = groups
    assert frozen(net) == (["body.bias", "head.bias"], ["head.weight", "head.bias"])[first]
    left.forward(X)
    left.backward([G])
    assert net.head.bias.grad is None
    left.close()
    left.close()
    assert frozen(net) == []


def test_what_the_user_has_frozen_is_frozen_after_all_groups_too():
    net, data = Net(), desc("data", ROWS, 5)
    net.head.bias.requires_grad_(False)
    with (
        group_of(net, data, fixed_parameters=["head.*"]),
        group_of(net, data, fixed_parameters=["head.*"]),
    ):
        pass
    assert frozen(net) == ["head.bias"]


def test_a_group_that_is_bound_anew_lets_others_keep_what_they_fixed():
    net, other, data = Net(), Net(), [desc("data", ROWS, 5)]
    with (
        group_of(net, *data, fixed_parameters=["body.bias"]),
        group_of(other, *data) as lender,
        group_of(net, *data, fixed_parameters=["body.bias"]) as again,
    ):
        kept = net.body.bias
        again.bind(data, shared_group=lender, reshape=True)
        assert not kept.requires_grad
        assert not net.body.bias.requires_grad
    assert kept.requires_grad
    assert net.body.bias.requires_grad


def test_a_group_that_does_not_train_fixes_nothing():
    net = Net()
    with group_of(net, desc("data", ROWS, 5), fixed_parameters=["*"], for_training=False):
        assert frozen(net) == []
    assert frozen(net) == []


# --- where rows lie, for metrics ------------------------------------------------------------------


class Turned(nn.Module):
    """Both tensors with time first: [T, N] in, [T, N] out."""

    def forward(self, data: Tensor) -> Tensor:
        return data.cumsum(0)


def test_a_loss_stands_for_its_rows_where_labels_have_them_in_another_dim():
    class Mean(nn.Module):
        def forward(self, data: Tensor, label: Tensor) -> Tensor:
            return (data * label).mean()

    x, y, mean = draw(3, 15), draw(3, 15, seed=1), MeanMetric().set_dtype(F64)
    labels = [desc("mask", 3, layout="C"), desc("label", 3, 15, layout="TN")]
    with group_of(Mean(), desc("data", 3, 15, layout="TN"), labels=labels) as group:
        group.forward(DataBatch(x, {"label": y}))
        group.update_metric(mean)
    assert_close(mean.compute(), (x * y).mean(), F64)


# --- of which kind an argument must be ------------------------------------------------------------

REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "requests by number": ({"grad_req": {1: "write"}}, "`grad_req` must map names to"),
    "fixed: None among them": ({"fixed_parameters": [None]}, "`fixed_parameters` must hold names"),
    "fixed: a number": ({"fixed_parameters": 5}, "`fixed_parameters` must hold names, but is 5"),
    "fixed: None": ({"fixed_parameters": None}, r"`fixed_parameters`.*None. Give \[\] for none"),
    "fixed: by name": ({"fixed_parameters": {"head.bias": 1}}, "`fixed_parameters` must hold"),
    "workloads: a number": ({"workloads": 5}, "`workloads` must hold one share per device"),
    "workloads: a text": ({"workloads": [1, "a", 1]}, r"`workloads`.*\[1, 'a', 1\]"),
    "workloads: complex": ({"workloads": [1, 1j, 1]}, "`workloads` must hold one share"),
    "devices: a fraction": ({"devices": 1.5}, "`devices` must be a number of replicas or"),
    "devices: True": ({"devices": True}, "`devices` must be a number of replicas or"),
    "devices: one": ({"devices": torch.device("cpu")}, "`devices` must .* hold a device for each"),
    "devices: by name": ({"devices": {"cpu": 2}}, "`devices` must be a number of replicas or"),
    "rules by number": ({"buffers": {1: "mean"}}, "`buffers` must map names to rules"),
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_options_of_another_kind_are_refused_by_name(case):
    options, match = REFUSED_OPTIONS[case]
    net = Net()
    with pytest.raises(ConfigError, match=match):
        group_of(net, desc("data", ROWS, 5), **{"devices": THREE, **options})
    assert frozen(net) == []


@pytest.fixture
def net() -> Loss:
    return Loss()


@pytest.fixture
def group(net: Loss) -> Iterator[DataParallelExecutorGroup]:
    with group_of(net, desc("data", ROWS, 5), labels=[labels_desc(ROWS)]) as group:
        group.forward(DataBatch(X, Y))
        group.backward()
        yield group


def needs_grad(rows: int) -> list[Tensor]:
    return [torch.ones(5, dtype=F64, requires_grad=True) for _ in range(rows)]


def nested(rows: int) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(5)] * rows, layout=torch.jagged)


ONES = torch.ones(ROWS, dtype=F64)
DENSE = "`data` must be a dense tensor with values"
# Made when asked for: tensors without memory are not to lie about while other tests count it.
REFUSED_BATCHES: dict[str, tuple[Callable[[], DataBatch], str]] = {
    "dates": (
        lambda: DataBatch(np.ones((ROWS, 5), "M8[D]"), Y),
        r"numbers .* dtype datetime64\[D\]",
    ),
    "texts": (
        lambda: DataBatch(np.full((ROWS, 5), "a"), Y),
        "`data` must hold numbers .* dtype <U1",
    ),
    "objects": (lambda: DataBatch(np.ones((ROWS, 5), object), Y), "`data` must hold numbers"),
    "long floats": (
        lambda: DataBatch(np.ones((ROWS, 5), np.longdouble), Y),
        "`data` must be a tensor or",
    ),
    "a list that needs gradients": (
        lambda: DataBatch({"data": needs_grad(ROWS)}, Y),
        r"`data` must be a tensor or an array.*torch\.stack",
    ),
    "ragged rows": (
        lambda: DataBatch({"data": [[1.0], [1.0, 2.0]]}, Y),
        "`data` must be a tensor or",
    ),
    "sparse": (
        lambda: DataBatch(X.to_sparse(), Y),
        rf"{DENSE}, but is torch.sparse_coo. Give data.to_de",
    ),
    "nested": (lambda: DataBatch(nested(ROWS), Y), f"{DENSE}, but is nested"),
    "meta": (lambda: DataBatch(X.to("meta"), Y), f"{DENSE}, but is on the meta device"),
    "sparse labels": (lambda: DataBatch(X, Y.to_sparse()), "`label` must be a dense tensor"),
    "complex weights": (
        lambda: DataBatch(X, Y, weights=ONES + 0j),
        "`weights` must hold one real weight",
    ),
    "weights in a column": (
        lambda: DataBatch(X, Y, weights=ONES[:, None]),
        r"`weights` must hold one real weight for each row, shape \(7,\), but has shape \(7, 1\)",
    ),
    "endless weights": (
        lambda: DataBatch(X, Y, weights=ONES / 0),
        "`weights` must hold finite weights",
    ),
    "sparse weights": (
        lambda: DataBatch(X, Y, weights=ONES.to_sparse()),
        "`weights` must be a dense",
    ),
    "pad: True": (lambda: DataBatch(X, Y, pad=True), "`pad` must be a whole number, but is True"),
    "pad: an array": (
        lambda: DataBatch(X, Y, pad=np.array([1, 2])),
        "`pad` must be a whole number",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BATCHES)
def test_a_batch_of_another_kind_is_refused_by_name(net, group, case):
    batch, match = REFUSED_BATCHES[case]
    check_refused(net, group, lambda: group.forward(batch()), match)


def test_what_needs_another_shape_of_weights_is_not_told_to_reshape(group):
    with pytest.raises(ConfigError) as caught:
        group.forward(DataBatch(X, Y, weights=ONES[:, None]))
    assert "reshape" not in str(caught.value)


Call = Callable[[DataParallelExecutorGroup], object]
PAIR = "`into` must hold two mappings"
REFUSED_CALLS: dict[str, tuple[Call, str]] = {
    "parameters": (lambda g: g.set_params(3), "`params` must map names to tensors, but is 3"),
    "buffers": (lambda g: g.set_params({}, 3), "`buffers` must map names to tensors, but is 3"),
    "sparse parameters": (lambda g: set_weight(g, "to_sparse"), "`body.weight` must be a dense"),
    "complex parameters": (lambda g: set_weight(g, "cfloat"), "`body.weight` must be real"),
    "into numbers": (lambda g: g.get_params((3, 4)), rf"{PAIR}.*\(3, 4\)"),
    "into one": (lambda g: g.get_params(({},)), PAIR),
    "into a number": (lambda g: g.get_params(3), rf"{PAIR}.*but is 3. Give \(\{{\}}, \{{\}}\)"),
    "begin": (lambda g: g.outputs(begin="a"), "`begin` must be a whole number, but is 'a'"),
    "end": (lambda g: g.outputs(end=1.5), "`end` must be a whole number, but is 1.5"),
}


def set_weight(group: DataParallelExecutorGroup, method: str) -> None:
    params = group.get_params()[0]
    group.set_params({**params, "body.weight": getattr(params["body.weight"], method)()})


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_an_argument_of_another_kind_is_refused_by_name(net, group, case):
    call, match = REFUSED_CALLS[case]
    check_refused(net, group, lambda: call(group), match)
    assert not any(each._forward_hooks for each in net.modules())


def check_refused(
    net: nn.Module, group: DataParallelExecutorGroup, call: Callable[[], object], match: str
) -> None:
    before, outputs = picture(group, net), group.outputs()
    with pytest.raises(ConfigError, match=match):
        call()
    check_picture(group, net, before)
    torch.testing.assert_close(group.outputs(), outputs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (lambda: G + 0j, r"`out_grads` must be real for output `output0` of torch\.float64"),
        (lambda: G.to_sparse(), "`out_grads` must be a dense tensor with values"),
        (
            lambda: G.to("meta"),
            "`out_grads` must be a dense tensor with values, but is on the meta",
        ),
    ],
)
def test_out_grads_of_another_kind_are_refused_and_the_pass_can_be_gone_back_through(given, match):
    net, twin = Net(), Net()
    with group_of(net, desc("data", ROWS, 5)) as group:
        group.forward(X)
        check_refused(net, group, lambda: group.backward([given()]), match)
        group.backward([G])
    twin(X).backward(G)
    assert_close(gradients_of(net), gradients_of(twin), F64)


H, C = draw(ROWS, 3, seed=2), draw(ROWS, 3, seed=3)
REFUSED_STATES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a text": (lambda: {"value": "a"}, "`value` must be a number, but is 'a'"),
    "complex": (lambda: {"value": 1j}, "`value` must be a number"),
    "True": (lambda: {"value": True}, "`value` must be a number, but is True"),
    "other features": (
        lambda: {"states": [H, draw(ROWS, 4)]},
        r"`states` must have the shape of `c` as bound, \(7, 3\) but for its rows, .* \(7, 4\)",
    ),
    "other features of one device": (
        lambda: {"states": [H, [C[:2], C[2:4, :2], C[4:]]]},
        r"`states` must have the shape of `c` .* \(2, 2\)",
    ),
    "other dims": (lambda: {"states": [H[0], C]}, r"`h` must have 2 dims like \(7, 3\)"),
    "sparse": (lambda: {"states": [H, C.to_sparse()]}, "`c` must be a dense tensor with values"),
    "meta": (lambda: {"states": [H.to("meta"), C]}, "`h` must be a dense tensor with values"),
    "complex ones": (lambda: {"states": [H, C + 0j]}, r"`c` must be torch\.float64 as bound"),
}


@pytest.mark.parametrize("case", REFUSED_STATES)
def test_states_that_do_not_fit_are_refused_when_they_are_set(case):
    given, match = REFUSED_STATES[case]
    states = [desc("h", ROWS, 3), desc("c", ROWS, 3)]
    with group_of(Cell(), desc("data", ROWS, 5), states=states) as group:
        group.set_states([H, C])
        with pytest.raises(ConfigError, match=match):
            group.set_states(**given())
        group.forward(X)
        assert_close(list(group.outputs()), [e.detach() for e in Cell()(X, H, C)], F64)


def test_states_may_be_arrays_and_are_converted_as_bound():
    states = [desc("h", ROWS, 3), desc("c", ROWS, 3)]
    with group_of(Cell(), desc("data", ROWS, 5), states=states) as group:
        group.set_states([H.float(), C.numpy()])
        group.forward(X)
        expected = Cell()(X, H.float().double(), C)
        assert_close(list(group.outputs()), [each.detach() for each in expected], F64)


# --- tensors in whatever memory -------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_arrays_of_the_other_byte_order_are_read():
    with group_of(nn.Identity(), desc("input", ROWS, 5)) as group:
        group.forward(X.numpy().astype(">f8"))
        assert torch.equal(group.outputs()[0].cpu(), X)


class Squares(nn.Module):
    """Every tensor that it gets is saved for the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 2.0, dtype=F64))

    def forward(self, data: Tensor, h: Tensor, label: Tensor, weights: Tensor) -> Tensor:
        rows = (data * self.scale + h * self.scale * label).square().sum(1)
        return (rows * weights).sum() / weights.sum()


@pytest.mark.parametrize("by_device", [False, True])
def test_tensors_made_in_inference_mode_are_trained_on_like_any_others(by_device):
    with torch.inference_mode():
        x, h, label = (draw(15, 5, seed=seed) for seed in range(3))
        weights = draw(15, seed=3).exp()
    assert x.is_inference()
    net, twin, data = Squares(), Squares(), desc("data", 15, 5)
    options = {"labels": [desc("label", 15, 5)], "states": [desc("h", 15, 5)]}
    with group_of(net, data, inputs_need_grad=True, **options) as group:
        group.set_states([[h[part] for part in group.slices] if by_device else h])
        group.forward(DataBatch(x, label, weights=weights))
        group.backward()
        leaf = x.clone().requires_grad_()
        twin(leaf, h.clone(), label.clone(), weights.clone()).backward()
        assert_close(net.scale.grad, twin.scale.grad, F64)
        assert_close(group.input_grads()[0], leaf.grad, F64)


def test_out_grads_made_in_inference_mode_are_gone_back_with():
    with torch.inference_mode():
        x, g = draw(15, 5), draw(15, CLASSES, seed=1)
    net, twin = Net(), Net()
    with group_of(net, desc("data", 15, 5), grad_req="add") as group:
        for _ in range(2):
            group.forward(x)
            group.backward([g])
            twin(x.clone()).backward(g.clone())
    assert_close(gradients_of(net), gradients_of(twin), F64)


class Viewing(Metric):
    """Calls `view`, as many metrics do, which needs memory without gaps."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=F64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.total += (outputs.view(-1) * labels.view(-1)).sum()

    def compute(self) -> Tensor:
        return self.total


@pytest.mark.parametrize("pre_sliced", [False, True])
def test_metrics_get_tensors_without_gaps(pre_sliced):
    x, y, metric = draw(3, 15), draw(3, 15, seed=1), Viewing()
    group = group_of(
        nn.Identity(),
        desc("input", 3, 15, layout="TN"),
        labels=[desc("label", 3, 15, layout="TN")],
    )
    with group:
        group.forward(x)
        cut = [y[:, part] for part in group.slices]
        assert not all(each.is_contiguous() for each in cut)
        group.update_metric(metric, cut if pre_sliced else y, pre_sliced=pre_sliced)
    assert_close(metric.compute(), (x * y).sum(), F64)


# --- weights and names ----------------------------------------------------------------------------


def test_weights_that_the_module_does_not_take_weigh_no_loss():
    net, mean = Loss(), MeanMetric().set_dtype(F64)
    with group_of(net, desc("data", 15, 5), labels=[labels_desc(15)]) as group:
        group.forward(DataBatch(draw(15, 5), classes(15), weights=draw(15).exp()))
        group.update_metric(mean)
    assert_close(mean.compute(), Loss()(draw(15, 5), classes(15)).detach(), F64)


def test_outputs_of_one_name_are_refused_unless_they_are_declared_with_others():
    class Alike(nn.Module):
        def forward(self, data: Tensor) -> dict[str, Any]:
            return {"a": {"b": data}, "a.b": data + 1}

    with group_of(Alike(), desc("data", ROWS, 5)) as group:
        with pytest.raises(ConfigError, match=r"`outputs` must have a name each, but are named"):
            group.forward(X)
        with pytest.raises(StateError, match=r"`forward\(\)`"):
            group.outputs()
    with pytest.raises(ConfigError, match="`outputs` must name each tensor once, but names 'a'"):
        group_of(Alike(), desc("data", ROWS, 5), outputs=[("a", (ROWS, 5)), ("a", (ROWS, 5))])
    outputs = [("a", (ROWS, 5)), ("b", (ROWS, 5))]
    with group_of(Alike(), desc("data", ROWS, 5), outputs=outputs) as group:
        group.forward(X)
        assert [name for name, _ in group.output_shapes] == ["a", "b"]
        assert torch.equal(group.outputs()[1].cpu(), X + 1)

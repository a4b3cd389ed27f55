"""MXNet's executor group: its laws, its names, and the page that tells of them.

What it shares with other containers is in `test_containers.py`, its metrics are in
`test_mxnet_metrics.py`. Cases of MXNet's own `test_module.py` keep their sizes' spirit, with sizes
that do not fit by luck; those that need symbols (json, sparse weights, `group2ctxs`) are left out.
"""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from phalanx.compat import mxnet
from phalanx.compat.mxnet import DataBatch, DataParallelExecutorGroup, Monitor
from phalanx.errors import ConfigError, StateError
from phalanx.plan import equal_sizes, workload_sizes
from tests.contracts.containers import draw, joined
from tests.contracts.groups import (
    CLASSES,
    F64,
    THREE,
    TWO,
    WORKLOADS,
    Loss,
    Net,
    Sum,
    check_against_plain,
    classes,
    desc,
    group_of,
    labels_desc,
)
from tests.multiprocess.fork_server import context
from tests.zoo import assert_close, gradients_of, state_of

pytestmark = [pytest.mark.devices, pytest.mark.promise("executor-groups", "mxnet")]

ROWS = 7
BATCH = draw(ROWS, 5), classes(ROWS)
G = draw(ROWS, CLASSES, seed=1)


# --- how it cuts ----------------------------------------------------------------------------------


SPLITS = {
    (5, 2): [3, 2],
    (6, 4): [2, 2, 1, 1],
    (10, 4): [3, 3, 2, 2],
    (20, 8): [3] * 4 + [2] * 4,
    (15, 8): [2] * 7 + [1],
    (36, 7): [6] + [5] * 6,
    (100, 8): [13] * 4 + [12] * 4,
}

REFUSED = [(6, 4), (8, 5), (9, 6), (10, 6), (11, 7), (12, 7), (18, 7), (12, 8), (13, 8), (14, 8)]
REFUSED += [(21, 8), (28, 8), (15, 6), (20, 8)]

FEWER_ROWS_THAN_DEVICES = [(0, 3), (1, 3), (2, 3), (7, 8)]


@pytest.mark.parametrize(("rows", "devices"), [*SPLITS, *REFUSED, *FEWER_ROWS_THAN_DEVICES])
def test_every_case_of_the_table_gives_sizes_to_all_devices(rows, devices):
    sizes = SPLITS.get((rows, devices), equal_sizes(rows, devices))
    assert workload_sizes(rows, [1] * devices) == sizes
    x = draw(rows, 3)
    with group_of(nn.Identity(), desc("input", rows, 3), devices=devices) as group:
        assert [part.stop - part.start for part in group.slices] == sizes
        group.forward(x)
        assert seen_rows(group) == sizes
        assert torch.equal(group.get_outputs()[0], x)


def seen_rows(group: DataParallelExecutorGroup) -> list[int]:
    """Return how many rows each device's output has; 0 for a device that took no part."""
    (parts,) = group.get_outputs(False)
    return [0 if part is None else len(part) for part in parts]


@pytest.mark.parametrize(
    ("rows", "workloads", "sizes"),
    [
        (23, [10, 10, 3], [10, 10, 3]),  # two K40c and a K4000, as users asked for
        (7, [10, 10, 3], [3, 3, 1]),
        (15, [1, 5, 9], [1, 5, 9]),
        (5, [1, 0, 1], [3, 0, 2]),
        (1, [1, 5, 9], [0, 0, 1]),
        (9, [0, 0, 2], [0, 0, 9]),
    ],
)
def test_workloads_are_followed_and_zero_switches_a_device_off(rows, workloads, sizes):
    net = Net()
    data = desc("data", rows, 5)
    with group_of(net, data, devices=THREE, workload=workloads, inputs_need_grad=True) as group:
        check_against_plain(group, net, {"data": draw(rows, 5)}, draw(rows, 4, seed=1))
        assert seen_rows(group) == sizes
        assert [part.stop - part.start for part in group.slices] == sizes


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 16])
def test_a_last_batch_of_any_size_gives_the_whole_batchs_loss_and_gradient(rows):
    net = Loss()
    with group_of(net, desc("data", 7, 5), label_shapes=[labels_desc(7)]) as group:
        group.forward(DataBatch(draw(rows, 5), classes(rows)))
        twin = Loss()
        if rows == 0:
            return
        expected = twin(draw(rows, 5), classes(rows))
        expected.backward()
        assert_close(group.get_outputs()[0], expected.detach(), F64)
        group.backward()
        assert_close(gradients_of(net), gradients_of(twin), F64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_outputs_and_gradients_have_that_of_the_inputs(dtype):
    data = desc("input", 3, 8, 7, layout="TNC", dtype=dtype)
    x, g = draw(3, 8, 7, dtype=dtype), draw(3, 8, 7, seed=1, dtype=dtype)
    outputs = [desc("output", 3, 8, 7, layout="TNC", dtype=dtype)]
    with group_of(
        nn.ReLU(), data, devices=TWO, inputs_need_grad=True, output_shapes=outputs
    ) as group:
        group.forward(DataBatch(x))
        group.backward([g])
        assert [each.dtype for each in group.get_outputs()] == [dtype]
        assert [each.dtype for each in group.get_input_grads()] == [dtype]
        assert torch.equal(group.get_outputs()[0].cpu(), x.relu())
        assert torch.equal(group.get_input_grads()[0].cpu(), g * (x > 0))


def test_layout_merged_and_per_device():
    data, out = desc("input", 3, 8, 7, layout="TNC"), desc("output", 3, 8, 7, layout="TNC")
    x = draw(3, 8, 7)
    with group_of(
        nn.Tanh(), data, devices=TWO, inputs_need_grad=True, output_shapes=[out]
    ) as group:
        group.forward(x)
        assert torch.equal(group.get_outputs()[0].cpu(), x.tanh())
        assert group.get_outputs()[0].shape == (3, 8, 7)
        (parts,) = group.get_outputs(False)
        assert [tuple(part.shape) for part in parts] == [(3, 4, 7)] * 2
        group.backward([torch.ones(3, 8, 7, dtype=F64)])
        (grads,) = group.get_input_grads(False)
        assert [tuple(grad.shape) for grad in grads] == [(3, 4, 7)] * 2
        assert group.get_input_grads()[0].shape == (3, 8, 7)
        assert_close(group.get_input_grads()[0], 1 - x.tanh().square(), F64)


# --- outputs and gradients ------------------------------------------------------------------------


def test_input_grads_stand_in_the_order_of_the_names():
    names = ["b", "c", "a"]
    ones = torch.ones(5, dtype=F64)
    descs = [desc(name, 5) for name in names]
    with group_of(Sum(), *descs, devices=TWO, inputs_need_grad=True) as group:
        group.forward(DataBatch([ones, ones, ones]))
        group.backward([ones])
        assert [grad.tolist() for grad in group.get_input_grads()] == [
            [2.0] * 5,
            [3.0] * 5,
            [1.0] * 5,
        ]
        per_device = [[grad.tolist() for grad in grads] for grads in group.get_input_grads(False)]
        assert per_device == [[[k] * 3, [k] * 2] for k in (2.0, 3.0, 1.0)]


def test_input_grads_of_what_is_given_whole_are_the_sum_over_devices():
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x * mask).sin()

    values = {"x": draw(15, 3), "mask": draw(3, seed=1)}
    descs = [desc("x", 15, 3), desc("mask", 3, layout="C")]
    with group_of(Masked(), *descs, inputs_need_grad=True) as group:
        check_against_plain(group, Masked(), values, draw(15, 3, seed=2))
        by_device = group.get_input_grads(False)[1]
        assert torch.equal(by_device[0], group.get_input_grads()[1])
        assert by_device[1:] == [None, None]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(5, 4).double()

    def forward(self, data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(data * mask), self.fc.weight.sum(1)


def test_an_output_without_rows_is_the_first_devices():
    net = Masked()
    outputs = [desc("logits", 15, 4, layout="NC"), desc("sums", 4, layout="C")]
    data = [desc("data", 15, 5), desc("mask", 5, layout="C")]
    with group_of(net, *data, output_shapes=outputs) as group:
        assert group.get_output_shapes() == [("logits", (15, 4)), ("sums", (4,))]
        group.forward((draw(15, 5), draw(5, seed=1)))
        expected = net(draw(15, 5), draw(5, seed=1))
        assert_close(list(group.get_outputs()), [each.detach() for each in expected], F64)
        assert list(group.get_output_shapes()) == [("logits", (15, 4)), ("sums", (4,))]


def test_outputs_are_merged_each_by_its_own_layout():
    class Three(nn.Module):
        def forward(self, data: Tensor) -> tuple[Tensor, ...]:
            return data, data.transpose(0, 1), data.unsqueeze(0)

    outputs = [desc("a", 15, 5), desc("b", 5, 15, layout="CN"), desc("c", 1, 15, 5, layout="TNC")]
    x = draw(15, 5)
    with group_of(Three(), desc("data", 15, 5), output_shapes=outputs) as group:
        group.forward(x)
        for found, expected in zip(group.get_outputs(), Three()(x), strict=True):
            assert torch.equal(found.cpu(), expected)


def test_a_loss_over_the_merged_outputs_reaches_every_device():
    """Contrastive: every row is held against all rows, so activations are gathered before it."""

    def contrast(z: Tensor) -> Tensor:
        return torch.logsumexp(z @ z.T, 1).mean()

    net, twin = Net(), Net()
    with group_of(net, desc("data", 15, 5)) as group:
        group.forward(draw(15, 5))
        merged = group.get_outputs()[0].detach().requires_grad_()
        contrast(merged).backward()
        group.backward([merged.grad])
    contrast(twin(draw(15, 5))).backward()
    assert_close(gradients_of(net), gradients_of(twin), F64)


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
        group.forward(DataBatch({"data": x}, {"label": y}))
        group.backward()
        expected = twin(x, y)
        expected["loss"].backward()
        assert [name for name, _ in group.get_output_shapes()] == ["loss", "scores"]
        group.update_metric(accuracy)
    assert_close(gradients_of(net), gradients_of(twin), F64)
    assert accuracy.compute() == (expected["scores"].argmax(1) == y).float().mean()


def test_outputs_whose_gradient_is_none_have_none():
    net, twin = Both(), Both()
    x, g = draw(15, 5), draw(15, 4, seed=2)
    with group_of(net, desc("data", 15, 5)) as group:
        group.forward(x)
        group.backward([None, g])
    twin(x)["scores"].backward(g)
    assert_close(gradients_of(net), gradients_of(twin), F64)


def test_the_gradient_of_an_output_without_rows_is_counted_once():
    class Sums(Net):
        def forward(self, data: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(data), self.body.weight.sum(1)

    net, twin, g = Sums(), Sums(), draw(7, seed=4)
    outputs = [desc("scores", 15, 4), desc("sums", 7, layout="C")]
    with group_of(net, desc("data", 15, 5), output_shapes=outputs) as group:
        group.forward(draw(15, 5))
        group.backward([None, g])
    twin(draw(15, 5))[1].backward(g)
    assert_close(net.body.weight.grad, twin.body.weight.grad, F64)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=F64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=F64))

    def forward(self, data: Tensor) -> Tensor:
        return (self.weight * self.frozen).expand(len(data))


@pytest.mark.parametrize(("grad_req", "expected"), [("write", [7, 7]), ("add", [7, 14])])
def test_grad_req_writes_or_adds(grad_req, expected):
    net = Repeated()
    with group_of(net, desc("data", 7), devices=TWO, grad_req=grad_req) as group:
        for total in expected:
            group.forward(draw(7))
            group.backward([torch.ones(7, dtype=F64)])
            assert net.weight.grad.item() == total


# --- binding and reshaping ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [3, "abc", (3, "b"), (2.5, 3), (-1, 3)])
def test_bind_refuses_a_bad_shape_and_takes_a_good_one_after_it(shape):
    net = Net()
    x = draw(7, 5)
    with group_of(net, desc("data", 3, 5), devices=TWO) as group:
        with pytest.raises(ConfigError, match="shape"):
            group.bind_exec([("data", shape)])
        assert group.batch_size == 3
        group.bind_exec([desc("data", 7, 5)])
        assert group.batch_size == 7
        group.forward(x)
        assert_close(group.get_outputs()[0], net(x).detach(), F64)
    with pytest.raises(ConfigError, match="shape"):
        DataParallelExecutorGroup(net, TWO, data_shapes=[("data", shape)])


def test_padded_rows_and_labels_that_do_not_fit_are_refused():
    net = Net()
    with group_of(net, desc("data", 5, 5), label_shapes=[labels_desc(5)]) as group:
        x, labels = draw(5, 5), torch.zeros(5, dtype=torch.long)
        with pytest.raises(ConfigError, match="`pad` must be at most the batch's 5 rows"):
            group.forward(DataBatch(x, labels, pad=6))
        group.forward(DataBatch(x, labels, pad=2))
        metric = MulticlassAccuracy(CLASSES, average="micro")
        with pytest.raises(ConfigError, match="`labels` must have the batch's 5 rows"):
            group.update_metric(metric, [labels[:4]])
        group.update_metric(metric, [labels])
        assert metric.compute() == (net(x[:3]).argmax(1) == 0).float().mean()


class MeanOfRows(nn.Module):
    """A loss: over the rows' mean, the sum of a layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(20, 20, dtype=F64)
        nn.init.zeros_(self.fc.bias)

    def forward(self, data: Tensor) -> Tensor:
        return self.fc(data).sum(1).mean()


@pytest.mark.parametrize("grads_are_given", [True, False])
def test_reshape_and_the_update_is_right_for_each_batch_size(grads_are_given):
    """The original's bias went to -1 and then to -3, because it went on dividing by 7."""
    module = MeanOfRows()
    net = module.fc if grads_are_given else module
    name = "input" if grads_are_given else "data"
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with group_of(net, desc(name, 7, 20), devices=TWO) as group:
        for step, rows in enumerate([7, 14, 7], 1):
            if step > 1:
                group.reshape([desc(name, rows, 20)])
            group.forward(torch.ones(rows, 20, dtype=F64))
            mean = torch.full((rows, 20), 1 / rows, dtype=F64)
            if grads_are_given:
                assert group.get_outputs()[0].shape == (rows, 20)
            group.backward([mean] if grads_are_given else None)
            optimizer.step()
            assert_close(module.fc.bias.detach(), torch.full((20,), -float(step), dtype=F64), F64)


def test_reshape_notices_a_change_of_dtype_or_layout_alone():
    """The original compared names and shapes, and went on with the old dtype and layout."""
    x = draw(4, 4, 3)
    out = [desc("output", 4, 4, 3, layout="TNC")]
    with group_of(nn.Tanh(), desc("input", 4, 4, 3), devices=THREE) as group:
        group.forward(x)
        assert [len(part) for part in group.get_outputs(False)[0]] == [2, 1, 1]
        group.reshape([desc("input", 4, 4, 3, layout="TNC")])
        group.forward(x)
        assert [tuple(part.shape) for part in group.get_outputs(False)[0]] == [
            (4, 2, 3),
            (4, 1, 3),
            (4, 1, 3),
        ]
        group.reshape([desc("input", 4, 4, 3, layout="TNC", dtype=torch.float32)])
        group.forward(x.float())
        assert {part.dtype for part in group.get_outputs(False)[0]} == {torch.float32}
    assert out


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


# --- parameters -----------------------------------------------------------------------------------


def changed(net: nn.Module, by: float = 1.0) -> dict[str, Tensor]:
    return {name: value.detach() + by for name, value in net.named_parameters()}


@pytest.mark.parametrize(
    ("missing", "extra", "allowed", "works"),
    [
        (False, False, {}, True),
        (True, False, {"allow_missing": True}, True),
        (True, False, {"allow_missing": False}, False),
        (True, False, {"allow_missing": False, "allow_extra": True}, False),
        (False, True, {"allow_extra": True}, True),
        (False, True, {}, False),
        (False, True, {"allow_missing": True}, False),
        (True, True, {"allow_missing": True, "allow_extra": True}, True),
        (True, True, {"allow_missing": True}, False),
        (True, True, {"allow_missing": False, "allow_extra": True}, False),
    ],
)
def test_set_params_four_outcomes(missing, extra, allowed, works):
    net, x = Net(), draw(7, 5)
    before, given = state_of(net), changed(net)
    if missing:
        del given["head.bias"]
    if extra:
        given["tail.bias"] = torch.ones(3, dtype=F64)
    with group_of(net, desc("data", 7, 5), devices=TWO) as group:
        group.forward(x)
        if works:
            group.set_params(given, **allowed)
        else:
            with pytest.raises(ConfigError, match=r"head\.bias|tail\.bias"):
                group.set_params(given, **allowed)
        kept = {name for name in before if not works or name not in given}
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name] if name in kept else before[name] + 1), name
        group.forward(x)
        assert_close(group.get_outputs()[0], net(x).detach(), F64)


def test_set_params_with_a_dtype_unknown_to_torch_changes_nothing():
    net = Net()
    before, given = state_of(net), changed(net) | {"head.bias": np.array(["words"] * 4)}
    told = pytest.raises(TypeError, match="type numpy")
    with group_of(net, desc("data", 7, 5), devices=TWO) as group, told:
        group.set_params(given)
    assert_close(net.state_dict(), before, F64)


def test_get_params_gives_copies_or_fills_what_is_given():
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    # Batch norm refuses to train on one row.
    with group_of(net, desc("input", 15, 5), devices=THREE, workload=[2, 4, 9]) as group:
        group.forward(draw(15, 5), is_train=True)
        params, buffers = group.get_params()
        assert list(params) == [name for name, _ in net.named_parameters()]
        assert list(buffers) == [name for name, _ in net.named_buffers()]
        assert buffers["1.num_batches_tracked"].dtype == torch.int64
        for name, value in {**params, **buffers}.items():
            assert torch.equal(value, net.state_dict()[name])
            value.zero_()
        assert net[0].weight.abs().min() > 0
        own = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in params.items()}
        group.get_params(own, buffers)
        assert torch.equal(own["0.weight"], net[0].weight.detach().float())
        assert torch.equal(buffers["1.running_mean"], net[1].running_mean)
        with pytest.raises(ConfigError, match="running_mean"):
            group.get_params(empty := {}, {"1.running_mean": torch.zeros(5)})
        assert not empty


@pytest.mark.parametrize(("save_on", "load_on"), [(2, 2), (2, 1), (1, 2), (1, 1)])
def test_save_load_goes_on_alike_on_another_number_of_devices(save_on, load_on):
    nets = [Loss(), Loss(), Loss()]
    for net in nets[1:]:
        nn.init.zeros_(net.body.weight)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (nets[0], nets[1])]
    batches = [(draw(7, 5, seed=seed), classes(7, seed)) for seed in range(6)]

    def train(net, optimizer, devices, given):
        labels = [labels_desc(7)]
        with group_of(net, desc("data", 7, 5), devices=devices, label_shapes=labels) as group:
            for x, y in given:
                group.forward(DataBatch(x, y))
                group.backward()
                optimizer.step()
            return group.get_params()

    params, buffers = train(nets[0], optimizers[0], save_on, batches[:3])
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    with group_of(
        nets[1], desc("data", 7, 5), devices=load_on, label_shapes=[labels_desc(7)]
    ) as group:
        group.set_params(params, buffers)
    found, _ = train(nets[1], optimizers[1], load_on, batches[3:])
    plain = Loss()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        plain(x, y).backward()
        optimizer.step()
    assert_close(found, {name: p.detach() for name, p in plain.named_parameters()}, F64)


def test_parameters_are_read_into_maps_that_hold_more_and_into_arrays() -> None:
    net = Net()
    with mxnet.DataParallelExecutorGroup(net, 2, data_shapes=[("data", (7, 5))]) as group:
        kept = np.zeros(tuple(net.head.weight.shape))
        into: dict[str, Any] = {"head.weight": kept, "other": 3}
        group.getParams(into, {"more": 4})
        assert np.array_equal(kept, net.head.weight.detach().numpy())
        assert into["other"] == 3
        assert torch.equal(into["head.bias"], net.head.bias)
        frozen = np.zeros(tuple(net.head.weight.shape))
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            group.getParams({"head.weight": frozen}, {})


class Deep(nn.Module):
    """Layers with the same names whatever their number, and a buffer."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(depth)
        layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(depth)]
        self.body = nn.Sequential(nn.BatchNorm1d(5), *layers).double()

    def forward(self, data: Tensor) -> Tensor:
        return self.body(data)


@pytest.mark.parametrize("late", [False, True])
def test_a_group_shares_parameters_and_buffers_with_another_by_name(late):
    shallow, deep, twin = Deep(2), Deep(3), Deep(3)
    deep.body[1][0].bias.requires_grad_(False)
    with (
        group_of(deep, desc("data", 15, 5), devices=2) as first,
        group_of(
            shallow, desc("data", 7, 5), devices=2, shared_group=None if late else first
        ) as second,
    ):
        if late:
            second.forward(draw(7, 5))
            second.bindExec([desc("data", 7, 5)], None, first, True)
        theirs = {**dict(deep.named_parameters()), **dict(deep.named_buffers())}
        for name, tensor in (*shallow.named_parameters(), *shallow.named_buffers()):
            assert tensor is theirs[name]
        assert not shallow.body[1][0].bias.requires_grad
        optimizer = torch.optim.SGD(shallow.parameters(), lr=0.5)
        deep.eval()
        for step in range(2):
            second.forward(draw(7, 5, seed=step), is_train=True)
            second.backward([draw(7, 5, seed=9)])
            optimizer.step()
        twin.load_state_dict(deep.state_dict())
        first.forward(draw(15, 5), is_train=False)
        assert_close(first.get_outputs()[0], twin.eval()(draw(15, 5)).detach(), F64)
        assert not torch.equal(twin.body[1][0].weight, Deep(3).body[1][0].weight)


def frozen_weight() -> nn.Linear:
    layer = nn.Linear(4, 2)
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)
    return layer


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (nn.Linear(4, 3), r"`1.weight` must have shape \(2, 4\)"),
        (nn.Linear(4, 2).double(), "must be a Parameter of torch.float32, but is a Parameter of"),
        (frozen_weight(), "`1.weight` must be a Parameter of torch.float32, but is a Tensor of"),
    ],
)
def test_a_group_that_cannot_share_all_shares_nothing(last, message):
    net, other = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), nn.Sequential(nn.Linear(5, 4))
    other.append(last)
    before = dict(net.named_parameters())
    with group_of(other, desc("input", 7, 5)) as first, group_of(net, desc("input", 6, 5)) as group:
        with pytest.raises(ConfigError, match=message):
            group.bind_exec([desc("input", 9, 5)], shared_group=first)
        assert group.batch_size == 6
    assert all(parameter is before[name] for name, parameter in net.named_parameters())


def test_buckets_of_several_lengths_train_one_set_of_parameters():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn = nn.RNN(3, 4, batch_first=True)
            self.fc = nn.Linear(4, 2)
            self.double()

        def forward(self, data: Tensor) -> Tensor:
            return self.fc(self.rnn(data)[0][:, -1]).square().mean()

    net, twin = Recurrent(), Recurrent()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5)
    with (
        group_of(net, desc("data", 9, 6, 3)) as longest,
        group_of(Recurrent(), desc("data", 9, 4, 3), shared_group=longest) as shorter,
    ):
        for step in range(6):
            length = (6, 4)[step % 2]
            group = (longest, shorter)[step % 2]
            x = draw(9, length, 3, seed=step)
            group.forward(x)
            group.backward()
            optimizer.step()
            plain.zero_grad()
            twin(x).backward()
            plain.step()
    assert_close(list(net.parameters()), list(twin.parameters()), F64)


# --- batches --------------------------------------------------------------------------------------


def numpy_of(x: Tensor) -> Any:
    return x.numpy()


BATCHES = {
    "DataBatch": lambda a, b: DataBatch((a, b)),
    "DataBatch of names": lambda a, b: DataBatch({"b": b, "a": a}),
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"b": b, "a": a},
    "numpy": lambda a, b: (a.numpy(), b.numpy()),
    "dict of numpy": lambda a, b: {"a": a.numpy(), "b": b.numpy()},
}


class Pairs(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a.sum(1) - 2 * b


@pytest.mark.parametrize("form", BATCHES)
def test_forward_takes_batches_of_many_forms(form):
    a, b = draw(8, 3), draw(8, seed=1)
    with group_of(Pairs(), desc("a", 8, 3), desc("b", 8)) as group:
        group.forward(BATCHES[form](a, b))
        assert_close(group.get_outputs()[0], a.sum(1) - 2 * b, F64)


@pytest.mark.parametrize("form", [lambda x: x, numpy_of, lambda x: (x,), lambda x: [x]])
def test_forward_takes_the_one_input_alone(form):
    x = draw(7, 5)
    with group_of(Net(), desc("data", 7, 5)) as group:
        group.forward(form(x))
        assert_close(group.get_outputs()[0], Net()(x).detach(), F64)


# --- what is refused ------------------------------------------------------------------------------


def loss_group(net: Loss, **options: Any) -> DataParallelExecutorGroup:
    return group_of(net, desc("data", 7, 5), label_shapes=[labels_desc(7)], **options)


def forward(group: DataParallelExecutorGroup, rows: int = 7) -> None:
    group.forward(DataBatch(draw(rows, 5), classes(rows)))


X, Y = draw(7, 5), classes(7)


def test_backward_needs_a_forward_pass():
    net = Loss()
    with loss_group(net) as group:
        with pytest.raises(StateError, match=r"`backward\(\)` needs"):
            group.backward()
        assert gradients_of(net) == [None] * 4
        forward(group)
        group.backward()
        before = gradients_of(net)
        with pytest.raises(StateError, match=r"`backward\(\)` needs"):
            group.backward()
        assert_close(gradients_of(net), before, F64)


def test_backward_needs_a_training_pass():
    net = Loss()
    with loss_group(net, for_training=False) as group:
        forward(group)
        with pytest.raises(StateError, match="training"):
            group.backward()
        assert gradients_of(net) == [None] * 4
    with loss_group(net) as group:
        group.forward(DataBatch(X, Y), is_train=False)
        with pytest.raises(StateError, match="train"):
            group.backward()
        assert gradients_of(net) == [None] * 4
        forward(group)
        group.backward()
        assert all(gradient is not None for gradient in gradients_of(net))


# --- both languages' names and keywords -----------------------------------------------------------


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
        group.bindExec([desc("data", 9, 5)], [labels_desc(9)])
        assert group.getBatchSize() == 9
        arrays = {name: each.detach().numpy() for name, each in other.named_parameters()}
        group.setParams({**arrays, "tail": torch.ones(1)}, allow_extra=True)
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


def mxnet_group(net: Net, **options: Any) -> mxnet.DataParallelExecutorGroup:
    given = {"contexts": TWO, "workload": [1, 3], "data_shapes": [desc("data", ROWS, 5)]}
    return mxnet.DataParallelExecutorGroup(net, **{**given, **options})


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


# --- docs/migrating_mxnet.md ----------------------------------------------------------------------


def test_the_ported_script_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "migrating_mxnet.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec("\n".join(blocks), {"__name__": "ported"})
    assert "probabilities: (6, 3)" in capsys.readouterr().out

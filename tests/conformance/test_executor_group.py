"""What MXNet's own tests of its executor group asked for, case by case, against plain PyTorch.

Each test is named after one of MXNet's `test_module.py`, which it follows with sizes that do not
fit by luck. Cases that ask for symbols (json files, sparse weights, `group2ctxs`) are left out.
"""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.compat.mxnet import DataBatch, DataParallelExecutorGroup, Monitor
from phalanx.errors import ConfigError
from tests.contracts.containers import draw
from tests.contracts.groups import (
    F64,
    THREE,
    TWO,
    Loss,
    Net,
    Sum,
    check_against_plain,
    classes,
    desc,
    group_of,
    labels_desc,
)
from tests.zoo import assert_close, gradients_of, state_of, twin_of

pytestmark = [pytest.mark.devices, pytest.mark.promise("executor-groups", "mxnet")]

# --- module_dtype, module_layout ------------------------------------------------------------------


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


def test_layout_of_an_uneven_batch():
    """What the original refused: 8 rows over three devices, and unequal ones."""
    data, out = desc("input", 3, 15, 7, layout="TNC"), desc("output", 3, 15, 7, layout="TNC")
    x = draw(3, 15, 7)
    with group_of(nn.Tanh(), data, output_shapes=[out]) as group:
        group.forward(x)
        (parts,) = group.get_outputs(False)
        assert [tuple(part.shape) for part in parts] == [(3, 1, 7), (3, 5, 7), (3, 9, 7)]
        assert torch.equal(group.get_outputs()[0].cpu(), x.tanh())
        assert list(group.get_output_shapes()) == [("output", (3, 15, 7))]


# --- module_input_grads ---------------------------------------------------------------------------


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
        assert [tuple(grad.shape) for grad in group.get_input_grads(False)[1]] == [(3,)] * 3


# --- module_bind ----------------------------------------------------------------------------------


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


# --- module_reshape -------------------------------------------------------------------------------


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


# --- module_set_params, save_load -----------------------------------------------------------------


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


def test_get_params_gives_copies_or_fills_what_is_given():
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    # Batch norm refuses to train on one row.
    with group_of(net, desc("input", 15, 5), devices=THREE, workload=[2, 4, 9]) as group:
        group.forward(draw(15, 5), is_train=True)
        params, buffers = group.get_params()
        assert list(params) == [name for name, _ in net.named_parameters()]
        assert list(buffers) == [name for name, _ in net.named_buffers()]
        assert buffers["1.num_batches_tracked"].dtype == torch.int64
        assert buffers["1.num_batches_tracked"].item() == 1
        for name, value in {**params, **buffers}.items():
            assert torch.equal(value, net.state_dict()[name])
            value.zero_()
        assert net[0].weight.abs().min() > 0
        own = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in params.items()}
        group.get_params(own, buffers)
        assert torch.equal(own["0.weight"], net[0].weight.detach().float())
        assert torch.equal(buffers["1.running_mean"], net[1].running_mean)


@pytest.mark.parametrize(("save_on", "load_on"), [(2, 2), (2, 1), (1, 2), (1, 1)])
def test_save_load_goes_on_alike_on_another_number_of_devices(save_on, load_on):
    nets = [Loss(), Loss(), Loss()]
    for net in nets[1:]:
        nn.init.zeros_(net.body.weight)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (nets[0], nets[1])]
    batches = [(draw(7, 5, seed=seed), classes(7, seed)) for seed in range(6)]

    def train(net, optimizer, devices, given):
        data, labels = [desc("data", 7, 5)], [labels_desc(7)]
        with DataParallelExecutorGroup(
            net, devices, data_shapes=data, label_shapes=labels
        ) as group:
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


# --- monitor --------------------------------------------------------------------------------------


def test_monitor_records_each_thing_once_on_one_device():
    counts = {"fc_0": 3, "act_0": 1, "fc_1": 3, "act_1": 1}
    net = nn.Sequential()
    for name in counts:
        layer = nn.Linear(2, 2) if name.startswith("fc") else nn.Sigmoid()
        net.add_module(name, layer.double())
    monitor = Monitor(1, sort=True)
    with group_of(net, desc("input", 7, 2), devices=["cpu"]) as group:
        group.install_monitor(monitor)
        monitor.tic()
        group.forward(draw(7, 2))
        group.backward([draw(7, 2, seed=1)])
        names = [name for _, name, _ in monitor.toc()]
    found = {key: sum(name.startswith(key) for name in names) for key in counts}
    assert found == counts


# --- executor_group (shared memory) ---------------------------------------------------------------


class Deep(nn.Module):
    """A stack whose first layers have the same names whatever its depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(depth)
        for index in range(depth):
            self.add_module(f"layer_{index}", nn.Linear(5, 5).double())

    def forward(self, data: Tensor) -> Tensor:
        for layer in self.children():
            data = torch.tanh(layer(data))
        return data


def test_a_group_that_shares_has_the_other_ones_memory():
    shallow, deep = Deep(2), Deep(3)
    with (
        group_of(deep, desc("data", 15, 5)) as first,
        group_of(shallow, desc("data", 7, 5), shared_group=first) as second,
    ):
        for name, parameter in shallow.named_parameters():
            assert parameter.data_ptr() == dict(deep.named_parameters())[name].data_ptr()
        second.forward(draw(7, 5))
        assert_close(second.get_outputs()[0], shallow(draw(7, 5)).detach(), F64)
        first.forward(draw(15, 5))
        assert_close(first.get_outputs()[0], deep(draw(15, 5)).detach(), F64)
        optimizer = torch.optim.SGD(deep.parameters(), lr=1.0)
        second.forward(draw(7, 5))
        second.backward([draw(7, 5, seed=1)])
        before = state_of(shallow)
        torch.optim.SGD(shallow.parameters(), lr=0.5).step()
        assert not torch.equal(before["layer_0.weight"], deep.layer_0.weight)
        assert torch.equal(shallow.layer_0.weight, deep.layer_0.weight)
        assert optimizer


# --- forward_reshape ------------------------------------------------------------------------------


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv_1 = nn.Conv2d(3, 4, 3)
        self.conv_2 = nn.Conv2d(3, 2, 2)
        self.fc = nn.Linear(6, 4)
        self.double()

    def forward(self, data_1: Tensor, data_2: Tensor, label: Tensor) -> Tensor:
        seen = [
            self.conv_1(data_1).tanh().mean((2, 3)),
            self.conv_2(data_2).tanh().mean((2, 3)),
        ]
        return F.cross_entropy(self.fc(torch.cat(seen, 1)), label)


def test_forward_reshapes_by_itself():
    net = Convolved()
    descs = [desc("data_1", 10, 3, 9, 9), desc("data_2", 10, 3, 8, 8)]
    with group_of(net, *descs, devices=TWO, label_shapes=[labels_desc(10)]) as group:
        for rows, side in [(10, 9), (3, 9), (20, 9), (20, 12), (5, 12), (10, 9)]:
            values = {
                "data_1": draw(rows, 3, side, side),
                "data_2": draw(rows, 3, side + 1, side - 1, seed=1),
            }
            twin = twin_of(net)
            for parameter in twin.parameters():
                parameter.grad = None
            expected = twin(**values, label=classes(rows))
            expected.backward()
            group.forward(DataBatch(values, classes(rows)))
            assert group.batch_size == rows
            assert_close(group.get_outputs()[0], expected.detach(), F64)
            group.backward()
            assert_close(gradients_of(net), gradients_of(twin), F64)


# --- forward_types --------------------------------------------------------------------------------

Batch = namedtuple("Batch", ["data", "label", "pad"], defaults=[None, 0])


def numpy_of(x: Tensor) -> Any:
    return x.numpy()


BATCHES = {
    "DataBatch": lambda a, b: DataBatch((a, b)),
    "DataBatch of names": lambda a, b: DataBatch({"b": b, "a": a}),
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"b": b, "a": a},
    "numpy": lambda a, b: (a.numpy(), b.numpy()),
    "dict of numpy": lambda a, b: {"a": a.numpy(), "b": b.numpy()},
    "named tuple of a batch": lambda a, b: Batch([a, b]),
}


class Both(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a.sum(1) - 2 * b


@pytest.mark.parametrize("form", BATCHES)
def test_forward_takes_batches_of_many_forms(form):
    a, b = draw(8, 3), draw(8, seed=1)
    with group_of(Both(), desc("a", 8, 3), desc("b", 8)) as group:
        group.forward(BATCHES[form](a, b))
        assert_close(group.get_outputs()[0], a.sum(1) - 2 * b, F64)


@pytest.mark.parametrize("form", [lambda x: x, numpy_of, lambda x: (x,), lambda x: [x]])
def test_forward_takes_the_one_input_alone(form):
    x = draw(7, 5)
    with group_of(Net(), desc("data", 7, 5)) as group:
        group.forward(form(x))
        assert_close(group.get_outputs()[0], Net()(x).detach(), F64)


# --- bucket_module_grad_req -----------------------------------------------------------------------


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


# --- bucketing_save_load, switch_bucket -----------------------------------------------------------


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
        group_of(net, desc("data", 9, 4, 3), shared_group=longest) as shorter,
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

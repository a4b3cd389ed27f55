"""Faults of fbcunn's and cunn's containers, each in the same situation here.

One test for each that `docs/migrating.md` lists and no other file tests already.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.compat import torch7
from phalanx.errors import ConfigError
from tests.contracts.containers import cpu_and_others, draw, stored
from tests.zoo import assert_close, gradients_of, twin_of

pytestmark = [pytest.mark.devices, pytest.mark.promise("torch7")]

F64 = torch.float64
THREE = cpu_and_others(3)
DEADLINE_S = 30
LR = 0.25


def net_of(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers).double()


def table(module: nn.Module, *options: bool) -> torch7.DataParallelTable:
    return torch7.DataParallelTable(0, *options).add(module, THREE)


# --- fbcunn ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("first", [False, True])
def test_the_first_device_may_be_any(first, gpu):
    devices = [gpu, "cpu"] if first else ["cpu", gpu]
    x, g, twin = draw(7, 4), draw(7, 3, seed=1), net_of(4, 3)
    leaf = x.clone().requires_grad_()
    twin(leaf).backward(g)
    with torch7.DataParallelTable(0).add(net_of(4, 3), devices) as net:
        assert_close(net.forward(x).cpu(), twin(x).detach(), F64)
        assert_close(net.backward(x, g), leaf.grad, F64)
        assert_close([p.grad.cpu() for p in net.parameters()], gradients_of(twin), F64)


@pytest.mark.parametrize("way", [lambda net: net.clone(), stored])
def test_columns_keep_their_devices_when_stored(way):
    made = torch7.ModelParallel(1).add(net_of(4, 2), "cpu").add(net_of(4, 3), "cpu")
    x, g = draw(5, 4), draw(5, 5)
    expected = made.forward(x)
    gradient = made.backward(x, g)
    other = way(made.float()).double()
    assert other.devices == made.devices
    assert other.gradInput.numel() == 0
    made.double()
    assert_close(other.forward(x), made.forward(x), F64)
    assert_close(other.backward(x, g), made.backward(x, g), F64)
    assert (expected - other.output).abs().max() < 1e-6  # weights have been float32 meanwhile
    assert (gradient - other.gradInput).abs().max() < 1e-6
    made.close()
    other.close()


@pytest.mark.gpu
def test_what_is_written_into_a_flat_tensor_reaches_other_devices(gpu):
    with torch7.DataParallelTable(0, True).add(net_of(4, 3), [gpu, "cpu"]) as net:
        assert {parameter.device.type for parameter in net.parameters()} == {gpu.type}
        values, _ = net.getParameters()
        assert net.forward(draw(6, 4)).any()
        values.zero_()
        assert not net.forward(draw(6, 4)).any()


@pytest.mark.parametrize("make", [torch7.DataParallel, torch7.DataParallelTable])
def test_columns_that_differ_are_refused_and_not_dropped(make):
    first, other = net_of(4, 3), net_of(4, 3)
    with torch.no_grad():
        other[0].bias[2] += 1
    made = make(0).add(first, "cpu")
    with pytest.raises(ConfigError, match=r"equal to the first column.*other values"):
        made.add(other, "cpu")
    for layer in (nn.ReLU(), net_of(4, 2), nn.Sequential(first[0], nn.Tanh())):
        with pytest.raises(ConfigError, match=r"equal to the first column.*has other layers"):
            made.add(layer, "cpu")
    kinds = [nn.Module(), nn.Module()]
    kinds[1].register_parameter("other", nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match="has other layers"):
        make(0).add(kinds[0], "cpu").add(kinds[1], "cpu")
    assert len(made.devices) == 1
    assert len(made.add(net_of(4, 3), "cpu").devices) == 2


# --- cunn -----------------------------------------------------------------------------------------


def norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def test_a_small_device_may_take_a_small_share_and_no_outputs():
    net, seen = net_of(4, 3), []
    net.register_forward_hook(lambda _, args, output: seen.append(len(output)))
    x = draw(10, 4)
    options = {"workloads": [1, 4], "output": "per_replica"}
    with phalanx.DataParallel(net, ["cpu", "cpu"], **options) as model:
        parts = model(x)
        assert sorted(seen) == [2, 8]
        assert [len(part) for part in parts] == [2, 8]
        assert_close(torch.cat(parts), twin_of(net)(x), F64)


@pytest.mark.parametrize("flatten", [False, True])
def test_gradients_are_right_when_only_the_flat_tensor_was_zeroed(flatten):
    twin = net_of(4, 5, 3)
    with table(net_of(4, 5, 3), flatten) as net:
        _, grads = net.getParameters()
        for seed in range(3):
            x, g = draw(7, 4, seed=seed), draw(7, 3, seed=seed + 5)
            twin.zero_grad()
            twin(x).backward(g)
            grads.zero_()
            net.forward(x)
            net.backward(x, g)
            assert_close(grads, torch.cat([p.grad.flatten() for p in twin.parameters()]), F64)


def test_flat_tensors_of_a_model_and_of_a_part_stay_right_in_either_order():
    for inner_first in (True, False):
        net = nn.Sequential(nn.Linear(10, 10).to(THREE[0]), table(nn.Linear(10, 5), True))
        outer = torch7.Explicit(net)
        if inner_first:
            net[1].getParameters()
        values, grads = outer.getParameters()
        inner, inner_grads = net[1].getParameters()
        assert (values.numel(), inner.numel()) == (165, 55)
        x, g = torch.ones(4, 10, device=THREE[0]), torch.ones(4, 5)
        outer.forward(x)  # flattening again here would take the part out of the whole
        outer.backward(x, g)
        assert torch.equal(inner_grads, grads[110:])
        assert inner_grads[50:].eq(4.0).all()
        values.fill_(0.5)
        assert inner.eq(0.5).all()
        assert outer.forward(x).eq(0.5 + 10 * 0.5 * 5.5).all()
        net[1].close()


def test_a_container_may_be_handed_to_another_thread():
    with table(net_of(4, 3)) as net:
        x, g = draw(5, 4), draw(5, 3)
        expected = net.forward(x)
        got = []

        def work(own):
            got.append((own.forward(x), own.backward(x, g)))
            own.close()

        for own in (net, pickle.loads(pickle.dumps(net))):
            thread = threading.Thread(target=work, args=(own,))
            thread.start()
            thread.join(DEADLINE_S)
        assert len(got) == 2
        assert all(torch.equal(output, expected) for output, _ in got)
        assert torch.equal(got[0][1], got[1][1])


def test_leaves_of_different_batch_sizes_are_refused_by_name():
    with (
        table(nn.Identity()) as net,
        pytest.raises(ConfigError, match=r"`0\.scale` must have 5 rows"),
    ):
        net.forward({"x": draw(5, 4), "scale": draw(4, 1)})


class Doubled(nn.Module):
    """Two rows of output for each of input, so that a count of inputs does not cut gradOutput."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).repeat_interleave(2, 0) * draw(2, 1, device=x.device).repeat(
            len(x), 1
        )


def test_output_gradients_are_cut_where_outputs_were_joined():
    net = Doubled()
    twin = twin_of(net)
    x, g = draw(5, 4), draw(10, 3, seed=1)
    leaf = x.clone().requires_grad_()
    twin(leaf).backward(g)
    with table(net) as made:
        assert_close(made.forward(x), twin(x).detach(), F64)
        assert_close(made.backward(x, g), leaf.grad, F64)
        assert_close(gradients_of(net), gradients_of(twin), F64)


def test_a_clone_of_a_gpu_is_a_gpu_and_a_gpu_may_hold_another():
    net = torch7.GPU(norm_net(), "cpu")
    x = draw(5, 4)
    net.evaluate()
    net.get(0)[1].running_mean.fill_(0.5)
    expected = net.forward(x)
    assert net.output is expected
    assert net.get(0)[1].running_mean.eq(0.5).all()
    clone = net.clone()
    assert type(clone) is torch7.GPU
    assert torch.equal(clone.forward(x), expected)
    around = torch7.GPU(net, "cpu")
    assert torch.equal(around.forward(x), expected)


def test_pinning_a_module_keeps_what_is_shared_or_flat():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    torch7.Explicit(inner).getParameters()
    values, grads = torch7.GPU(inner, "cpu").getParameters()
    assert values.numel() == grads.numel() == 24
    assert inner[1].weight is inner[0].weight
    values.fill_(2.0)
    assert inner[1].weight.eq(2).all()
    assert inner[1].bias.eq(2).all()


# --- other faults that reading the originals showed -----------------------------------------------


def test_a_tensor_is_sent_to_the_destination_from_the_source():
    dest, source = torch.zeros(3, 4).T, torch.arange(12.0).reshape(4, 3)
    assert torch7.ModelParallel(0).gpuSend(dest, source) is dest
    source.add_(1)
    assert torch.equal(dest, torch.arange(12.0).reshape(4, 3))
    with pytest.raises(ConfigError, match=r"`dest` must have the shape of `source`"):
        torch7.ModelParallel(0).gpuSend(dest, source.T)


def test_a_gpu_that_is_not_there_is_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = torch7.GPU(net_of(4, 3), 99)
        net.forward(draw(5, 4))
        net.backward(draw(5, 4), draw(5, 3))
    assert ["no such device" in str(warning.message) for warning in caught] == [True]

"""Faults of fbcunn's and cunn's containers, each in the same situation here.

One test for each that `docs/migrating.md` lists and no other file tests already.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.codecs import OneBit
from phalanx.compat import torch7
from phalanx.errors import ConfigError, UnsupportedError
from tests.conformance.containers import cpu_and_others, draw, stored
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


def test_columns_on_one_device_keep_their_own_inputs():
    columns = [net_of(4, 3) for _ in range(3)]
    with torch7.DataParallel(0) as net:
        for column in columns:
            net.add(column, "cpu")
        x, g, twin = draw(7, 4), draw(7, 3, seed=1), net_of(4, 3)
        leaf = x.clone().requires_grad_()
        twin(leaf).backward(g)
        assert_close(net.forward(x), twin(x).detach(), F64)
        assert_close(net.backward(x, g), leaf.grad, F64)
        assert_close(gradients_of(net), gradients_of(twin), F64)


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


@pytest.mark.parametrize("make", [torch7.DataParallel, torch7.DataParallelTable])
def test_inputs_are_cut_along_the_dim_that_was_asked_for(make):
    net = nn.Conv1d(1, 2, 1).double()  # [4, rows 5, 3] with the rows second, for a module of rows
    seen = []

    class RowsSecond(nn.Module):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return (
                net(x.transpose(0, 1).reshape(-1, 1, 3)).reshape(x.shape[1], 4, -1).transpose(0, 1)
            )

    whole = RowsSecond()
    with make(1) as made:
        for _ in range(2):
            made.add(whole, "cpu")
        x = draw(4, 5, 3)
        assert_close(made.forward(x), whole(x).detach(), F64)
    assert sorted(seen) == [(4, 2, 3), (4, 3, 3), (4, 5, 3)]


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


class Halves(nn.Module):
    """A table in, a table out."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 3).double()

    def forward(self, table):
        h = self.linear(table["x"]) * table["scale"]
        return {"sum": h, "parts": [h[:, :1], h[:, 1:]]}


@pytest.mark.parametrize("kind", ["data", "model"])
def test_tables_go_through_both_kinds_of_container(kind):
    columns = [Halves(0), Halves(1)]
    if kind == "data":
        made = torch7.DataParallelTable(0).add(columns[0], THREE)
    else:
        made = torch7.ModelParallel(1).add(columns[0], "cpu").add(columns[1], "cpu")
    twins = [copy.deepcopy(column).cpu() for column in columns]
    inputs = {"x": draw(5, 4), "scale": draw(5, 1, seed=1)}
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in inputs.items()}
    if kind == "data":
        expected = twins[0](leaves)
    else:
        a, b = (twin(leaves) for twin in twins)
        expected = {
            "sum": torch.cat([a["sum"], b["sum"]], 1),
            "parts": [torch.cat(pair, 1) for pair in zip(a["parts"], b["parts"], strict=True)],
        }
    g = {
        "sum": draw(*expected["sum"].shape, seed=2),
        "parts": [torch.ones_like(p) for p in expected["parts"]],
    }
    torch.autograd.backward([expected["sum"], *expected["parts"]], [g["sum"], *g["parts"]])
    with made:
        outputs = made.forward(inputs)
        assert_close(outputs["sum"], expected["sum"].detach(), F64)
        assert_close(outputs["parts"][1], expected["parts"][1].detach(), F64)
        gradient = made.backward(inputs, g)
        for key, leaf in leaves.items():
            assert_close(gradient[key], leaf.grad, F64)
    assert_close(gradients_of(columns[0]), gradients_of(twins[0]), F64)


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


def test_options_of_a_codec_are_taken_or_refused():
    with pytest.raises(TypeError, match="adagrad_learning_rate"):
        OneBit(adagrad_learning_rate=0.1)
    assert OneBit(min_elements=7).min_elements == 7


# --- cunn -----------------------------------------------------------------------------------------


def norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def test_batch_norms_do_not_drift_apart():
    with table(norm_net()) as net, net.clone() as other:
        for seed in range(4):
            x = 3 * draw(9, 4, seed=seed) + seed
            net.zeroGradParameters()
            net.forward(x)
            net.backward(x, draw(9, 3))
            net.updateParameters(LR / 10)
        mean = net.get(0)[1].running_mean
        assert mean.abs().max() > 0.1
        x = draw(9, 4, seed=9)
        single = twin_of(net.get(0)).cpu().eval()
        assert_close(net.evaluate().forward(x), single(x).detach(), F64)
        with net.clone() as copied:
            assert torch.equal(copied.forward(x), net.output)
        other.load_state_dict(net.state_dict())
        assert torch.equal(other.evaluate().forward(x), net.output)


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


def test_apply_takes_any_callback_and_changes_reach_replicas():
    lock, count = threading.Lock(), []  # neither can be serialised

    def freeze(module):
        with lock:
            count.append(module)
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    x = torch.ones(5, 4)
    with table(nn.Sequential(nn.Dropout(1.0), nn.Linear(4, 3))) as net:
        before = net.forward(x)
        net.apply(freeze)
        assert len(count) == 4
        assert not torch.equal(net.forward(x), before)
        assert_close(net.output, net.get(0).cpu()(x).detach(), torch.float32)


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


def test_siamese_nets_share_parameters():
    first = table(net_of(4, 3))
    second = first.clone("weight", "bias", "gradWeight", "gradBias")
    twin = net_of(4, 3)
    left, right, g = draw(5, 4), draw(5, 4, seed=1), draw(5, 3, seed=2)
    first.zeroGradParameters()
    for net, x in ((first, left), (second, right)):
        net.forward(x)
        net.backward(x, g)
        twin(x).backward(g)
    assert_close(gradients_of(first), gradients_of(twin), F64)
    first.updateParameters(LR)
    torch.optim.SGD(twin.parameters(), lr=LR).step()
    for net in (first, second):
        assert_close(net.forward(right), twin(right).detach(), F64)
        net.close()


def test_sharing_inside_a_replica_stays():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    net[2].weight = net[0].weight
    twin = twin_of(net)
    with table(net, True) as made:
        assert made.getParameters()[0].numel() == 16 + 4 + 4
        for seed in range(3):
            x, g = draw(5, 4, seed=seed), draw(5, 4, seed=seed + 5)
            for each, out in ((made, made.forward(x)), (twin, twin(x))):
                each.zero_grad()
                made.backward(x, g) if each is made else out.backward(g)
            made.updateParameters(LR)
            torch.optim.SGD(twin.parameters(), lr=LR).step()
        assert net[2].weight is net[0].weight
        assert_close(made.forward(x), twin(x).detach(), F64)


def test_any_conversion_works_after_replicas_were_made():
    net = net_of(4, 3)
    x = draw(5, 4)
    with table(net, True) as made:
        expected = made.forward(x)
        for convert in (
            lambda: made.type("torch.FloatTensor"),
            lambda: made.float(),
            lambda: made.cpu(),
            lambda: made.type("torch.DoubleTensor"),
        ):
            convert()
            own = x.to(net[0].weight.dtype)
            assert made.forward(own).dtype == own.dtype
            assert (made.output - expected).abs().max() < 1e-6


@pytest.mark.parametrize("flatten", [False, True])
def test_half_layers_and_float_norms_train_together(flatten):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[0].register_forward_hook(lambda _, args, output: output.float())
    with table(net, flatten) as made:
        x = torch.randn(9, 4).bfloat16()
        before = [parameter.clone() for parameter in net.parameters()]
        made.zeroGradParameters()
        made.forward(x)
        made.backward(x, torch.randn(9, 2))
        made.updateParameters(LR)
        assert [parameter.dtype for parameter in net.parameters()] == [p.dtype for p in before]
        changed = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
        assert all(changed[2:])
        assert changed[0]
        with pytest.raises(
            UnsupportedError, match=r"torch\.bfloat16 on (\S+), torch\.float32 on \1"
        ):
            made.getParameters()


class Reader(nn.Module):
    """An LSTM over packed sequences of different lengths; states have their rows second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 3, num_layers=2).double()

    def forward(self, steps, lengths, states):
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths.cpu(), enforce_sorted=False)
        out, (h, c) = self.lstm(packed, states)
        out, _ = nn.utils.rnn.pad_packed_sequence(out, total_length=steps.shape[0])
        return {"out": out, "states": (h, c)}


def test_sequences_of_different_lengths_and_states_are_cut_where_their_rows_are():
    net = Reader()
    twin = twin_of(net)
    steps, lengths = draw(6, 5, 4), torch.tensor([2, 6, 1, 4, 3])
    states = (draw(2, 5, 3, seed=1), draw(2, 5, 3, seed=2))
    layout = phalanx.Layout(1, dims={"lengths": 0})
    with phalanx.DataParallel(net, THREE, layout=layout) as model:
        got, expected = (each(steps, lengths, states) for each in (model, twin))
        for outputs in (got, expected):
            (outputs["out"].square().sum() + outputs["states"][0].sum()).backward()
        assert_close(got["out"], expected["out"], F64)
        assert_close(got["states"], expected["states"], F64)
        assert_close(gradients_of(net), gradients_of(twin), F64)


def test_leaves_of_different_batch_sizes_are_refused_by_name():
    with table(Halves(0)) as net, pytest.raises(ConfigError, match=r"`0\.scale` must have 5 rows"):
        net.forward({"x": draw(5, 4), "scale": draw(4, 1)})


def test_two_containers_work_at_once_without_disturbing_each_other():
    nets = [table(net_of(4, 3)), table(net_of(4, 3))]
    sizes, wrong = (5, 8), []
    start = threading.Barrier(2, timeout=DEADLINE_S)

    def work(net: torch7.DataParallelTable, rows: int) -> None:
        start.wait()
        for seed in range(20):
            x, g = draw(rows, 4, seed=seed), draw(rows, 3, seed=seed)
            weight, bias = (each.cpu() for each in net.get(0)[0].parameters())
            expected = F.linear(x, weight, bias)
            output, gradient = net.forward(x), net.backward(x, g)
            if output.shape != (rows, 3) or gradient.shape != (rows, 4):
                wrong.append((rows, seed))
            if not torch.allclose(output.cpu(), expected):
                wrong.append((rows, seed))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(nets, sizes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    for net in nets:
        net.close()
    assert wrong == []


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


def test_the_gradient_is_the_sum_over_columns_whoever_asks():
    x, g = draw(7, 4), torch.ones(7, 3, dtype=F64)
    expected = x.sum(0).expand(3, 4)
    for made in (
        table(net_of(4, 3)),
        table(net_of(4, 3), True),
        torch7.DataParallel(0).add(net_of(4, 3), "cpu").add(net_of(4, 3), "cpu"),
    ):
        with made:
            made.forward(x)
            made.accGradParameters(x, g)
            assert_close(made.get(0)[0].weight.grad, expected, F64)


def test_replicas_are_equal_after_reset():
    with table(net_of(4, 3)) as made:
        made.forward(draw(3, 4))
        made.reset()
        row = draw(1, 4).expand(3, 4)
        output = made.forward(row)
        assert torch.equal(output[0], output[1])
        assert torch.equal(output[0], output[2])
        assert_close(output, made.get(0).cpu()(row).detach(), F64)


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
    assert caught[0].filename == __file__

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn

from phalanx.errors import ConfigError, StateError
from phalanx.parallel import ModelParallel
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.on_device import OnDevice
from tests.columns import columns_of_layer, layer_of_columns

MEETING_S = 30.0


def columns_of(columns, dim: int = 1) -> ModelParallel:
    container = ModelParallel(dim)
    for column in columns:
        container.add(column, "cpu")
    return container


def errors(left, right) -> float:
    """Return the largest absolute difference between two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def train(net: nn.Module, batches, momentum: float = 0.9) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()


def batches_of(num_rows: int, num: int = 4):
    return [(torch.randn(num_rows, 3), torch.randn(num_rows, 5)) for _ in range(num)]


class TestSplitConvolution:
    @pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
    @pytest.mark.parametrize("parts", [4, [1, 40, 16, 7]])
    def test_columns_equal_the_unsplit_layer(self, parts, dtype, bound):
        """The case that fbcunn's own test of ModelParallel prepared, but never ran."""
        conv = nn.Conv2d(3, 64, 11, dtype=dtype)
        x = torch.randn(5, 3, 17, 17, dtype=dtype, requires_grad=True)
        own = x.detach().clone().requires_grad_()
        columns = columns_of_layer(conv, parts)
        with columns_of(columns) as model:
            expected, output = conv(x), model(own)
            grad = torch.randn_like(expected) / expected[0].numel()
            expected.backward(grad)
            output.backward(grad)
        assert errors([output], [expected]) < bound
        assert errors([own.grad], [x.grad]) < bound
        for key in ("weight", "bias"):
            gradient = torch.cat([getattr(column, key).grad for column in columns])
            assert errors([gradient], [getattr(conv, key).grad]) < bound
        for net in (conv, model):
            torch.optim.SGD(net.parameters(), lr=0.1).step()
        back = layer_of_columns(model.children())
        assert errors(back.parameters(), conv.parameters()) < bound

    def test_trained_columns_come_back_as_the_twins_layer(self):
        twin = nn.Linear(3, 5)
        batches = batches_of(7)
        with columns_of(columns_of_layer(twin, 3), -1) as model:
            train(model, batches)
        train(twin, batches)
        assert errors(layer_of_columns(model.children()).parameters(), twin.parameters()) < 1e-6


class TestNested:
    def test_replicas_of_a_model_with_columns(self):
        twin = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))
        net = copy.deepcopy(twin)
        net[0] = columns_of(columns_of_layer(net[0], [4, 1, 2]), -1)
        batches = batches_of(7)
        with DataParallel(net, ["cpu"] * 3) as model:
            train(model, batches)
        train(twin, batches)
        assert errors(net.parameters(), unmerged(twin)) < 1e-6

    @pytest.mark.parametrize("wrap", ["the column", "inside the column"])
    def test_columns_of_replicas(self, wrap):
        twin = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))
        net = copy.deepcopy(twin)

        def replicated(column):
            replicas = DataParallel(column, ["cpu"] * 2)
            return replicas if wrap == "the column" else nn.Sequential(replicas, nn.Identity())

        columns = columns_of_layer(net[0], [4, 1, 2])
        with columns_of(map(replicated, columns), -1) as first:
            net[0] = first
            batches = batches_of(7)
            train(net, batches)
        train(twin, batches)
        assert errors(net.parameters(), unmerged(twin)) < 1e-6

    def test_columns_of_columns_and_pinned_ones(self):
        twin = nn.Linear(3, 5)
        left, right = columns_of_layer(twin, 2)
        with columns_of(columns_of_layer(left, 2), -1) as inner:
            batches = batches_of(3)
            with columns_of([inner, OnDevice(right, "cpu")], -1) as model:
                train(model, batches)
        train(twin, batches)
        values = [torch.cat(list(found)) for found in zip(*(pairs(model)), strict=True)]
        assert errors(values, twin.parameters()) < 1e-6


def unmerged(twin: nn.Sequential) -> list[torch.Tensor]:
    """Return the twin's parameters, those of its first layer cut as the columns' are."""
    first = [p for column in columns_of_layer(twin[0], [4, 1, 2]) for p in column.parameters()]
    return [*first, *twin[2].parameters()]


def pairs(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = list(model.parameters())
    return list(zip(found[::2], found[1::2], strict=True))


class TestRules:
    def test_columns_run_at_the_same_time(self):
        meeting = threading.Barrier(3, timeout=MEETING_S)

        class Waits(nn.Identity):
            def forward(self, x):
                meeting.wait()
                return x

            def __deepcopy__(self, memo):
                return Waits()

        with columns_of([Waits() for _ in range(3)]) as model:
            assert model(torch.ones(2, 1)).shape == (2, 3)

    @pytest.mark.parametrize("dim", [0, 1, -1, 2, -3])
    def test_outputs_are_concatenated_along_the_dim(self, dim):
        x = torch.randn(2, 3, 4)
        with columns_of([nn.Identity(), nn.Tanh(), nn.ReLU()], dim) as model:
            assert torch.equal(model(x), torch.cat([x, x.tanh(), x.relu()], dim))

    def test_tables_go_in_and_come_out(self):
        class Table(nn.Module):
            def __init__(self, size):
                super().__init__()
                self.linear = nn.Linear(3, size)

            def forward(self, inputs, *, scale):
                left, right = inputs["pair"]
                total = self.linear(left + right) * scale
                return {"sum": total, "both": [left, (right, "kept")], "nothing": None}

        columns = [Table(size) for size in (2, 1, 4)]
        left, right = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
        with columns_of(columns) as model:
            output = model({"pair": (left, right)}, scale=2.0)
            (gradient,) = torch.autograd.grad(output["sum"].sum(), left)
        expected = torch.cat([column.linear(left + right) * 2.0 for column in columns], 1)
        torch.testing.assert_close(output["sum"], expected)
        assert torch.equal(output["both"][0], torch.cat([left] * 3, 1))
        assert torch.equal(output["both"][1][0], torch.cat([right] * 3, 1))
        assert output["both"][1][1] == "kept"
        assert output["nothing"] is None
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), left)[0])

    def test_several_inputs_go_whole_to_every_column(self):
        bilinear = nn.Bilinear(2, 3, 4)
        left, right = torch.randn(5, 2), torch.randn(5, 3)
        with columns_of([bilinear, copy.deepcopy(bilinear)], -1) as model:
            expected = bilinear(left, right)
            torch.testing.assert_close(model(left, right), torch.cat([expected, expected], -1))

    def test_outputs_that_cannot_be_concatenated_are_shown(self):
        with (
            columns_of([nn.Linear(3, 2), nn.Linear(3, 4)], 0) as model,
            pytest.raises(ConfigError, match=r"\(5, 2\).*\(5, 4\)"),
        ):
            model(torch.ones(5, 3))

    def test_it_needs_a_column(self):
        with pytest.raises(StateError, match=r"`ModelParallel` needs at least one column"):
            ModelParallel(0)(torch.ones(1))


class TestContainer:
    def test_it_shows_columns_and_devices(self):
        one = columns_of([nn.Linear(3, 2)])
        assert repr(one) == (
            "ModelParallel(\n"
            "  1 column on cpu, dim=1\n"
            "  (0): Linear(in_features=3, out_features=2, bias=True)\n"
            ")"
        )
        assert "3 columns on cpu×3, dim=-1" in repr(columns_of([nn.Tanh()] * 3, -1))
        assert "0 columns, dim=0" in repr(ModelParallel(0))

    def test_each_columns_device_is_shown_where_they_differ(self):
        model = columns_of([nn.Linear(3, 2), nn.Linear(3, 2), nn.Tanh()])
        model.get(1).to("meta")
        assert "3 columns on cpu, meta, cpu, dim=1" in repr(model)

    def test_state_is_saved_and_loaded(self):
        layer = nn.Linear(3, 5)
        with columns_of(columns_of_layer(layer, 2), -1) as model:
            assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            with columns_of(columns_of_layer(nn.Linear(3, 5), 2), -1) as other:
                other.load_state_dict(torch.load(file))
                x = torch.randn(4, 3)
                assert torch.equal(other(x), model(x))

    def test_columns_keep_what_the_others_do_to_the_gradients_apart(self):
        """A frozen column, and two columns that are one: gradients as in plain PyTorch."""
        frozen, twice = nn.Linear(3, 2).requires_grad_(False), nn.Linear(3, 2)
        x = torch.randn(4, 3)
        with columns_of([frozen, twice, twice]) as model:
            model(x).square().sum().backward()
        assert frozen.weight.grad is None
        (expected,) = torch.autograd.grad(2 * twice(x).square().sum(), twice.weight)
        torch.testing.assert_close(twice.weight.grad, expected)

    @pytest.mark.gpu
    def test_columns_on_the_gpu_and_the_cpu(self, gpu):
        layer = nn.Linear(3, 5)
        left, right = columns_of_layer(layer, 2)
        x = torch.randn(4, 3, requires_grad=True)
        with ModelParallel(-1).add(left, gpu).add(right, "cpu") as model:
            output = model(x)
            output.square().sum().backward()
        assert output.device == gpu
        gradient, x.grad = x.grad, None
        layer(x).square().sum().backward()
        torch.testing.assert_close(gradient, x.grad, rtol=1e-3, atol=1e-3)
        back = torch.cat([left.weight.grad.cpu(), right.weight.grad])
        torch.testing.assert_close(back, layer.weight.grad, rtol=1e-3, atol=1e-3)

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from phalanx.parallel import ModelParallel
from tests.columns import columns_of_layer

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


class TestRules:
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


class TestContainer:
    def test_it_shows_columns_and_devices(self):
        one = columns_of([nn.Linear(3, 2)])
        assert repr(one) == (
            "ModelParallel(\n"
            "  devices=[cpu], dim=1\n"
            "  (0): Linear(in_features=3, out_features=2, bias=True)\n"
            ")"
        )
        assert "devices=[cpu, cpu], dim=-1" in repr(columns_of([nn.Tanh()] * 2, -1))

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

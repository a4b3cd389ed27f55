"""What users of `DataParallel` decide over: layouts, outputs, buffers, hooks, parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import DataParallel, Layout
from phalanx.errors import ConfigError
from tests.contracts.containers import (
    Scale,
    Weighed,
    assert_equal_pass,
    draw,
    fresh,
    loss_of,
    parallel,
    places,
)
from tests.zoo import (
    assert_close,
    assert_same_bits,
    gradients_of,
    mlp,
    twin_of,
)

pytestmark = pytest.mark.promise("containers")

F64 = torch.float64
UNEQUAL = [1, 5, 9]


# --- layouts --------------------------------------------------------------------------------------


def test_a_batch_axis_of_1_is_cut_there(device: torch.device) -> None:
    """(3, 8, 7) with batch axis 1 on two devices is (3, 4, 7) on each."""
    net = Scale(2.0).to(device)
    x = draw(3, 8, 7, device=device)
    with parallel(net, device, 2, layout=Layout(dim=1), output="per_replica") as model:
        assert [tuple(part.shape) for part in model(x)] == [(3, 4, 7), (3, 4, 7)]
        assert_close(torch.cat([part.to(device) for part in model(x)], 1), x * 2, F64)
        assert_equal_pass(model, Halves(net), x)
    with parallel(net, device, 3, layout=Layout(dim=1)) as model:
        assert model(x).shape == (3, 8, 7)
        assert_equal_pass(model, twin_of(net), x)
    with parallel(net, device, 3, layout=Layout(dim=-2)) as model:
        assert_equal_pass(model, twin_of(net), x)


class Halves(nn.Module):
    """Leaves its two pieces along dim 1 apart, each where its replica has it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = copy.deepcopy(inner)

    def forward(self, x: Tensor) -> list[Tensor]:
        homes = places(x.device, 2)
        return [self.inner(p).to(home) for p, home in zip(x.chunk(2, 1), homes, strict=True)]


@pytest.mark.parametrize(
    ("path", "by_name"), [(1, False), ("1", False), ("weights", False), ("weights", True)]
)
def test_a_leaf_given_whole_gets_the_sum_of_the_replicas_gradients(
    path: int | str, by_name: bool, device: torch.device
) -> None:
    net = Weighed().double().to(device)
    x, weights = draw(8, 7, device=device), draw(7, device=device)
    with parallel(net, device, layout=Layout(dims={path: None})) as model:
        if by_name:
            assert_equal_pass(model, twin_of(net), x, weights=weights)
        else:
            assert_equal_pass(model, twin_of(net), x, weights)


def test_a_path_covers_what_is_below_it_and_yields_to_a_longer_one(device: torch.device) -> None:
    seen: list[list[tuple[int, ...]]] = []

    class Nested(nn.Module):
        def forward(self, x: Tensor, items: Mapping[str, Any]) -> Tensor:
            left, right = items["pair"]
            seen.append([tuple(leaf.shape) for leaf in (left, right, items["far"]["x"])])
            return x * left.sum() + right.sum(0, keepdim=True).T + items["far"]["x"].sum()

    items = {
        "pair": [draw(2, 2, device=device), draw(4, 7, device=device)],
        "far": {"x": draw(5, device=device)},
    }
    layout = Layout(dims={"items": None, "items.pair.1": 1})
    with parallel(Nested(), device, layout=layout) as model:
        assert_equal_pass(model, Nested(), draw(7, 1, device=device), items)
    each = sorted(seen[:3])
    assert each == [[(2, 2), (4, 2), (5,)]] * 2 + [[(2, 2), (4, 3), (5,)]]


# --- outputs --------------------------------------------------------------------------------------


class Many(nn.Module):
    """Returns leaves of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {
            "rows": y,
            "turned": y.T,
            "loss": y.square().mean(),
            "count": torch.tensor(len(x)),
            "aux": [y.sum(0), {"word": "same", "number": len(x)}],
        }


OUTPUT: dict[str | int, str] = {
    "turned": "cat(1)",
    "loss": "mean",
    "count": "sum",
    "aux": "first",
    "aux.0": "sum",
}


@pytest.mark.parametrize("sizes", [UNEQUAL, [9, 0, 6], [0, 15, 0]], ids=str)
def test_every_leaf_is_merged_by_its_rule(sizes: list[int], device: torch.device) -> None:
    net = Many().double().to(device)
    x = draw(15, 4, device=device)
    with parallel(net, device, output=OUTPUT, workloads=sizes) as model:
        got = model(x)
        loss_of([got["rows"], got["turned"], got["loss"], got["aux"][0]]).backward()
        gradients = gradients_of(net)
    twin = twin_of(net)
    expected = twin(x)
    loss_of([expected["rows"], expected["turned"], expected["loss"], expected["aux"][0]]).backward()
    assert got["count"].item() == 15
    for key in ("rows", "turned", "loss"):
        assert_close(got[key], expected[key], F64)
    assert_close(got["aux"][0], expected["aux"][0], F64)
    assert got["aux"][1] == {"word": "same", "number": next(filter(None, sizes))}
    assert_close(gradients, gradients_of(twin), F64)


def test_states_by_layer_are_not_joined_along_the_layers(device: torch.device) -> None:
    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(3, 5, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x)  # type: ignore[no-any-return]

    net, x = States().to(device), draw(6, 7, 3, device=device).float()
    refusal = pytest.raises(ConfigError, match=r"Output `1` .* its slice's \d")
    with DataParallel(net, places(device, 2)) as model, refusal:
        model(x)
    with DataParallel(net, places(device, 2), output={"1": "cat(1)"}) as model:
        for found, expected in zip(model(x), net(x), strict=True):
            torch.testing.assert_close(found, expected)


def test_without_rules_scalars_become_one_per_replica_in_use(device: torch.device) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, str]:
            return x * 2, x.sum(), f"{len(x)} rows"

    x = fresh(draw(2, 3, device=device))
    with parallel(Loss(), device) as model:
        rows, sums, word = model(x)
        (rows.sum() + (sums * torch.tensor([1.0, 10.0], device=device)).sum()).backward()
    assert torch.equal(rows, x * 2)
    assert_close(sums, x.sum(1), F64)
    assert word == "1 rows"
    assert x.grad.tolist() == [[3.0] * 3, [12.0] * 3]


def test_stacked_and_left_apart(device: torch.device) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.mean(0), x * 1

    x = fresh(draw(8, 3, device=device))
    with parallel(Mean(), device, output={0: "stack", 1: "per_replica"}) as model:
        means, parts = model(x)
        (means.sum() + sum(part.to(device).sum() for part in parts)).backward()
    pieces = x.detach().split([3, 3, 2])
    assert_close(means, torch.stack([piece.mean(0) for piece in pieces]), F64)
    assert_same_bits([part.cpu() for part in parts], [piece.cpu() for piece in pieces])
    shares = torch.tensor([1 + 1 / 3] * 6 + [1.5] * 2, dtype=F64, device=device)
    assert_close(x.grad, shares[:, None].expand(8, 3), F64)


# --- buffers --------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Keeps a moving mean, a total and a counter; in place or by assignment."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.full((4,), 2.0, dtype=F64))
        self.register_buffer("total", torch.ones(4, dtype=F64))
        self.register_buffer("rows", torch.tensor(10))
        self.register_buffer("idle", torch.ones(2, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        mean, total = self.mean / 2 + x.detach().mean(0), self.total + x.detach().sum(0)
        rows = self.rows + len(x)
        if self.in_place:
            self.mean.copy_(mean)
            self.total.copy_(total)
            self.rows.copy_(rows)
        else:
            self.mean, self.total, self.rows = mean, total, rows
        return x * 2


def by_hand(rule: str, name: str, pieces: list[Tensor]) -> Tensor:
    """Compute what a buffer becomes out of what each replica would make of it alone."""
    start = {"mean": 2.0, "total": 1.0, "rows": 10}[name]
    after = {
        "mean": [start / 2 + piece.mean(0) for piece in pieces],
        "total": [start + piece.sum(0) for piece in pieces],
        "rows": [torch.tensor(start + len(piece)) for piece in pieces],
    }[name]
    if rule == "first" or name == "rows":
        return after[0]
    rows = sum(len(piece) for piece in pieces)
    return sum(
        (each * (len(piece) / rows) for each, piece in zip(after, pieces, strict=True)),
        torch.zeros(4, dtype=F64),
    )


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "assigned"])
@pytest.mark.parametrize("sizes", [UNEQUAL, [6, 0, 9]], ids=str)
@pytest.mark.parametrize("rule", ["mean", "first"])
def test_buffers_become_what_their_rule_says(
    rule: str, sizes: list[int], in_place: bool, device: torch.device
) -> None:
    net = nn.Sequential(Counts(in_place)).to(device)
    x = draw(15, 4, device=device)
    with parallel(net, device, buffers=rule, workloads=sizes) as model:
        model(x)
    pieces = [piece.cpu() for piece in x.split(sizes) if len(piece)]
    for name in ("mean", "total", "rows"):
        found = net[0].get_buffer(name)
        assert_close(found.cpu(), by_hand(rule, name, pieces).to(found.dtype), F64)
    assert torch.equal(net[0].idle.cpu(), torch.ones(2, dtype=F64))


def test_a_slice_is_normed_by_itself(device: torch.device) -> None:
    """The rows of a slice are its whole world."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh()).double().to(device)
    twin, x = twin_of(net), draw(15, 4, device=device)
    with parallel(net, device) as model:
        output = model(x)
    assert_close(output, torch.cat([twin_of(twin)(piece) for piece in x.split(5)]), F64)
    assert (output - twin(x)).abs().max() > 1e-2


# --- gradients ------------------------------------------------------------------------------------


class Summed(nn.Module):
    """Autograd gives both parameters one tensor for their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(8, 8, dtype=F64))
        self.flat = nn.Parameter(torch.randn(64, dtype=F64))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ (self.square.view(-1) + self.flat.view(64)).view(8, 8))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_gradients_of_a_sum_are_counted_once(replicas: int) -> None:
    """Plain torch, 2.13, adds each further backward pass to the one tensor twice."""
    net, inputs = Summed(), draw(13, 8)
    expected = torch.autograd.grad(net(inputs).sum(), [*net.parameters()])
    with parallel(net, replicas=replicas) as model:
        for _ in range(3):
            model(inputs).sum().backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, 3 * gradient, F64)


# --- hooks and changes that leave no trace --------------------------------------------------------


class TestHooks:
    """A hook on a module inside runs once per replica, with its slice; not in the caller's copy."""

    @pytest.mark.parametrize("where", ["root", "child"])
    @pytest.mark.parametrize(
        "kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"]
    )
    @pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
    def test_it_runs_in_every_replica_until_it_is_removed(
        self, late: bool, kind: str, where: str, device: torch.device
    ) -> None:
        net = mlp(F64).to(device)
        rows: list[int] = []
        x = draw(7, 7, device=device)

        def hook(_: nn.Module, *values: Any) -> None:
            rows.append(len(values[-1] if isinstance(values[-1], Tensor) else values[-1][0]))

        with parallel(net, device) as model:
            if late:
                loss_of(model(fresh(x))).backward()
            handle = getattr(net if where == "root" else net[2], f"register_{kind}_hook")(hook)
            loss_of(model(fresh(x))).backward()
            assert sorted(rows) == [2, 2, 3]
            handle.remove()
            loss_of(model(fresh(x))).backward()
            assert len(rows) == 3

    def test_what_hooks_change_is_changed(self, device: torch.device) -> None:
        net = mlp(F64).to(device)
        twin = twin_of(net)
        x = draw(7, 7, device=device)
        with parallel(net, device) as model:
            for index in (0, 2, 4):
                for each in (net, twin):
                    each[index].register_forward_hook(lambda _, __, out: out * 2)
                    each[index].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
                    each[index].register_full_backward_hook(lambda _, gi, __: (gi[0] * 3,))
                assert_equal_pass(model, twin, x)


def test_sync_parameters_takes_over_what_leaves_no_trace(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double().to(device).eval()
    x = draw(7, 4, device=device)
    with parallel(net, device) as model:
        model.sync_parameters()  # before the first pass too
        model(x)
        net[0].weight.data.fill_(0.5)
        net[1].running_mean.data.fill_(2.0)
        model.sync_parameters()
        assert_close(model(x), net(x), F64)


# --- forward_parts: inputs that somebody has cut already ------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = x @ self.weight
        return (out if mask is None else out * mask), out.sum()


def test_outputs_stay_apart_and_gradients_are_summed() -> None:
    net = Two()
    twin = copy.deepcopy(net)
    parts = [torch.randn(1, 4), torch.randn(5, 4), torch.randn(3, 4)]
    own = [part.clone().requires_grad_() for part in parts]
    with DataParallel(net, 3) as model:
        outputs = model.forward_parts([own[0], (own[1],), {"x": own[2], "mask": torch.ones(3)}])
        assert [out[0].shape[0] for out in outputs] == [1, 5, 3]
        sum(out[1] for out in outputs).backward()
    whole = torch.cat(parts).requires_grad_()
    twin(whole)[1].backward()
    assert torch.allclose(net.weight.grad, twin.weight.grad, atol=1e-6)
    assert torch.allclose(torch.cat([part.grad for part in own]), whole.grad)


def test_a_replica_without_a_part_takes_no_part() -> None:
    seen: list[int] = []
    net = nn.Identity()
    net.register_forward_hook(lambda *_: seen.append(1))
    with DataParallel(net, 3) as model:
        outputs = model.forward_parts([None, torch.ones(2), None])
    assert outputs[0] is None
    assert outputs[2] is None
    assert outputs[1].tolist() == [1.0, 1.0]
    assert seen == [1]

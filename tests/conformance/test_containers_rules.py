"""What users decide over: layouts, how outputs are merged, buffers, placement."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import DataParallel, Layout
from phalanx.errors import ConfigError
from phalanx.plan import least_loaded
from tests.conformance.containers import (
    Scale,
    Slices,
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
    cnn_norm,
    gradients_of,
    state_of,
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


@pytest.mark.parametrize("rows", [4, 6])  # slices of as many rows as there are layers, or more
def test_states_by_layer_are_never_joined_along_the_layers(rows: int, device: torch.device) -> None:
    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(3, 5, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x)  # type: ignore[no-any-return]

    net, x = States().to(device), draw(rows, 7, 3, device=device).float()
    refusal = pytest.raises(ConfigError, match=r"Output `1` .* its slice's \d")
    with DataParallel(net, places(device, 2)) as model, refusal:
        model(x)
    with DataParallel(net, places(device, 2), output={"1": "cat(1)"}) as model:
        for found, expected in zip(model(x), net(x), strict=True):
            torch.testing.assert_close(found, expected)


def test_rows_that_equal_the_steps_need_a_rule_in_the_first_batch(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(3)).to(device)
    before = twin_of(net)
    equal, other = (draw(rows, 3, 4, device=device).float() for rows in (6, 4))
    with DataParallel(net, places(device, 2)) as model:
        with pytest.raises(
            ConfigError, match=r"its slice's 3 along dim 0 and along dim 1.*output='cat\(0\)'"
        ):
            model(equal)
        assert_same_bits(state_of(net), state_of(before))
        for x in (other, equal):  # the first shows where the rows are
            assert model(x).shape == net(x).shape
    with DataParallel(before, places(device, 2), output="cat") as told:
        assert told(equal).shape == (6, 3, 5)


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


def test_whole_outputs_left_apart_may_differ_in_structure(device: torch.device) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.sum() if len(x) == 2 else {"rows": x}

    with parallel(Odd(), device, output="per_replica") as model:
        found = model(draw(5, 3, device=device))
        assert [type(each) for each in found] == [Tensor, Tensor, dict]
        assert [len(model(draw(rows, 3, device=device))) for rows in (1, 2, 5, 0)] == [1, 2, 3, 1]


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
    if rule == "sum":
        return start + sum((each - start for each in after), torch.zeros(()).to(after[0]))
    if rule == "first" or name == "rows":
        return after[0]
    rows = sum(len(piece) for piece in pieces)
    return sum(
        (each * (len(piece) / rows) for each, piece in zip(after, pieces, strict=True)),
        torch.zeros(4, dtype=F64),
    )


RULES = {
    "first": dict.fromkeys(("mean", "total", "rows"), "first"),
    "mean": dict.fromkeys(("mean", "total", "rows"), "mean"),
    "sum": dict.fromkeys(("mean", "total", "rows"), "sum"),
    "patterns": {"mean": "first", "total": "sum", "rows": "mean"},
}
PATTERNS = {"*.mean": "first", "0.t*": "sum", "*total": "first"}


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "assigned"])
@pytest.mark.parametrize("sizes", [UNEQUAL, [6, 0, 9]], ids=str)
@pytest.mark.parametrize("policy", list(RULES))
def test_buffers_become_what_their_rule_says(
    policy: str, sizes: list[int], in_place: bool, device: torch.device
) -> None:
    net = nn.Sequential(Counts(in_place)).to(device)
    x = draw(15, 4, device=device)
    buffers = PATTERNS if policy == "patterns" else policy
    with parallel(net, device, buffers=buffers, workloads=sizes) as model:
        model(x)
    pieces = [piece.cpu() for piece in x.split(sizes) if len(piece)]
    for name, rule in RULES[policy].items():
        found = net[0].get_buffer(name)
        assert_close(found.cpu(), by_hand(rule, name, pieces).to(found.dtype), F64)
    assert torch.equal(net[0].idle.cpu(), torch.ones(2, dtype=F64))


def normed(kind: str, device: torch.device) -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    if kind == "images":
        net = cnn_norm(F64)
        return net.to(device), lambda seed: draw(15, 2, 6, 6, seed=seed, device=device)
    momentum = None if kind == "cumulative" else 0.3
    norm = nn.BatchNorm1d(5, momentum=momentum, affine=kind != "plain")
    net = nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 3)).double()
    return net.to(device), lambda seed: draw(15, 4, seed=seed, device=device)


def test_a_slice_is_normed_by_itself(device: torch.device) -> None:
    """The rows of a slice are its whole world."""
    net, batch = normed("vectors", device)
    twin = twin_of(net)
    x = batch(0)
    with parallel(net, device) as model:
        output = model(x)
    assert_close(output, torch.cat([twin_of(twin)(piece) for piece in x.split(5)]), F64)
    assert (output - twin(x)).abs().max() > 1e-2


# --- where columns go -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placed", "expected"),
    [
        ([], "a"),
        ([("a", 8)], "b"),
        ([("a", 8), ("b", 4)], "c"),
        ([("a", 8), ("b", 4), ("c", 6)], "b"),
        ([("a", 8), ("b", 4), ("c", 6), ("b", 4)], "c"),  # placed by hand, and counted
        ([("a", 8), ("b", 8), ("c", 8)], "a"),
        ([("a", 8), ("a", 0), ("b", 8), ("c", 8)], "b"),  # fewer columns before lower index
        ([("a", 0), ("b", 0)], "c"),  # without parameters: in turn
        ([("elsewhere", 1)], "a"),
    ],
)
def test_the_next_device_is_the_least_loaded(placed: list[tuple[str, int]], expected: str) -> None:
    assert least_loaded(["a", "b", "c"], placed) == expected


def test_columns_without_a_device_go_to_the_next_one(device: torch.device) -> None:
    with Slices() as container:
        for _ in range(3):
            expected = container.next_device()
            assert container.add(nn.Linear(4, 4)) is container
            assert container.devices[-1] == container.get(-1).weight.device == expected
    assert len(container) == 3
    assert len(container.devices) == 3
    assert list(container.state_dict())[:2] == ["0.weight", "0.bias"]


@pytest.mark.gpu
def test_columns_spread_over_the_gpus_there_are(gpu: torch.device) -> None:
    count = torch.accelerator.device_count()
    with Slices() as container:
        for index in range(2 * count):
            container.add(nn.Linear(4, 4))
            assert container.devices[index] == torch.device(gpu.type, index % count)
    assert list(container.devices[:3]) == places(gpu, 3)[: 2 * count]

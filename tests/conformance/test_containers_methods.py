"""What containers can do beside a pass, what replicas follow, and containers of one's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.conformance.containers import (
    COPIES,
    Columns,
    PlainMixture,
    Slices,
    Weighed,
    assert_equal_pass,
    draw,
    fresh,
    loss_of,
    one_pass,
    parallel,
    spread,
)
from tests.zoo import (
    assert_close,
    gradients_of,
    mlp,
    sgd,
    state_of,
    twin_of,
)

pytestmark = [pytest.mark.devices, pytest.mark.promise("containers")]

F64 = torch.float64
K = 3


# --- what replicas follow: hooks and attributes ---------------------------------------------------


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

    def test_one_on_the_container_runs_once_with_everything(self, device: torch.device) -> None:
        seen: list[tuple[int, ...]] = []
        with parallel(mlp(F64).to(device), device) as model:
            model.register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape)))
            model(draw(7, 7, device=device))
        assert seen == [(7, 4)]

    def test_those_on_parameters_run_once_with_the_sum(self, device: torch.device) -> None:
        net = mlp(F64).to(device)
        seen: list[Tensor] = []
        net[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        x = draw(7, 7, device=device)
        with parallel(net, device) as model:
            loss_of(model(x)).backward()
        assert len(seen) == 1
        assert_close(seen[0], one_pass(twin_of(net), x)["parameters"][0], F64)


def test_attributes_that_are_changed_reach_the_replicas(device: torch.device) -> None:
    """A dropout of 1 leaves zeros and one of 0 leaves all, whatever is drawn."""
    net = nn.Sequential(nn.Dropout(0.5), nn.LeakyReLU(0.1), nn.LayerNorm(4)).double().to(device)
    x = draw(7, 4, device=device)
    with parallel(net, device) as model:
        model(x)
        net[0].p = 1.0
        assert_close(model(x), net[2](torch.zeros_like(x)), F64)
        net[0].p = 0.0
        net[1].negative_slope = 3.0
        net[2].eps = 0.5
        twin = twin_of(net)
        assert_equal_pass(model, twin, x)
        assert_close(state_of(model), state_of(twin), F64)
        net.eval()
        assert_equal_pass(model, twin.eval(), x)


# --- containers of one's own ----------------------------------------------------------------------


class TestOnesOwn:
    @pytest.fixture
    def mixture(self, device: torch.device) -> Columns:
        torch.manual_seed(0)
        columns = [
            nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()
            for width in (4, 7, 3)
        ]
        return spread(columns, device, Columns(5, 3).double().to(device))

    def test_a_mixture_whose_outputs_are_summed_equals_the_same_in_plain_torch(
        self, mixture: Columns, device: torch.device
    ) -> None:
        twin = PlainMixture(mixture).to(device)
        with mixture:
            for seed in range(5):
                x = draw(7, 5, seed=seed, device=device)
                got, expected = one_pass(mixture, x), one_pass(twin, x)
                assert_close(got["outputs"], expected["outputs"], F64)
                assert_close(got["inputs"], expected["inputs"], F64)
                for own, other in zip(got["parameters"], expected["parameters"], strict=True):
                    assert_close(own.to(device), other, F64)
                for each in (mixture, twin):
                    sgd(each.parameters()).step()
            assert_close(mixture(x).to(device), twin(x), F64)
        assert list(mixture.state_dict())[:3] == ["gate.weight", "gate.bias", "0.0.weight"]

    @pytest.mark.parametrize("way", list(COPIES))
    def test_a_copy_gives_the_same_and_goes_its_own_way(
        self, mixture: Columns, way: str, device: torch.device
    ) -> None:
        x = draw(7, 5, device=device)
        with mixture:
            before = mixture(x)
            with COPIES[way](mixture) as copied:
                assert torch.equal(copied(x), before)
                with torch.no_grad():
                    copied.get(0)[0].weight.zero_()
                assert not torch.equal(copied(x), before)
            assert torch.equal(mixture(x), before)

    def test_several_inputs_come_as_a_tuple_and_keywords_go_whole_to_all(
        self, device: torch.device
    ) -> None:
        class Pairs(phalanx.AbstractParallel):
            def distribute(self, inputs: Any) -> list[Any]:
                x, weights = inputs
                return [(piece, weights * (1 + place)) for place, piece in enumerate(x.split(4))]

        class Shifted(Weighed):
            def forward(self, x: Tensor, weights: Tensor, shift: Tensor | float = 0.0) -> Tensor:
                return super().forward(x, weights) + shift

        torch.manual_seed(0)
        columns = [Shifted().double().to(device) for _ in range(2)]
        twins = copy.deepcopy(columns)
        container = spread(columns, device, Pairs(dim=0))
        inputs = [draw(7, 7, device=device), draw(7, device=device), draw(4, device=device)]
        x, weights, shift = fresh(inputs)
        mine = fresh(inputs)
        with container:
            output = container(mine[0], mine[1], shift=mine[2])
            loss_of(output).backward()
        pieces = [
            twin(piece, weights * (1 + place), shift=shift)
            for place, (twin, piece) in enumerate(zip(twins, x.split(4), strict=True))
        ]
        loss_of(torch.cat(pieces)).backward()
        assert_close(output.to(device), torch.cat(pieces), F64)
        assert_close(mine[0].grad, x.grad, F64)
        assert_close(mine[1].grad, weights.grad, F64)
        for column, twin in zip(columns, twins, strict=True):
            assert_close(gradients_of(column.to(device)), gradients_of(twin), F64)
        assert_close(mine[2].grad, shift.grad, F64)

    def test_parameters_tied_across_columns_get_the_sum(self) -> None:
        torch.manual_seed(0)
        columns = [nn.Linear(4, 4).double() for _ in range(3)]
        columns[2].weight = columns[0].weight
        twins = copy.deepcopy(nn.ModuleList(columns))
        x = draw(9, 4)
        with spread(columns, torch.device("cpu"), Slices(dim=0)) as container:
            got = one_pass(container, x)
            assert container.get(2).weight is container.get(0).weight
        loss_of([twin(piece) for twin, piece in zip(twins, x.split(3), strict=True)]).backward()
        assert_close(got["parameters"], gradients_of(twins), F64)


# --- all of it together ---------------------------------------------------------------------------


def test_columns_inside_replicas_draw_other_numbers_in_every_replica(device: torch.device) -> None:
    columns = phalanx.ModelParallel(dim=1)
    for _ in range(2):
        columns.add(nn.Dropout(0.5), device)
    x = torch.ones(4, 30, device=device)
    with parallel(nn.Sequential(columns), device, 2) as model:
        torch.manual_seed(1)
        first, second = model(x), model(x)
        torch.manual_seed(1)
        again = model(x)
    assert torch.equal(again, first)
    quarters = [*first[:2].chunk(2, 1), *first[2:].chunk(2, 1)]
    for index, quarter in enumerate(quarters):
        assert not any(torch.equal(quarter, other) for other in quarters[:index])
    assert not torch.equal(first, second)


def test_replicas_of_replicas_equal_the_twin(device: torch.device) -> None:
    net = nn.Sequential(mlp(F64), nn.Tanh(), nn.Linear(4, 2).double()).to(device)
    twin = twin_of(net)
    inner = parallel(net[0], device, 2)
    net[0] = inner
    with inner, parallel(net, device, 2) as outer:
        assert list(outer.state_dict()) == list(twin.state_dict())
        for seed in range(2):
            assert_equal_pass(outer, twin, draw(9, 7, seed=seed, device=device))
            for each in (outer, twin):
                sgd(each.parameters()).step()
        outer.eval()
        assert_equal_pass(outer, twin, draw(5, 7, device=device))

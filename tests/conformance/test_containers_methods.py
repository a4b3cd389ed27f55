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
    assert_same_bits,
    cnn_norm,
    gradients_of,
    mlp,
    sgd,
    state_of,
    twin_of,
)

pytestmark = [pytest.mark.devices, pytest.mark.promise("containers")]

F64 = torch.float64
K = 3


# --- flat parameters ------------------------------------------------------------------------------


class TestFlatParameters:
    def test_they_are_tight_views_in_order_frozen_and_shared_ones_too(
        self, device: torch.device
    ) -> None:
        net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5)).double().to(device)
        net[2].weight = net[1].weight
        net[0].bias.requires_grad_(False)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        with parallel(net, device) as model:
            values, gradients = model.flat_parameters()
            assert values.numel() == gradients.numel() == 15 + 5 + 25 + 5 + 5
            assert torch.equal(values, torch.cat([value.flatten() for value in before]))
            assert net[2].weight is net[1].weight
            assert not net[0].bias.requires_grad
            x = draw(7, 3, device=device)
            loss_of(model(x)).backward()
            expected = one_pass(twin_of(net), x)["parameters"]
            assert_close(gradients[:15], expected[0].flatten(), F64)
            assert not gradients[15:20].any()
            again = model.flat_parameters()
            assert [t.data_ptr() for t in again] == [values.data_ptr(), gradients.data_ptr()]

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_zero_grad_keeps_gradients_flat(self, set_to_none: bool, device: torch.device) -> None:
        net = mlp(F64).to(device)
        twin = twin_of(net)
        with parallel(net, device) as model:
            _, gradients = model.flat_parameters()
            for seed in range(2):
                x = draw(7, 7, seed=seed, device=device)
                model.zero_grad(set_to_none=set_to_none)
                assert not gradients.any()
                loss_of(model(x)).backward()
                expected = one_pass(twin, x)["parameters"]
                assert_close(gradients, torch.cat([each.flatten() for each in expected]), F64)

    def test_gradients_that_are_there_are_kept(self, device: torch.device) -> None:
        net = mlp(F64).to(device)
        with parallel(net, device) as model:
            loss_of(model(draw(7, 7, device=device))).backward()
            before = gradients_of(net)
            _, gradients = model.flat_parameters()
            assert torch.equal(gradients, torch.cat([each.flatten() for each in before]))
            assert_same_bits(gradients_of(net), before)

    def test_after_a_change_of_type_they_are_made_anew(self, device: torch.device) -> None:
        net = mlp().to(device)
        with parallel(net, device) as model:
            model.flat_parameters()
            model.double()
            values, _ = model.flat_parameters()
            assert values.dtype == F64
            values.zero_()
            assert not model(draw(7, 7, device=device)).any()


# --- sharing, drawing anew ------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("weight",)], ids=["all", "weight"])
def test_siamese_containers_share_their_parameters(
    names: tuple[str, ...], device: torch.device
) -> None:
    left_net, right_net = mlp(F64, seed=1).to(device), mlp(F64, seed=2).to(device)
    twin = twin_of(left_net)
    other = twin_of(right_net)
    for index in (0, 2, 4):
        other[index].weight = twin[index].weight
        if not names:
            other[index].bias = twin[index].bias
    x, y = draw(9, 7, device=device), draw(7, 7, seed=1, device=device)
    with parallel(left_net, device) as left, parallel(right_net, device, 2) as right:
        right(y)  # replicas that exist already follow
        assert right.share(left, *names) is right
        assert right_net[0].weight is left_net[0].weight
        assert (right_net[0].bias is left_net[0].bias) == (not names)
        for a, b in ((left, right), (twin, other)):
            parameters = list(dict.fromkeys([*a.parameters(), *b.parameters()]))
            optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad()
                (a(x).square().mean() + b(y).sin().mean()).backward()
                optimizer.step()
        assert_close(state_of(left), state_of(twin), F64)
        assert_close(state_of(right), state_of(other), F64)


def test_parameters_drawn_anew_are_drawn_once(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double().to(device)
    twin = twin_of(net)
    x = draw(7, 4, device=device)
    with parallel(net, device) as model:
        model(x)
        torch.manual_seed(11)
        assert model.reset_parameters() is model
        torch.manual_seed(11)
        for layer in twin:
            layer.reset_parameters()
        assert_same_bits(state_of(net), state_of(twin))
        model.eval()
        assert_equal_pass(model, twin.eval(), x)
        row = x[:1].expand(K, 4)
        with torch.no_grad():
            outputs = model(row)
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


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

    @pytest.mark.parametrize("way", [*COPIES, "clone"])
    def test_a_copy_gives_the_same_and_goes_its_own_way(
        self, mixture: Columns, way: str, device: torch.device
    ) -> None:
        x = draw(7, 5, device=device)
        with mixture:
            before = mixture(x)
            with mixture.clone() if way == "clone" else COPIES[way](mixture) as copied:
                assert torch.equal(copied(x), before)
                with torch.no_grad():
                    copied.get(0)[0].weight.zero_()
                assert not torch.equal(copied(x), before)
            assert torch.equal(mixture(x), before)

    def test_flat_parameters_are_of_all_columns(
        self, mixture: Columns, device: torch.device
    ) -> None:
        twin = PlainMixture(mixture).to(device)
        x, y = draw(7, 5, device=device), draw(2, 5, device=device)
        with mixture:
            if len({parameter.device for parameter in mixture.parameters()}) == 1:
                values, _ = mixture.flat_parameters()
                assert values.numel() == sum(p.numel() for p in mixture.parameters())
            loss_of(mixture(x)).backward()
            loss_of(mixture(y)).backward()
        for each in (x, y):
            loss_of(twin(each)).backward()
        for own, other in zip(gradients_of(mixture), gradients_of(twin), strict=True):
            assert_close(own.to(device), other, F64)

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

    def test_buffers_of_columns_are_their_own(self, device: torch.device) -> None:
        norms = [nn.BatchNorm1d(4).double() for _ in range(2)]
        twins = copy.deepcopy(norms)
        x = draw(8, 4, device=device)
        with spread(norms, device, Slices(dim=0)) as container:
            container(x)
            for norm, twin, piece in zip(norms, twins, x.cpu().split(4), strict=True):
                twin(piece)
                assert_close(
                    [value.cpu() for value in state_of(norm).values()],
                    list(state_of(twin).values()),
                    F64,
                )

    def test_send_copies_from_source_to_destination_whatever_the_strides(
        self, device: torch.device
    ) -> None:
        container = Slices()
        for source in (
            draw(6, 4, device=device).T,
            draw(12, 4, device=device)[::2].T,
            draw(4, 1, device=device).expand(4, 6),
            draw(4, 6),
            draw(4, 6, device=device, dtype=torch.float32),
        ):
            whole = torch.zeros(6, 8, dtype=F64, device=device)
            destination = whole.T[::2]
            expected = source.clone()
            assert container.send(destination, source) is destination
            if source.device.type != "cpu":
                source.fill_(9.0) if source.is_contiguous() else None
            assert torch.equal(destination.cpu(), expected.double().cpu())
            assert not whole[:, 1::2].any()

    def test_send_records_no_graph(self) -> None:
        source = draw(3).requires_grad_()
        destination = torch.zeros(3, dtype=F64)
        Slices().send(destination, source)
        assert not destination.requires_grad
        assert torch.equal(destination, source)


# --- all of it together ---------------------------------------------------------------------------


def test_closing_and_opening_again_changes_nothing(device: torch.device) -> None:
    net = cnn_norm(F64).to(device).eval()
    twin = twin_of(net)
    model = parallel(net, device)
    for seed in range(3):
        with model:
            assert_equal_pass(model, twin, draw(7, 2, 6, 6, seed=seed, device=device))
        model.close()
    assert_close(state_of(net), state_of(twin), F64)


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

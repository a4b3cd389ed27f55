"""What every container promises, one test or more for each statement.

The numbers are those of the list of behaviours worth keeping; a comment bears the statement. What
the originals' authors tested is in `test_containers_seeds.py`; layouts, merging, buffers and bad
input are in `test_containers_rules.py`.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from tests.columns import columns_of_layer
from tests.conformance.containers import (
    COPIES,
    Colours,
    MixedTypes,
    Scale,
    Spy,
    Total,
    assert_equal_pass,
    colour_net,
    draw,
    fresh,
    loss_of,
    one_pass,
    parallel,
    places,
    replica_outputs,
    settings,
    stored,
)
from tests.zoo import (
    SharedInside,
    adamw,
    assert_close,
    assert_same_bits,
    cnn_norm,
    gpt,
    gradients_of,
    image_batch,
    mlp,
    plain_steps,
    sgd,
    state_of,
    token_batch,
    twin_of,
)

pytestmark = pytest.mark.promise("containers")

F64 = torch.float64
K = 3
STEPS = 10
ROWS = pytest.mark.parametrize("rows", [K - 1, 1, 2 * K - 1, 9, 15, 0])


# --- 7: forward, parameter gradients and input gradients equal the single-device twin -------------


@ROWS
def test_7_outputs_and_all_gradients_equal_the_twins(rows: int, device: torch.device) -> None:
    net = mlp(F64).to(device)
    with parallel(net, device) as model:
        assert_equal_pass(model, twin_of(net), draw(rows, 7, device=device))


@ROWS
def test_7_with_a_table_in_and_a_table_out(rows: int, device: torch.device) -> None:
    net = Colours().double().to(device)
    table = [draw(rows, 1, 5, 4, seed=seed, device=device) for seed in range(3)]
    with parallel(net, device) as model:
        assert_equal_pass(model, twin_of(net), table)


@ROWS
def test_7_embedded_inside_another_model(rows: int, device: torch.device) -> None:
    net = colour_net(device)
    twin = twin_of(net)
    with parallel(net[2], device) as inner:
        net[2] = inner
        assert_equal_pass(net, twin, draw(rows, 3, 5, 4, device=device))


@ROWS
def test_7_inputs_may_lie_on_the_cpu(rows: int, device: torch.device) -> None:
    """Their gradients return there; only with ``--device cuda`` it is another device."""
    net = mlp(F64).to(device)
    twin = twin_of(net).cpu()
    with parallel(net, device) as model:
        got, expected = (one_pass(each, draw(rows, 7)) for each in (model, twin))
    assert [gradient.device.type for gradient in got["inputs"]] == ["cpu"]
    for what in expected:
        assert_close([each.cpu() for each in got[what]], expected[what], F64)


# --- 8: ten steps equal the twin's; replicas are identical afterwards -----------------------------


@pytest.mark.parametrize("nesterov", [False, True], ids=["momentum", "nesterov"])
def test_8_ten_steps_equal_the_twins_and_replicas_stay_identical(
    nesterov: bool, device: torch.device
) -> None:
    net = mlp(F64).to(device)
    twin = twin_of(net)
    with parallel(net, device) as model:
        sides = [
            (each, torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov))
            for each in (model, twin)
        ]
        for seed in range(STEPS):
            x = draw(7, 7, seed=seed, device=device)
            for each, optimizer in sides:
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
            assert_close(state_of(model), state_of(twin), F64)
        row = draw(7, device=device)
        with torch.no_grad():
            outputs = model(row.expand(K, 7))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    for output in replica_outputs(net, device, row):
        assert_close(output[0], twin(row).cpu(), F64)


# --- 9: three forward/backward without zeroing, then one step -------------------------------------


def test_9_three_passes_without_zeroing_add_up(device: torch.device) -> None:
    net = mlp(F64).to(device)
    twin = twin_of(net)
    with parallel(net, device) as model:
        for each in (model, twin):
            for seed, rows in enumerate((9, 2, 7)):
                loss_of(each(draw(rows, 7, seed=seed, device=device))).backward()
        assert_close(gradients_of(model), gradients_of(twin), F64)
        for each in (model, twin):
            sgd(each.parameters()).step()
    assert_close(state_of(net), state_of(twin), F64)


# --- 10: no explicit sync after external changes --------------------------------------------------


def in_place(net: nn.Sequential) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(-0.5)


def in_the_place_of_data(net: nn.Sequential) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 2 + 1


def another_parameter(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach() + 1)


def another_layer(net: nn.Sequential) -> None:
    torch.manual_seed(7)
    net[2] = nn.Linear(5, 5).to(net[0].weight)


def a_state_loaded(net: nn.Sequential) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def a_buffer(net: nn.Sequential) -> None:
    net[1].running_mean.fill_(2.0)


def another_buffer(net: nn.Sequential) -> None:
    net[1].running_var = torch.full_like(net[1].running_var, 3.0)


def an_optimizers_step(net: nn.Sequential) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    adamw(net.parameters()).step()


@pytest.mark.parametrize(
    "change",
    [
        in_place,
        in_the_place_of_data,
        another_parameter,
        another_layer,
        a_state_loaded,
        a_buffer,
        another_buffer,
        an_optimizers_step,
    ],
)
def test_10_what_is_changed_from_outside_is_in_the_next_pass(
    change: Callable[[nn.Sequential], None], device: torch.device
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 2))
    net = net.double().to(device).eval()
    x = draw(7, 4, device=device)
    with parallel(net, device) as model:
        before = model(x)
        change(net)
        assert not torch.allclose(model(x), before)
        assert_equal_pass(model, twin_of(net), x)


def test_10_sync_parameters_takes_over_what_leaves_no_trace(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double().to(device).eval()
    x = draw(7, 4, device=device)
    with parallel(net, device) as model:
        model.sync_parameters()  # before the first pass too
        model(x)
        net[0].weight.data.fill_(0.5)
        net[1].running_mean.data.fill_(2.0)
        model.sync_parameters()
        assert_close(model(x), net(x), F64)


# --- 11: save and load, on another number of devices; clones --------------------------------------


def test_11_saved_on_two_and_loaded_on_three(device: torch.device) -> None:
    x, y = image_batch(9, F64)
    x, y = x.to(device), y.to(device)
    file = io.BytesIO()
    with parallel(cnn_norm(F64).to(device), device, 2) as two:
        for _ in range(2):
            nn.functional.cross_entropy(two(x), y).backward()
            sgd(two.parameters()).step()
        torch.save(two.state_dict(), file)
        expected = two.eval()(x)
    file.seek(0)
    with parallel(cnn_norm(F64, seed=3).to(device), device, 3) as three:
        three.load_state_dict(torch.load(file, weights_only=True))
        assert_same_bits(state_of(three), state_of(two))
        assert_close(three.eval()(x), expected, F64)


@pytest.mark.parametrize("way", list(COPIES))
def test_11_a_copy_gives_the_same_output_and_goes_its_own_way(
    way: str, device: torch.device
) -> None:
    x, y = image_batch(9, F64)
    x, y = x.to(device), y.to(device)
    with parallel(cnn_norm(F64).to(device), device) as model:
        nn.functional.cross_entropy(model(x), y).backward()
        copied = COPIES[way](model)
        with copied:
            for training in (False, True):
                assert torch.equal(copied.train(training)(x), model.train(training)(x))
            before = state_of(model)
            nn.functional.cross_entropy(copied(x), y).backward()
            sgd(copied.parameters()).step()
        assert_same_bits(state_of(model), before)
        assert not torch.equal(next(copied.parameters()), next(model.parameters()))


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("prefix", ["", "module."], ids=["unwrapped", "module."])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a model"])
def test_11_files_of_wrapped_and_unwrapped_models_load(
    inside: bool, prefix: str, device: torch.device
) -> None:
    wanted = cnn_norm(F64, seed=5).to(device)
    with parallel(cnn_norm(F64).to(device), device) as model:
        assert list(model.state_dict()) == list(wanted.state_dict())
        target = nn.Sequential(nn.Identity(), model) if inside else model
        at = "1." if inside else ""
        for state in (prefixed(wanted.state_dict(), at + prefix), target.state_dict()):
            found = target.load_state_dict(state)
            assert (found.missing_keys, found.unexpected_keys) == ([], [])
            assert_same_bits(state_of(model), state_of(wanted))


# --- 12: zeroing the parameters of the primary makes all outputs zero -----------------------------


def test_12_when_the_modules_parameters_are_zeroed_all_outputs_are_zero(
    device: torch.device,
) -> None:
    net = mlp(F64).to(device)
    with parallel(net, device, output="per_replica") as model:
        assert all(output.any() for output in model(draw(7, 7, device=device)))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        outputs = model(draw(7, 7, device=device))
    assert len(outputs) == K
    assert not any(output.any() for output in outputs)


# --- 13: models and inputs of other kinds ---------------------------------------------------------


def test_13_a_model_without_parameters(device: torch.device) -> None:
    with parallel(nn.Tanh(), device) as model:
        assert list(model.parameters()) == []
        assert_equal_pass(model, nn.Tanh(), draw(7, 4, device=device))


def test_13_an_input_that_needs_no_gradient(device: torch.device) -> None:
    net = mlp(F64).to(device)
    twin = twin_of(net)
    x = draw(7, 7, device=device)
    with parallel(net, device) as model:
        for each in (model, twin):
            loss_of(each(x)).backward()
    assert x.grad is None
    assert_close(gradients_of(net), gradients_of(twin), F64)


def test_13_integer_inputs(device: torch.device) -> None:
    net = gpt(F64).to(device)
    with parallel(net, device) as model:
        assert_equal_pass(model, twin_of(net), token_batch(7)[0].to(device))


def test_13_mixed_dtypes_keep_theirs(device: torch.device) -> None:
    torch.manual_seed(0)
    net = MixedTypes().to(device)
    inputs = (
        draw(7, 7, device=device),
        draw(7, 5, device=device, dtype=torch.float32),
        torch.arange(7, device=device),
    )
    with parallel(net, device) as model:
        got, expected = one_pass(model, *inputs), one_pass(twin_of(net), *inputs)
    assert torch.equal(got["outputs"][2], expected["outputs"][2])
    for what in expected:
        for own, other in zip(got[what], expected[what], strict=True):
            if own is not None and own.is_floating_point():
                # What has passed through float32 anywhere is float32 in its last digits.
                assert own.dtype == other.dtype
                assert_close(own, other, own.dtype, times=1 if own.dtype != F64 else 1e7)


@pytest.mark.parametrize("kind", ["used twice", "tied to another kind"])
def test_13_weights_shared_inside_stay_shared(kind: str, device: torch.device) -> None:
    torch.manual_seed(0)
    twice = kind == "used twice"
    net = (SharedInside() if twice else gpt(tied=True)).double().to(device)
    twin = twin_of(net)
    x = draw(7, 7, device=device) if twice else token_batch(7)[0].to(device)
    with parallel(net, device) as model:
        assert_equal_pass(model, twin, x)
        for each in (model, twin):
            plain_steps(each, lambda out, _: out.square().mean(), sgd, [(x, None)] * STEPS)
        assert_equal_pass(model, twin, x)
        for copied in (copy.deepcopy(model), stored(model)):
            inner = copied.module
            assert inner.second is inner.first if twice else inner.head.weight is inner.embed.weight
    assert_close(state_of(net), state_of(twin), F64)
    assert (net.second is net.first) if twice else (net.head.weight is net.embed.weight)


# --- 14: the caller's settings are the same after every call --------------------------------------


MODES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast f16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
}


@pytest.mark.parametrize("mode", list(MODES))
def test_14_workers_enter_the_callers_modes_and_the_caller_gets_them_back(mode: str) -> None:
    net = Scale()
    inside: list[tuple[object, ...]] = []
    net.register_forward_pre_hook(lambda *_: inside.append(settings()))
    before = settings()
    with parallel(net) as model:
        model(draw(7, 2))
        assert [each[:4] for each in inside] == [before[:4]] * K
        with MODES[mode]():
            own = settings()
            inside.clear()
            model(draw(7, 2))
            assert settings() == own
            # Autocast's dtype is of no meaning where there is none. Its cache of cast weights, one
            # for all threads, is the caller's alone.
            assert [each[:3] for each in inside] == [own[:3]] * K
            assert not own[2] or [each[:4] for each in inside] == [own[:4]] * K
            net.fails = True
            with pytest.raises(ZeroDivisionError, match="asked to"):
                model(draw(7, 2))
            assert settings() == own
        assert settings() == before
        net.fails = False
        inside.clear()
        loss_of(model(draw(7, 2))).backward()
        assert [each[:4] for each in inside] == [before[:4]] * K
    assert net.scale.grad is not None


def test_14_a_backward_pass_that_fails_leaves_no_trace(device: torch.device) -> None:
    net = mlp(F64).to(device)
    twin = twin_of(net)
    x = draw(7, 7, device=device)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("asked to")

    with parallel(net, device) as model:
        loss_of(model(x)).backward()
        before, own = gradients_of(net), settings()
        handle = net[2].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss_of(model(x)).backward()
        assert settings() == own
        assert_same_bits(gradients_of(net), before)
        handle.remove()
        assert_equal_pass(model, twin, x)


def test_14_what_a_module_switches_stays_in_its_pass(device: torch.device) -> None:
    class Switches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = x * torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            if x.numel() and bool((x < 0).any()):
                raise ZeroDivisionError("negative")
            return found

    x = torch.ones(7, 2, device=device, requires_grad=True)
    with parallel(Switches(), device) as model:
        for _ in range(2):
            assert torch.equal(model(x), x)
            assert torch.is_grad_enabled()
            with pytest.raises(ZeroDivisionError):
                model(-x)
            assert torch.is_grad_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_14_the_callers_device_and_stream_are_as_before(fails: bool, gpu: torch.device) -> None:
    class Moves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            before, other = torch.accelerator.current_stream(x.device), torch.Stream(x.device)
            other.wait_stream(before)
            torch.accelerator.set_stream(other)
            if fails:
                raise ZeroDivisionError("asked to")
            y = x * 2
            before.wait_stream(other)
            torch.accelerator.set_device_index(0)
            return y

    last = torch.accelerator.device_count() - 1
    devices, own = places(gpu, K), torch.device(gpu.type, last)
    with torch.accelerator.device_index(last), torch.Stream(own) as stream:
        x = draw(7, 2, device=own).requires_grad_()
        with phalanx.DataParallel(Moves(), devices) as model:
            if fails:
                with pytest.raises(ZeroDivisionError):
                    model(x)
            else:
                loss_of(model(x)).backward()
            model.sync_parameters()
        assert torch.accelerator.current_device_index() == last
        assert torch.accelerator.current_stream() == stream


# --- 18: model-parallel columns -------------------------------------------------------------------


def test_18_columns_inside_replicas_and_replicas_inside_columns(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)).double().to(device)
    twin = twin_of(net)
    columns = phalanx.ModelParallel(dim=-1)
    for column in columns_of_layer(net[2], [4, 2]):
        columns.add(column, device)
    x = draw(7, 5, device=device)
    with parallel(nn.Sequential(net[0], nn.Tanh(), columns), device) as outer:
        for _ in range(2):
            got, expected = one_pass(outer, x), one_pass(twin, x)
            assert_close(
                got["outputs"] + got["inputs"], expected["outputs"] + expected["inputs"], F64
            )
            weights = torch.cat([columns.get(index).weight.grad for index in range(2)])
            assert_close(weights, twin[2].weight.grad, F64)
    other = phalanx.ModelParallel(dim=-1)
    inner = [parallel(column, device) for column in columns_of_layer(twin[2], [4, 2])]
    for each in inner:
        other.add(each, device)
    hidden = draw(7, 7, device=device)
    with contextlib.ExitStack() as stack:
        for each in (other, *inner):
            stack.enter_context(each)
        got, expected = one_pass(other, hidden), one_pass(twin[2], hidden)
        assert_close(got["outputs"] + got["inputs"], expected["outputs"] + expected["inputs"], F64)
        weights = torch.cat([other.get(index).weight.grad for index in range(2)])
        assert_close(weights, twin[2].weight.grad, F64)


# --- 19: the device decorator ---------------------------------------------------------------------


def test_19_the_module_lies_on_its_device_and_the_rest_where_it_was() -> None:
    """ "meta" stands for a second device: it computes nothing, but shows who went where."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
    pinned = phalanx.OnDevice(net[1], "meta")
    net[1] = pinned
    assert {value.device.type for value in net[1].state_dict().values()} == {"meta"}
    assert {value.device.type for value in net[0].state_dict().values()} == {"cpu"}
    assert list(net.state_dict())[2] == "1.0.weight"
    table = {"x": torch.ones(3, 5), "more": [torch.ones(3, 5, device="meta"), "word", 2.0]}
    seen: list[Any] = []
    pinned.module = Spy(seen)
    out = pinned(table)
    assert [leaf.device.type for leaf in (seen[0]["x"], seen[0]["more"][0])] == ["meta", "meta"]
    assert out["more"][1:] == ["word", 2.0]


def test_19_a_table_that_shrinks_from_call_to_call_is_moved_as_it_is(device: torch.device) -> None:
    net = Total()
    twin = copy.deepcopy(net).to(device)
    model = phalanx.OnDevice(net, device)
    for count in (3, 1, 2):
        table = [draw(2, 3, seed=seed, device=device) for seed in range(count)]
        assert_equal_pass(model, twin, table)


@pytest.mark.gpu
def test_19_gradients_of_a_table_go_back_to_the_device_of_each_leaf(gpu: torch.device) -> None:
    net = Total()
    twin = copy.deepcopy(net)
    model = phalanx.OnDevice(net, gpu, "cpu")
    assert model.linear.weight.device == gpu
    current = torch.accelerator.current_device_index()
    here, there = fresh([draw(5, 3), draw(5, 3, seed=1, device=gpu)])
    output = model([here, there])
    loss_of(output).backward()
    assert torch.accelerator.current_device_index() == current
    assert (here.grad.device.type, there.grad.device.type) == ("cpu", gpu.type)
    assert output.device.type == "cpu"
    left, right = fresh([here.detach(), there.detach().cpu()])
    expected = twin([left, right])
    loss_of(expected).backward()
    assert_close([output, here.grad, there.grad.cpu()], [expected, left.grad, right.grad], F64)


def test_19_a_chain_made_for_several_gpus_loads_and_runs_without_them(device: torch.device) -> None:
    """Converted, stored and loaded as well; the original took the library away to show it."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double().to(device)
    twin = twin_of(plain)
    with pytest.warns(UserWarning, match="no such device") as warned:
        chain = nn.Sequential(
            *(phalanx.OnDevice(layer, f"cuda:{97 + place}") for place, layer in enumerate(plain))
        )
    assert len(warned) == 3  # one for each object
    with pytest.warns(UserWarning, match="no such device"):
        loaded = stored(chain)
    x = draw(5, 4, device=device)
    for model in (chain, loaded, copy.deepcopy(chain)):
        assert_equal_pass(model, twin, x)
    assert_equal_pass(copy.deepcopy(chain[1]), twin[1], x)
    assert_close(chain.float()(x.float()), twin.float()(x.float()), torch.float32)

"""What every container promises: what plain PyTorch does with the same modules.

Each law runs for all faces that it holds for (`faces.py`): our containers, Torch7's and MXNet's. A
number is that of the behaviour in the list of those worth keeping from the original containers.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.errors import StateError
from tests.columns import columns_of_layer
from tests.contracts import faces
from tests.contracts.containers import (
    COPIES,
    Colours,
    MixedTypes,
    Scale,
    assert_equal_pass,
    draw,
    loss_of,
    one_pass,
    parallel,
    places,
    settings,
    stored,
)
from tests.contracts.faces import Face, K
from tests.zoo import (
    SharedInside,
    assert_close,
    assert_same_bits,
    cnn_norm,
    gpt,
    gradients_of,
    mlp,
    sgd,
    state_of,
    token_batch,
    twin_of,
)

pytestmark = pytest.mark.promise("containers")

F64 = torch.float64
DEADLINE_S = 30
STEPS = 10
NAMES = [f"phalanx-replica-{index}" for index in range(K)]
ROWS = pytest.mark.parametrize("rows", [K - 1, 1, 2 * K - 1, 9, 15, 0])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Let twins compute on one thread: their models are small, and others use the cores as well."""
    torch.set_num_threads(1)


def net(seed: int = 0) -> nn.Module:
    return mlp(F64, seed=seed)


def always(make: Callable[[], nn.Module], **options: Any) -> Callable[..., nn.Module]:
    """Return how to build such a module from a seed."""

    def build(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return make(**options).double()

    return build


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


# --- 7: forward, parameter gradients and input gradients equal the twin's -------------------------


@ROWS
@faces.in_all
def test_outputs_and_all_gradients_equal_the_twins(
    face: Face, rows: int, device: torch.device
) -> None:
    if face is faces.GROUP and not rows:
        pytest.skip("a group without rows has no output")
    with face.open(net, device) as (model, twin):
        assert_equal_pass(model, twin, draw(rows, 7, device=device))


@pytest.mark.parametrize("rows", [K - 1, 9, 0])
@faces.in_wrappers
def test_with_a_table_in_and_a_table_out(face: Face, rows: int, device: torch.device) -> None:
    table = [draw(rows, 1, 5, 4, seed=seed, device=device) for seed in range(3)]
    with face.open(always(Colours), device) as (model, twin):
        assert_equal_pass(model, twin, table)


@faces.in_all
def test_inside_another_model(face: Face, device: torch.device) -> None:
    torch.manual_seed(5)
    before, after = nn.Linear(4, 7).double().to(device), nn.Tanh()
    with face.open(net, device) as (model, twin):
        whole = nn.Sequential(twin_of(before), twin, after)
        assert_equal_pass(nn.Sequential(before, model, after), whole, draw(5, 4, device=device))


@faces.in_all
def test_inputs_may_lie_on_the_cpu(face: Face, device: torch.device) -> None:
    """Their gradients return there; only with ``--device`` it is another device."""
    with face.open(net, device) as (model, twin):
        got, expected = one_pass(model, draw(7, 7)), one_pass(twin.cpu(), draw(7, 7))
    assert [gradient.device.type for gradient in got["inputs"]] == ["cpu"]
    for what in expected:
        assert_close([each.cpu() for each in got[what]], expected[what], F64)


# --- 8, 9: training -------------------------------------------------------------------------------


@faces.in_all
def test_ten_steps_equal_the_twins(face: Face, device: torch.device) -> None:
    with face.open(net, device) as (model, twin):
        sides = [(each, sgd(each.parameters())) for each in (model, twin)]
        for seed in range(STEPS):
            x = draw(7, 7, seed=seed, device=device)
            for each, optimizer in sides:
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
            assert_close(list(model.parameters()), list(twin.parameters()), F64)
        assert_equal_pass(model, twin, x)


@faces.in_all
def test_three_passes_without_zeroing_add_up(face: Face, device: torch.device) -> None:
    with face.open(net, device) as (model, twin):
        for each in (model, twin):
            for seed, rows in enumerate((9, 2, 7)):
                loss_of(each(draw(rows, 7, seed=seed, device=device))).backward()
        assert_close(gradients_of(model), gradients_of(twin), F64)


# --- 10: no explicit sync after a change of type; of others see test_shells.py --------------------


@faces.in_modules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"])
def test_a_change_of_type_reaches_all(face: Face, dtype: torch.dtype, device: torch.device) -> None:
    x = draw(5, 7, device=device)
    with face.open(net, device) as (model, twin):
        model(x)
        for kind in (dtype, F64):
            assert model.to(kind) is model
            output = model(x.to(kind))
            assert output.dtype == kind
            output.sum().backward()
            assert {p.grad.dtype for p in model.parameters()} == {kind}
            model.zero_grad()
            # bfloat16 keeps 8 bits: one rounding is 4e-3, and there are three layers.
            near = 5e-2 if dtype == torch.bfloat16 else 1e-5
            expected = twin.to(kind)(x.to(kind))
            torch.testing.assert_close(output, expected, rtol=near, atol=near)


# --- 11: save and load; copies --------------------------------------------------------------------


@faces.in_modules
def test_a_state_is_saved_and_loaded(face: Face, device: torch.device) -> None:
    with face.open(normed, device) as (model, _), face.open(normed, device) as (other, _):
        model(draw(16, 4, device=device)).sum().backward()
        sgd(model.parameters()).step()
        other.load_state_dict(model.state_dict())
        assert_same_bits(state_of(other), state_of(model))
        x = draw(5, 4, device=device)
        assert torch.equal(other.eval()(x), model.eval()(x))


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a model"])
@faces.in_wrappers
def test_files_of_wrapped_and_unwrapped_models_load(
    face: Face, inside: bool, device: torch.device
) -> None:
    wanted = cnn_norm(F64, seed=5).to(device)
    with face.open(lambda seed: cnn_norm(F64), device) as (model, _):
        assert list(model.state_dict()) == list(wanted.state_dict())
        assert dict(model.named_parameters()).keys() == dict(wanted.named_parameters()).keys()
        target = nn.Sequential(nn.Identity(), model) if inside else model
        at = "1." if inside else ""
        states = [prefixed(wanted.state_dict(), at), target.state_dict()]
        if isinstance(model, phalanx.DataParallel):  # as nn.DataParallel wrote files
            states.append(prefixed(wanted.state_dict(), at + "module."))
        for state in states:
            found = target.load_state_dict(state)
            assert (found.missing_keys, found.unexpected_keys) == ([], [])
            assert_same_bits(state_of(model), state_of(wanted))


@pytest.mark.parametrize("way", list(COPIES))
@faces.in_modules
def test_a_copy_gives_the_same_output_and_goes_its_own_way(
    face: Face, way: str, device: torch.device
) -> None:
    x = draw(16, 4, device=device)
    with face.open(normed, device) as (model, _):
        loss_of(model(x)).backward()
        copied = COPIES[way](model)
        assert type(copied) is type(model)
        for training in (False, True):
            assert torch.equal(copied.train(training)(x), model.train(training)(x))
        before = state_of(model)
        loss_of(copied(x)).backward()
        sgd(copied.parameters()).step()
        assert_same_bits(state_of(model), before)
        assert not torch.equal(next(copied.parameters()), next(model.parameters()))
        if hasattr(copied, "close"):
            copied.close()


# --- 12: zeroing the parameters of the primary makes all outputs zero -----------------------------


@faces.in_all
def test_when_the_parameters_are_zeroed_all_outputs_are_zero(
    face: Face, device: torch.device
) -> None:
    with face.open(net, device) as (model, _), torch.no_grad():
        assert model(draw(7, 7, device=device)).any()
        for parameter in model.parameters():
            parameter.zero_()
        assert not model(draw(7, 7, device=device)).any()


# --- 13: models and inputs of other kinds ---------------------------------------------------------


@faces.in_all
def test_a_model_without_parameters(face: Face, device: torch.device) -> None:
    with face.open(always(nn.Tanh), device) as (model, twin):
        assert list(model.parameters()) == []
        assert_equal_pass(model, twin, draw(7, 4, device=device))


@faces.in_all
def test_an_input_that_needs_no_gradient(face: Face, device: torch.device) -> None:
    x = draw(7, 7, device=device)
    with face.open(net, device) as (model, twin):
        for each in (model, twin):
            loss_of(each(x)).backward()
        assert x.grad is None
        assert_close(gradients_of(model), gradients_of(twin), F64)


@faces.in_all
def test_integer_inputs(face: Face, device: torch.device) -> None:
    with face.open(lambda seed: gpt(F64, seed=seed), device) as (model, twin):
        assert_equal_pass(model, twin, token_batch(7)[0].to(device))


@faces.in_wrappers
def test_mixed_dtypes_keep_theirs(face: Face, device: torch.device) -> None:
    def mixed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return MixedTypes()

    inputs = (
        draw(7, 7, device=device),
        draw(7, 5, device=device, dtype=torch.float32),
        torch.arange(7, device=device),
    )
    with face.open(mixed, device) as (model, twin):
        got, expected = one_pass(model, *inputs), one_pass(twin, *inputs)
    assert torch.equal(got["outputs"][2], expected["outputs"][2])
    for what in expected:
        for own, other in zip(got[what], expected[what], strict=True):
            if own is not None and own.is_floating_point():
                # What has passed through float32 anywhere is float32 in its last digits.
                assert own.dtype == other.dtype
                assert_close(own, other, own.dtype, times=1 if own.dtype != F64 else 1e7)


@pytest.mark.parametrize("kind", ["used twice", "tied to another kind"])
@faces.in_all
def test_weights_shared_inside_stay_shared(face: Face, kind: str, device: torch.device) -> None:
    twice = kind == "used twice"
    build = always(SharedInside) if twice else always(gpt, tied=True)
    x = draw(7, 7, device=device) if twice else token_batch(7)[0].to(device)
    with face.open(build, device) as (model, twin):
        for _ in range(3):
            assert_equal_pass(model, twin, x)
            for each in (model, twin):
                each.zero_grad()
                each(x).square().mean().backward()
                sgd(each.parameters()).step()
        copies = () if face is faces.GROUP else (copy.deepcopy(model), stored(model))
        for each in (model, *copies):
            part = face.part(each)
            assert part.second is part.first if twice else part.head.weight is part.embed.weight


@faces.in_containers
def test_one_container_inside_another(face: Face, device: torch.device) -> None:
    with face.open(net, device) as (model, twin):
        rows = draw(7, 7, device=device)
        outer = phalanx.DataParallel(nn.Sequential(model, nn.Tanh()), places(device, 2))
        with outer:
            for each in (outer, twin):
                each.eval()
            assert_equal_pass(outer, nn.Sequential(twin, nn.Tanh()), rows)


def test_columns_of_a_layer_inside_replicas_and_replicas_as_columns(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(7, 6).double().to(device)
    columns, other = phalanx.ModelParallel(dim=-1), phalanx.ModelParallel(dim=-1)
    inner = [parallel(column, device) for column in columns_of_layer(layer, [4, 2])]
    for column, each in zip(columns_of_layer(layer, [4, 2]), inner, strict=True):
        columns.add(column, device)
        other.add(each, device)
    x = draw(7, 7, device=device)
    expected = one_pass(layer, x)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(each) for each in (*inner, other, parallel(columns, device))]
        for model, parts in ((opened[-1], columns), (other, other)):
            got = one_pass(model, x)
            assert_close(got["outputs"], expected["outputs"], F64)
            assert_close(got["inputs"], expected["inputs"], F64)
            weights = torch.cat([parts.get(index).weight.grad for index in range(2)])
            assert_close(weights, layer.weight.grad, F64)


# --- 14: the caller's settings are the same after every call --------------------------------------

MODES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast f16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
}


@pytest.mark.parametrize("mode", list(MODES))
@faces.in_ours
def test_workers_enter_the_callers_modes_and_the_caller_gets_them_back(
    face: Face, mode: str
) -> None:
    inside: list[tuple[object, ...]] = []
    before = settings()
    with face.open(always(Scale), torch.device("cpu")) as (model, _):
        scales = [module for module in model.modules() if isinstance(module, Scale)]
        for scale in scales:
            scale.register_forward_pre_hook(lambda *_: inside.append(settings()))
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
            scales[0].fails = True
            with pytest.raises(ZeroDivisionError, match="asked to"):
                model(draw(7, 2))
            assert settings() == own
        assert settings() == before


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_callers_device_and_stream_are_as_before(fails: bool, gpu: torch.device) -> None:
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


# --- failures -------------------------------------------------------------------------------------


class Picky(nn.Linear):
    """Fails on numbers that are not, forward or backward."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise KeyError("forward")
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.look)
        return output

    def look(self, gradient: Tensor) -> None:
        if gradient.isnan().any():
            raise IndexError("backward")


def picky(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), Picky(3, 2)).double()


@faces.in_all
def test_an_error_on_the_way_there_keeps_its_type_and_the_next_pass_is_whole(
    face: Face, device: torch.device
) -> None:
    x = draw(5, 3, device=device)
    bad = x.clone()
    bad[-1] = float("nan")
    with face.open(picky, device) as (model, twin):
        loss_of(model(x)).backward()
        before, own = gradients_of(model), settings()
        with pytest.raises(KeyError, match="forward") as caught:
            model(bad)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] == "forward"
        if face not in faces.PLACED:
            assert "replica" in caught.value.__notes__[0]
        assert settings() == own
        assert_same_bits(gradients_of(model), before)
        assert_equal_pass(model, twin, x)


@faces.in_all
def test_an_error_on_the_way_back_leaves_no_gradient(face: Face, device: torch.device) -> None:
    x = draw(5, 3, device=device)
    with face.open(picky, device) as (model, twin):
        output = model(x)
        factor = torch.ones_like(output)
        factor[-1] = float("nan")
        with pytest.raises(IndexError, match="backward") as caught:
            (output * factor).sum().backward()
        if face not in faces.PLACED:
            assert "replica" in caught.value.__notes__[0]
            assert not any(g is not None and g.any() for g in gradients_of(model))
        assert_equal_pass(model, twin, x)


@faces.in_ours
def test_a_pass_that_fails_writes_no_buffer(face: Face, device: torch.device) -> None:
    def build(seed: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3, track_running_stats=True), picky(seed)).double()

    with face.open(build, device) as (model, _):
        before = state_of(model)
        x = draw(9, 3, device=device)
        x[-1] = float("nan")
        with pytest.raises(KeyError):
            model(x)
        assert_same_bits(state_of(model), before)


# --- graphs ---------------------------------------------------------------------------------------


@faces.in_modules
def test_backward_twice_needs_the_graph_kept(face: Face, device: torch.device) -> None:
    x = draw(5, 7, device=device)
    with face.open(net, device) as (model, twin):
        value = loss_of(model(x))
        value.backward(retain_graph=True)
        value.backward(retain_graph=True)
        for _ in range(2):
            loss_of(twin(x)).backward()
        assert_close(gradients_of(model), gradients_of(twin), F64)
        output = model(x)
        output.sum().backward()
        with pytest.raises((StateError, RuntimeError), match="retain_graph=True"):
            output.sum().backward()


@faces.in_containers
def test_outputs_and_inputs_may_be_changed_in_place(face: Face, device: torch.device) -> None:
    """Replicas have copies of the inputs, and callers copies of the outputs."""
    x = draw(5, 7, device=device)
    with face.open(net, device) as (model, twin):
        twin(x).mul(2).add(1).square().sum().backward()
        output = model(x)
        x.zero_()
        output.mul_(2).add_(1).square().sum().backward()
        assert_close(gradients_of(model), gradients_of(twin), F64)


@faces.in_containers
def test_a_weight_that_is_changed_before_backward_is_noticed_as_in_plain_torch(
    face: Face,
) -> None:
    with face.open(net, torch.device("cpu")) as (model, twin):
        for each in (model, twin):
            output = each(draw(7, 7))
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()


@pytest.mark.parametrize("end", ["close", "replaced"])
@faces.in_ours
def test_a_backward_pass_outlives_the_threads_of_its_forward_pass(
    face: Face, end: str, device: torch.device
) -> None:
    x = draw(7, 4, device=device)
    with face.open(normed, device) as (model, twin):
        for each in (model.eval(), twin.eval()):
            weight = face.part(each)[3].weight
            output = each(x)
            if each is model and end == "close":
                model.close()
            elif end == "replaced":
                face.part(each)[0] = nn.Linear(4, 5).to(weight)
                each(x)
            loss_of(output).backward()
        assert face.part(model)[3].weight.grad.any()
        assert_close(gradients_of(model)[4:], gradients_of(twin)[4:], F64)


# --- random numbers -------------------------------------------------------------------------------


@faces.in_containers
def test_random_numbers_are_those_of_the_processes_seed(face: Face, device: torch.device) -> None:
    def build(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)).double()

    x = torch.ones(9, 3, dtype=F64, device=device)
    with face.open(build, device) as (model, _):
        model(x)  # now it is known that the model draws
        torch.manual_seed(3)
        first, second = model(x), model(x)
        assert not torch.equal(first, second)
        if hasattr(model, "close"):
            model.close()
        torch.manual_seed(3)
        assert torch.equal(model(x), first)  # also in the first pass of new threads
        assert torch.equal(model(x), second)


def test_every_replica_of_columns_draws_other_numbers(device: torch.device) -> None:
    columns = phalanx.ModelParallel(dim=1)
    for _ in range(2):
        columns.add(nn.Dropout(0.5), device)
    with parallel(nn.Sequential(columns), device, 2) as model:
        drawn = model(torch.ones(4, 30, device=device))
    quarters = [*drawn[:2].chunk(2, 1), *drawn[2:].chunk(2, 1)]
    for index, quarter in enumerate(quarters):
        assert not any(torch.equal(quarter, other) for other in quarters[:index])


# --- threads --------------------------------------------------------------------------------------


def worker_names() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("phalanx-replica"))


@faces.in_ours
def test_threads_begin_with_the_first_pass_and_end_with_the_container(face: Face) -> None:
    x = draw(5, 7)
    with face.open(net, torch.device("cpu")) as (model, _):
        assert worker_names() == []
        for _ in range(2):
            model(x)
            model(x)
            assert worker_names() == NAMES
            model.close()
            model.close()
            assert worker_names() == []
        with contextlib.suppress(ZeroDivisionError), model:
            model(x)
            raise ZeroDivisionError
        assert worker_names() == []
        other = copy.deepcopy(model)
        other(x)
        made = [t for t in threading.enumerate() if t.name in NAMES]
        del other
        gc.collect()
        for thread in made:
            thread.join(DEADLINE_S)
        assert worker_names() == []


@faces.in_ours
def test_columns_and_replicas_run_at_the_same_time(face: Face) -> None:
    barrier, names = threading.Barrier(K), []

    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            barrier.wait(DEADLINE_S)
            names.append(threading.current_thread().name)
            return x

    with face.open(always(Meets), torch.device("cpu")) as (model, _):
        model(draw(5, 4))
    assert sorted(names) == NAMES


@faces.in_ours
def test_replicas_share_the_cores(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2 * K))
    seen: list[int] = []
    before = torch.get_num_threads()
    with phalanx.DataParallel(net(), K) as first, faces.Sum() as second:
        for seed in range(K):
            second.add(net(seed), "cpu")
        model = first if face is faces.REPLICATED[0] else second
        for child in model.children():
            child.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
        model(draw(5, 7))
    assert torch.get_num_threads() == before
    assert seen == [2] * K


@faces.in_ours
def test_threads_that_call_one_container_lose_no_count_and_draw_each_their_own(face: Face) -> None:
    start, found = threading.Barrier(2), []

    def build(seed: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).double()

    with face.open(build, torch.device("cpu")) as (model, _):

        def call() -> None:
            start.wait(DEADLINE_S)
            found.extend(model(draw(64, 3)) for _ in range(10))

        callers = [threading.Thread(target=call) for _ in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(DEADLINE_S)
        assert worker_names() == NAMES
        counts = [each for name, each in model.named_buffers() if name.endswith("tracked")]
        assert [each.item() for each in counts] == [20] * len(counts) != []
    masks = [output == 0 for output in found]
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


@faces.in_containers
def test_applying_nothing_changes_nothing(face: Face, device: torch.device) -> None:
    """Also a callback that no file can hold, at which cunn's next pass broke."""
    lock, visited = threading.Lock(), []

    def nothing(module: nn.Module) -> None:
        with lock:
            visited.append(type(module).__name__)

    with face.open(net, device) as (model, twin):
        assert model.apply(nothing) is model
        assert visited.count("ReLU") == 2 * face.num_modules
        for seed in range(2):
            assert_equal_pass(model, twin, draw(7, 7, seed=seed, device=device))
            for each in (model, twin):
                sgd(each.parameters()).step()
            model.apply(nothing)
        assert_close(list(model.parameters()), list(twin.parameters()), F64)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [False, True], ids=["default", "side"])
def test_streams_do_not_show_in_the_result(stream: bool, gpu: torch.device) -> None:
    """Exactly equal to the pass on the default stream."""
    wide = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 5)).double().to(gpu)
    x = draw(301, 64, device=gpu)

    def run() -> dict[str, Any]:
        with parallel(copy.deepcopy(wide), gpu) as model:
            one_pass(model, x)
            found = one_pass(model, x)
            torch.accelerator.current_stream().synchronize()
            return found

    expected = run()
    torch.accelerator.synchronize()
    with torch.Stream(gpu) if stream else torch.accelerator.current_stream(gpu):
        got = run()
    torch.accelerator.synchronize()
    assert_same_bits(got, expected)


def test_a_compiled_model_leaves_its_containers_as_they_are() -> None:
    torch._dynamo.reset()
    columns = phalanx.ModelParallel(dim=1).add(nn.Linear(4, 2).double())
    columns.add(nn.Linear(4, 3).double())
    whole = nn.Sequential(phalanx.DataParallel(net(), 2), nn.Tanh(), columns)
    twin = nn.Sequential(net(), nn.Tanh(), copy.deepcopy(columns))
    assert_equal_pass(torch.compile(whole, backend="eager"), twin, draw(7, 7))

"""What the authors of the original containers tested, tested here.

fbcunn's `test_DataParallel`, `test_ModelParallel`, `test_OneBit*` and cunn's
`test_DataParallelTable`, case by case (those for `nn.GPU` are in `test_containers.py`). Where an
original compared norms, or a value with itself, or was never run, here is what its authors meant.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.codecs import Codec, Feedback, OneBit
from phalanx.errors import ConfigError
from tests.columns import columns_of_layer
from tests.conformance.containers import (
    COPIES,
    EachOf,
    Second,
    Slices,
    assert_equal_pass,
    colour_net,
    draw,
    fresh,
    loss_of,
    one_pass,
    parallel,
    places,
    replica_outputs,
)
from tests.products import in_pairs
from tests.zoo import (
    TOLERANCE,
    assert_close,
    assert_same_bits,
    gradients_of,
    state_of,
    twin_of,
)

pytestmark = pytest.mark.promise("torch7")

mse = nn.functional.mse_loss
STEPS = 10
F64 = torch.float64
ROWS = {
    "1": lambda k: 1,
    "2": lambda k: 2,
    "k-1": lambda k: k - 1,
    "k": lambda k: k,
    "2k-1": lambda k: 2 * k - 1,
    "2k": lambda k: 2 * k,
    "9": lambda k: 9,
    "15": lambda k: 15,
}


# --- fbcunn: DataParallel -------------------------------------------------------------------------


class TestFbcunnDataParallel:
    """A perceptron per device; the input is one vector, cut into as many pieces.

    65 hidden units where the original has 512, with which its learning rate diverges.
    """

    REPLICAS = 3

    @pytest.fixture
    def net(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(32, 65), nn.Tanh(), nn.Linear(65, 65), nn.Tanh(), nn.Linear(65, 1)]
        return nn.Sequential(*layers).to(device)

    def test_all_columns_give_the_same_output(self, net: nn.Module, device: torch.device) -> None:
        row = draw(32, device=device, dtype=torch.float32)
        outputs = replica_outputs(net, device, row)
        assert len(outputs) == self.REPLICAS
        for output in outputs:
            assert torch.equal(output, outputs[0])
        # A row alone and a row of a matrix go through different kernels.
        assert_close(outputs[0][0], copy.deepcopy(net).cpu()(row.cpu()), torch.float32)

    def test_each_slice_of_the_output_is_what_a_copy_of_that_column_gives(
        self, net: nn.Module, device: torch.device
    ) -> None:
        on_cpu = copy.deepcopy(net).cpu()
        with parallel(net, device, output="cat(0)") as model, torch.no_grad():
            for seed in range(STEPS):
                wide = draw(32 * self.REPLICAS, seed=seed, dtype=torch.float32)
                output = model(wide.to(device)).cpu()
                pieces = torch.cat([on_cpu(piece) for piece in wide.split(32)])
                assert (output - pieces).norm() < 1e-5

    def test_columns_of_their_own_weights_see_their_slice(self, device: torch.device) -> None:
        """As the original's columns, which nothing kept equal; a subclass here."""
        torch.manual_seed(1)
        columns = [nn.Sequential(nn.Linear(32, 8), nn.Tanh()).to(device) for _ in range(3)]
        twins = copy.deepcopy(columns)
        container = Slices(dim=0)
        for column, place in zip(columns, places(device, 3), strict=True):
            assert container.add(column, place) is container
        wide = draw(96, device=device, dtype=torch.float32)
        with container:
            got = one_pass(container, wide)
        own = fresh(wide)
        pieces = [twin(piece) for twin, piece in zip(twins, own.split(32), strict=True)]
        loss_of(pieces).backward()
        assert_close(got["outputs"][0].cpu(), torch.cat(pieces).cpu(), torch.float32)
        assert_close(got["inputs"][0], own.grad, torch.float32)
        for column, twin in zip(columns, twins, strict=True):
            assert_close(gradients_of(column.to(device)), gradients_of(twin), torch.float32)

    def test_after_ten_steps_all_replicas_are_equal(
        self, net: nn.Module, device: torch.device
    ) -> None:
        twin = twin_of(net)
        with parallel(net, device) as model:
            sides = [
                (each, torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4))
                for each in (model, twin)
            ]
            for seed in range(STEPS):
                x = draw(9, 32, seed=seed, device=device, dtype=torch.float32)
                y = draw(9, 1, seed=seed, device=device, dtype=torch.float32)
                assert_close(model(x), copy.deepcopy(net)(x), torch.float32)
                for each, optimizer in sides:
                    optimizer.zero_grad()
                    mse(each(x), y).backward()
                    optimizer.step()
            row = draw(32, seed=STEPS, device=device, dtype=torch.float32)
            with torch.no_grad():
                outputs = model(row.expand(self.REPLICAS, 32))
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        for name, value in state_of(net).items():
            assert (value - state_of(twin)[name]).norm() < 1e-5, name


# --- fbcunn: ModelParallel ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_a_convolution_of_64_filters_in_four_columns_equals_the_unsplit_one(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller images than the original's 128×128. Sums have up to 363 terms of order 0.1."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 64, 11).to(device, dtype)
    model = phalanx.ModelParallel(dim=1)
    for column, place in zip(columns_of_layer(layer, 4), places(device, 4), strict=True):
        assert column.out_channels == 16
        model.add(column, place)
    x = draw(3, 3, 17, 19, device=device, dtype=dtype)
    mine, theirs = fresh(x), fresh(x)
    with model:
        output = model(mine)
        output.square().mean().backward()
        expected = layer(theirs)
        expected.square().mean().backward()
        assert_close(output, expected, dtype)
        assert_close(mine.grad, theirs.grad, dtype)
        for each in (model, layer):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert_close(model(x), layer(x), dtype)
    for index in range(4):
        own, column = slice(16 * index, 16 * (index + 1)), model.get(index)
        for name in ("weight", "bias"):
            whole, part = getattr(layer, name), getattr(column, name)
            assert_close(part.cpu(), whole[own].cpu(), dtype)
            assert_close(part.grad.cpu(), whole.grad[own].cpu(), dtype)
            assert part.grad.any()


# --- fbcunn: one bit ------------------------------------------------------------------------------


class TestFbcunnOneBit:
    CODEC = OneBit(min_elements=0)

    @staticmethod
    def round_trip(codec: Codec, gradient: Tensor) -> Tensor:
        return codec.decode(codec.encode(gradient), gradient.shape, gradient.dtype)

    def test_one_and_minus_one_are_their_rows_means_without_error(self) -> None:
        gradient = torch.tensor([[1.0], [-1.0]])
        feedback = Feedback(self.CODEC)
        bits, above, below = feedback.encode("weight", gradient)
        feedback.commit()
        assert bits.tolist() == [1]
        assert (above[0].item(), below[1].item()) == (1.0, -1.0)
        assert not any(error.any() for error in feedback.state_dict().values())

    def test_the_error_is_smaller_than_the_gradient(self) -> None:
        for seed in range(50):
            gradient = draw(100, 20, seed=seed, dtype=torch.float32)
            error = gradient - self.round_trip(self.CODEC, gradient)
            assert 0 < error.norm() < gradient.norm()

    def test_rows_of_one_positive_and_one_negative_value_come_back_exactly(self) -> None:
        values = draw(25, 2, dtype=torch.float32).abs() * torch.tensor([1.0, -1.0])
        assert torch.equal(self.round_trip(self.CODEC, values), values)

    def test_two_gradients_and_then_zeros_drain_to_their_sum(self) -> None:
        feedback = Feedback(self.CODEC)
        a, b = draw(10, 5, dtype=torch.float32), draw(10, 5, seed=1, dtype=torch.float32)
        sent = torch.zeros(10, 5)
        for gradient in (a, b, *[torch.zeros(10, 5)] * 100):
            payload = feedback.encode("weight", gradient)
            sent += self.CODEC.decode(payload, gradient.shape, gradient.dtype)
            feedback.commit()
        torch.testing.assert_close(sent, a + b, rtol=0, atol=5e-4)

    def test_five_senders_of_one_to_five_make_three_on_average(self) -> None:
        messages = [torch.full((5, 6), float(fill)) for fill in range(1, 6)]
        total = sum(self.round_trip(self.CODEC, message) for message in messages)
        assert torch.equal(total / 5, torch.full((5, 6), 3.0))


# --- cunn: DataParallelTable ----------------------------------------------------------------------


@in_pairs("way, rows, k", list(COPIES), ["k-1", "k", "2k-1", "2k", "9", "15"], [2, 3, 4])
def test_ten_nesterov_steps_with_tables_inside_a_model_equal_the_twins(
    k: int, rows: str, way: str, device: torch.device
) -> None:
    """The model is a copy of one that has run."""
    batch = ROWS[rows](k)
    twin = colour_net(device)
    around = copy.deepcopy(twin)
    around[2] = parallel(around[2], device, k)
    with around[2]:
        around(draw(batch, 3, 5, 4, device=device))
        model = COPIES[way](around)
    with model[2]:
        sides = [
            (each, torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9, nesterov=True))
            for each in (model, twin)
        ]
        for seed in range(STEPS):
            x = draw(batch, 3, 5, 4, seed=seed, device=device)
            assert_equal_pass(model, twin, x)
            for each, optimizer in sides:
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
            assert_close(state_of(model), state_of(twin), F64)


@pytest.mark.parametrize("rows", ["k-1", "2k-1"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_small_batch_of_images_equals_the_twins(k: int, rows: str, device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 5, 3).double().to(device)
    with parallel(net, device, k) as model:
        x = draw(ROWS[rows](k), 3, 6, 5, device=device)
        assert_equal_pass(model, twin_of(net), x)


def test_an_empty_leaf_goes_to_every_replica_and_the_other_is_split(device: torch.device) -> None:
    """Ours wants to be told: leaves of different batch size are an error otherwise (§9.4)."""
    net = Second().double().to(device)
    twin = copy.deepcopy(net)
    inputs = [torch.empty(0, dtype=torch.float64, device=device), draw(3, 10, device=device)]
    with parallel(net, device, layout=phalanx.Layout(dims={"table.0": None})) as model:
        assert_equal_pass(model, twin, inputs)
    assert twin.shapes == [(0,)]
    with parallel(net, device) as model, pytest.raises(ConfigError, match=r"`0\.1`.* 0 rows"):
        model(inputs)


@pytest.mark.parametrize("rows", ["k", "1", "2"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_an_identity_gives_back_what_it_gets_to_the_bit(
    k: int, rows: str, device: torch.device
) -> None:
    linear = nn.Linear(10, 10).to(device)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(10))
        linear.bias.zero_()
    batch = ROWS[rows](k)
    x = draw(batch, 10, device=device, dtype=torch.float32)
    cotangent = draw(batch, 10, seed=1, device=device, dtype=torch.float32)
    with parallel(linear, device, k) as model:
        own = fresh(x)
        output = model(own)
        output.backward(cotangent)
        assert torch.equal(output, x)
        assert torch.equal(own.grad, cotangent)
    with parallel(EachOf(linear), device, k) as model:
        table = fresh([x, x])
        outputs = model(table)
        torch.autograd.backward(outputs, [cotangent, 2 * cotangent])
        assert all(torch.equal(output, x) for output in outputs)
        assert torch.equal(table[0].grad, cotangent)
        assert torch.equal(table[1].grad, 2 * cotangent)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["double", "bfloat16"])
def test_a_change_of_type_after_a_pass_reaches_the_replicas(
    dtype: torch.dtype, device: torch.device
) -> None:
    net = colour_net(device)[2].float()
    colours = [draw(5, 1, 5, 4, seed=seed, device=device, dtype=torch.float32) for seed in range(3)]
    with parallel(net, device) as model:
        for kind in (torch.float32, dtype, torch.float32):
            assert model.to(kind) is model
            own = [colour.to(kind) for colour in colours]
            outputs = model(own)
            assert {output.dtype for output in outputs} == {kind}
            loss_of(outputs).backward()
            # bfloat16 keeps 8 bits: one rounding is 4e-3, and there are two layers.
            near = TOLERANCE.get(kind, 2e-2)
            torch.testing.assert_close(outputs, copy.deepcopy(net)(own), rtol=near, atol=near)
            assert {p.grad.dtype for p in model.parameters()} == {kind}
            model.zero_grad()


class TestFlatSizes:
    """The original's own number: a second layer of 10·5 + 5 parameters and no more."""


class TestMisc:
    """Threads with something to run first."""

    @pytest.fixture
    def net(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(10, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 5)]
        return nn.Sequential(*layers).double().to(device)

    def test_every_thread_is_prepared_once_before_it_works(
        self, net: nn.Module, device: torch.device
    ) -> None:
        here = threading.local()
        prepared: list[tuple[str, str]] = []
        seen: list[str] = []

        def prepare(word: str) -> None:
            here.words = [*getattr(here, "words", []), word]
            prepared.append((word, threading.current_thread().name))

        net[2].register_forward_hook(lambda *_: seen.append("".join(here.words)))
        model = parallel(net, device)
        assert model.threads(lambda: prepare("a")) is model
        model.threads(lambda: prepare("b"))  # a second time before the first pass: cunn's crash
        assert prepared == []
        with model:
            for _ in range(2):
                model(draw(7, 10, device=device))
        assert seen == ["ab"] * 6
        names = {name for _, name in prepared}
        assert len(prepared) == 6
        assert len(names) == 3
        assert threading.current_thread().name not in names


def test_a_lookup_first_needs_no_input_gradient(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(12, 3)).double().to(device)
    words = torch.tensor([[3, 1], [0, 9], [3, 3], [2, 1], [7, 0]], device=device)
    with parallel(net, device) as model:
        assert_equal_pass(model, twin_of(net), words)


def test_three_passes_without_zeroing_and_one_update(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 5)).double().to(device)
    twin = twin_of(net)
    with parallel(net, device) as model:
        for seed, rows in enumerate((9, 2, 7)):
            x = draw(rows, 10, seed=seed, device=device)
            loss_of(model(x)).backward()
            loss_of(twin(x)).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        torch.optim.SGD(twin.parameters(), lr=0.5).step()
        assert_close(model(x), twin(x), F64)
    assert_close(state_of(net), state_of(twin), F64)


@pytest.mark.parametrize("threads", [False, True], ids=["plain", "threads"])
def test_applying_nothing_changes_nothing(threads: bool, device: torch.device) -> None:
    """Also a callback that no file can hold, at which the original's next pass broke."""
    lock = threading.Lock()
    visited: list[str] = []

    def nothing(module: nn.Module) -> None:
        with lock:
            visited.append(type(module).__name__)

    net = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 5)).double().to(device)
    twin = twin_of(net)
    model = parallel(net, device)
    if threads:
        model.threads(lambda: None)
    with model:
        assert model.apply(nothing) is model
        assert sorted(visited) == sorted(["Linear", "Tanh", "Linear", "Sequential", "DataParallel"])
        for seed in range(STEPS):
            model.apply(nothing)
            assert_equal_pass(model, twin, draw(7, 10, seed=seed, device=device))
            for each in (model, twin):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
            model.apply(nothing)
    assert_close(state_of(net), state_of(twin), F64)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [False, True], ids=["default", "side"])
@pytest.mark.parametrize("threads", [False, True], ids=["plain", "threads"])
def test_streams_do_not_show_in_the_result(stream: bool, threads: bool, gpu: torch.device) -> None:
    """Exactly equal to the pass on the default stream."""
    net = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 5)).double().to(gpu)
    x = draw(301, 64, device=gpu)

    def run(module: nn.Module) -> dict[str, Any]:
        with parallel(copy.deepcopy(module), gpu) as model:
            if threads:
                model.threads(lambda: None)
            one_pass(model, x)
            found = one_pass(model, x)
            torch.accelerator.current_stream().synchronize()
            return found

    expected = run(net)
    torch.accelerator.synchronize()
    with torch.Stream(gpu) if stream else torch.accelerator.current_stream(gpu):
        got = run(net)
    torch.accelerator.synchronize()
    assert_same_bits(got, expected)

"""Torch7's own calls: the explicit passes, the names, and the page that tells of them.

Every explicit pass is held against autograd over a twin in plain PyTorch. Most twins are float64,
where sums taken in another order differ in the sixteenth digit.
"""

from __future__ import annotations

import ast
import copy
import io
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.compat import torch7
from phalanx.errors import ConfigError, StateError
from tests.columns import columns_of_layer
from tests.contracts.containers import cpu_and_others, joined
from tests.zoo import ACCELERATOR_FIRST

pytestmark = [pytest.mark.devices, pytest.mark.promise("torch7")]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30
THREE = cpu_and_others(3)
LR = 0.25


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3)
    ).double()


def close(actual: Any, expected: Any) -> None:
    same_device = not ACCELERATOR_FIRST
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, check_device=same_device)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def stored(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Mixture(torch7.AbstractParallel):
    """Columns get the whole input; their outputs are summed."""

    def distribute(self, inputs):
        return [inputs] * len(self)

    def merge(self, outputs):
        return torch.stack([output.to(outputs[0].device) for output in outputs]).sum(0)


class Summed(nn.Module):
    """Mixture's twin."""

    def __init__(self, columns):
        super().__init__()
        self.columns = nn.ModuleList(columns)

    def forward(self, x):
        return torch.stack([column(x) for column in self.columns]).sum(0)


# A module with explicit passes on the CPU, and its twin in plain PyTorch; both [B, 4] -> [B, 3].
def table_pair():
    return torch7.DataParallelTable(0).add(net := mlp(), THREE), copy.deepcopy(net).cpu()


def flat_table_pair():
    made = torch7.DataParallelTable(0, True).add(net := mlp(), THREE)
    return made, copy.deepcopy(net).cpu()


def data_parallel_pair():
    made = torch7.DataParallel(0)
    for place in THREE:
        made.add(mlp(), place)
    return made, mlp()


def model_parallel_pair():
    layer = nn.Linear(4, 3).double()
    made = torch7.ModelParallel(1)
    for column, place in zip(columns_of_layer(layer, [2, 1]), THREE, strict=False):
        made.add(column, place)
    return made, layer


def mixture_pair():
    columns = [mlp(seed) for seed in range(3)]
    made = Mixture(0)
    for column, place in zip(columns, THREE, strict=True):
        made.add(column, place)
    return made, Summed(copy.deepcopy(columns)).cpu()


def gpu_pair():
    return torch7.GPU(net := mlp(), "cpu"), copy.deepcopy(net)


def explicit_pair():
    return torch7.Explicit(net := mlp()), copy.deepcopy(net)


PAIRS: dict[str, Callable[[], tuple[Any, nn.Module]]] = {
    "DataParallelTable": table_pair,
    "flattened": flat_table_pair,
    "DataParallel": data_parallel_pair,
    "ModelParallel": model_parallel_pair,
    "AbstractParallel": mixture_pair,
    "GPU": gpu_pair,
    "Explicit": explicit_pair,
}


@pytest.fixture(params=list(PAIRS))
def pair(request):
    made, twin = PAIRS[request.param]()
    yield made, twin
    for module in made.modules():
        if hasattr(type(module), "close"):
            module.close()


def in_twins_order(made: nn.Module, twin: nn.Module, own: list[Any]) -> list[Any]:
    """Columns of a split layer hold its rows: put them together as the layer has them."""
    if isinstance(made, torch7.ModelParallel):
        return [joined(own[0::2]), joined(own[1::2])]
    return [each.cpu() for each in own]


def assert_same_gradients(made: nn.Module, twin: nn.Module) -> None:
    for own, theirs in zip(
        in_twins_order(made, twin, gradients(made)), gradients(twin), strict=True
    ):
        close(own, theirs)


def assert_same_parameters(made: nn.Module, twin: nn.Module) -> None:
    own = in_twins_order(made, twin, list(made.parameters()))
    for parameter, theirs in zip(own, twin.parameters(), strict=True):
        close(parameter.detach(), theirs.detach())


# --- the seed's example ---------------------------------------------------------------------------


def test_the_training_example_of_the_seed_runs_line_by_line():
    twin = conv_net()
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    batches = [
        (draw(7, 2, 6, 6, seed=seed), torch.tensor([0, 2, 1, 1, 0, 2, 2])) for seed in range(3)
    ]
    criterion = torch7.Criterion(nn.CrossEntropyLoss())

    net = torch7.DataParallelTable(0)
    net.add(conv_net(), ["cpu", "cpu", "cpu"])
    for input, target in batches:
        output = net.forward(input)
        err = criterion.forward(output, target)
        net.zeroGradParameters()
        gradOutput = criterion.backward(output, target)
        gradInput = net.backward(input, gradOutput)
        net.updateParameters(LR)

        leaf = input.clone().requires_grad_()
        expected = twin(leaf)
        loss = F.cross_entropy(expected, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        close(output, expected.detach())
        close(err, loss.detach())
        close(gradInput, leaf.grad)
        assert_same_gradients(net, twin)
        assert_same_parameters(net, twin)
    net.close()


# --- explicit passes ------------------------------------------------------------------------------


def test_a_pass_equals_autograds(pair):
    made, twin = pair
    x, g = draw(5, 4), draw(5, 3, seed=1)
    leaf = x.clone().requires_grad_()
    expected = twin(leaf)
    expected.backward(g)
    output = made.forward(x)
    gradient = made.backward(x, g)
    close(output, expected.detach())
    close(gradient, leaf.grad)
    assert made.output is output
    assert made.gradInput is gradient
    assert not output.requires_grad
    assert not gradient.requires_grad
    assert_same_gradients(made, twin)


def test_the_two_passes_back_are_independent(pair):
    made, twin = pair
    x, g = draw(5, 4), draw(5, 3, seed=1)
    leaf = x.clone().requires_grad_()
    twin(leaf).backward(g)
    made.updateOutput(x)
    made.zeroGradParameters()
    close(made.updateGradInput(x, g), leaf.grad)
    assert all(not gradient.any() for gradient in gradients(made))
    before = made.gradInput
    assert made.accGradParameters(x, g) is None
    assert made.gradInput is before
    assert_same_gradients(made, twin)


def test_passes_accumulate_and_are_scaled(pair):
    made, twin = pair
    leaves = [draw(5, 4, seed=seed).requires_grad_() for seed in range(3)]
    made.zeroGradParameters()
    for scale, leaf in zip([1.0, -0.5, 3.0], leaves, strict=True):
        g = draw(5, 3, seed=7)
        twin(leaf).backward(scale * g)
        made.forward(leaf)
        close(made.backward(leaf, g, scale), leaf.grad / scale)
    assert_same_gradients(made, twin)
    twin(leaves[0]).backward(2 * draw(5, 3, seed=8))
    made.forward(leaves[0])
    made.accGradParameters(leaves[0], draw(5, 3, seed=8), 2)
    assert_same_gradients(made, twin)


def test_an_update_is_plain_gradient_descent(pair):
    made, twin = pair
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for seed in range(3):
        x, g = draw(5, 4, seed=seed), draw(5, 3, seed=seed + 9)
        optimizer.zero_grad()
        twin(x).backward(g)
        optimizer.step()
        made.zeroGradParameters()
        made.forward(x)
        made.backward(x, g)
        made.updateParameters(LR)
    assert_same_parameters(made, twin)


def test_an_immediate_update_leaves_gradients_alone(pair):
    made, twin = pair
    x, g = draw(5, 4), draw(5, 3, seed=1)
    twin(x).backward(g)
    torch.optim.SGD(twin.parameters(), lr=LR).step()
    made.zeroGradParameters()
    for gradient in gradients(made):
        gradient.fill_(7)
    made.forward(x)
    made.accUpdateGradParameters(x, g, LR)
    assert_same_parameters(made, twin)
    assert all((gradient == 7).all() for gradient in gradients(made))


def test_gradients_are_zeroed_where_they_lie(pair):
    made, _ = pair
    made.zeroGradParameters()
    places = [gradient.data_ptr() for gradient in gradients(made)]
    made.forward(draw(5, 4))
    made.backward(draw(5, 4), draw(5, 3))
    assert any(gradient.any() for gradient in gradients(made))
    made.zeroGradParameters()
    assert [gradient.data_ptr() for gradient in gradients(made)] == places
    assert all(not gradient.any() for gradient in gradients(made))


class TwoInTwoOut(nn.Module):
    """Nested inputs, one of integers; nested outputs, one of integers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs):
        words, both = inputs["words"], inputs["both"]
        h = self.embedding(words) + self.linear(both[0])
        return [h, {"square": h * both[1], "words": words}]


@pytest.mark.parametrize("kind", ["table", "explicit", "gpu"])
def test_gradients_of_nested_inputs_are_nested_like_them(kind):
    net = TwoInTwoOut().double()
    made = {
        "table": lambda: torch7.DataParallelTable(0).add(net, THREE),
        "explicit": lambda: torch7.Explicit(net),
        "gpu": lambda: torch7.GPU(net, "cpu"),
    }[kind]()
    twin = copy.deepcopy(net).cpu()
    inputs = {"words": torch.tensor([1, 6, 1, 0, 2]), "both": (draw(5, 4), draw(5, 3, seed=1))}
    g, h = draw(5, 3, seed=2), draw(5, 3, seed=3)
    leaves = [leaf.clone().requires_grad_() for leaf in inputs["both"]]
    expected = twin({"words": inputs["words"], "both": leaves})
    torch.autograd.backward([expected[0], expected[1]["square"]], [g, h])
    outputs = made.forward(inputs)
    close(outputs[1]["square"], expected[1]["square"].detach())
    assert torch.equal(outputs[1]["words"].cpu(), inputs["words"])
    gradient = made.backward(inputs, [g, {"square": h, "words": None}])
    assert gradient["words"] is None
    assert type(gradient["both"]) is tuple
    for own, leaf in zip(gradient["both"], leaves, strict=True):
        close(own, leaf.grad)
    assert_same_gradients(made, twin)
    if kind == "table":
        made.close()


def test_input_gradients_can_be_switched_off(pair):
    made, twin = pair
    x, g = draw(5, 4), draw(5, 3)
    twin(x).backward(g)
    made.gradInput = None
    made.forward(x)
    assert made.backward(x, g) is None
    assert made.gradInput is None
    assert_same_gradients(made, twin)
    made.gradInput = torch.empty(0)
    made.forward(x)
    assert made.backward(x, g).shape == x.shape


def forgotten(made, x):
    made.forward(x)
    made.clearState()


def updated(made, x):
    made.forward(x)
    made.zeroGradParameters()
    made.updateParameters(LR)


def unrecorded(made, x):
    with torch.no_grad():
        made.forward(x)


@pytest.mark.parametrize("before", [lambda *_: None, forgotten, updated, unrecorded])
@pytest.mark.parametrize(
    "call",
    ["backward", "updateGradInput", "accGradParameters", "accUpdateGradParameters"],
)
def test_a_pass_back_needs_a_forward_pass_of_these_values(pair, before, call):
    made, _ = pair
    x, g = draw(5, 4), draw(5, 3)
    before(made, x)
    rest = [LR] if call == "accUpdateGradParameters" else []
    with pytest.raises(StateError, match="needs the graph of a forward pass"):
        getattr(made, call)(x, g, *rest)


def test_a_pass_back_for_another_input_is_refused(pair):
    made, _ = pair
    x = draw(5, 4)
    made.forward(x)
    for other in (draw(5, 4, seed=1), draw(4, 4), [x]):
        with pytest.raises(StateError, match="`input` must be that of the last forward pass"):
            made.backward(other, draw(5, 3))
    assert not any(gradient is not None and gradient.any() for gradient in gradients(made))
    made.backward(x.clone(), draw(5, 3))  # of the same values


class Kept:
    """Lives as long as the graph that holds it."""


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, graphs):
        ctx.kept = Kept()
        graphs.append(weakref.ref(ctx.kept))
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g, None


def test_there_is_one_graph_at_a_time():
    graphs, alive = [], []
    net = torch7.Explicit(nn.Identity())

    def run(x):
        alive.append(sum(graph() is not None for graph in graphs))
        return Noted.apply(x, graphs)

    net.module.forward = run
    for _ in range(3):
        net.forward(torch.ones(2))
        net.backward(torch.ones(2), torch.ones(2))
    assert alive == [0, 0, 0]
    net.clearState()
    assert not any(graph() for graph in graphs)


def test_a_criterion_has_two_calls():
    criterion = torch7.Criterion(nn.MSELoss())
    x, y = draw(5, 3), draw(5, 3, seed=1)
    with pytest.raises(StateError):
        criterion.backward(x, y)
    leaf = x.clone().requires_grad_()
    loss = F.mse_loss(leaf, y)
    loss.backward()
    assert torch.equal(criterion.forward(x, y), loss.detach())
    assert torch.equal(criterion.backward(x, y), leaf.grad)
    assert criterion.gradInput.shape == x.shape
    with pytest.raises(StateError, match="`target` must be that of the last forward pass"):
        criterion.backward(x, x)
    assert criterion(leaf, y).requires_grad


# --- inside an ordinary model ---------------------------------------------------------------------


def test_called_as_a_module_it_stands_in_the_callers_graph(pair):
    made, twin = pair
    before = nn.Linear(4, 4).double()
    x = draw(5, 4).requires_grad_()
    twin(before(x)).square().sum().backward()
    expected, before.weight.grad, x_grad = before.weight.grad, None, x.grad
    x.grad = None
    nn.Sequential(before, made)(x).square().sum().backward()
    close(before.weight.grad, expected)
    close(x.grad, x_grad)
    assert_same_gradients(made, twin)


def test_explicit_passes_reach_a_container_inside_a_sequential():
    net = nn.Sequential(nn.Linear(4, 4).double(), phalanx.DataParallel(mlp(), THREE), nn.Tanh())
    twin = nn.Sequential(copy.deepcopy(net[0]), mlp(), nn.Tanh())
    x, g = draw(5, 4), draw(5, 3)
    leaf = x.clone().requires_grad_()
    twin(leaf).backward(g)
    explicit = torch7.Explicit(net)
    explicit.forward(x)
    close(explicit.backward(x, g), leaf.grad)
    assert_same_gradients(explicit, twin)
    net[1].close()


def test_two_threads_may_call_one_module():
    net = torch7.Explicit(nn.Linear(4, 3))
    arrived, gone = threading.Barrier(2, timeout=DEADLINE_S), threading.Event()

    def wait_for_the_other(_, args):
        arrived.wait()
        if args[0].shape[0] == 2:  # the second one goes on when the first has returned
            assert gone.wait(DEADLINE_S)

    outputs = {}

    def call(rows):
        outputs[rows] = net(torch.ones(rows, 4))
        gone.set()

    net.register_forward_pre_hook(wait_for_the_other)
    threads = [threading.Thread(target=call, args=(rows,)) for rows in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert outputs[1].requires_grad
    assert outputs[2].requires_grad


def test_keys_and_names_are_those_of_the_module_alone(pair):
    made, twin = pair
    if isinstance(made, phalanx.AbstractParallel):  # columns, not replicas
        assert next(iter(made.state_dict())).startswith("0.")
        return
    assert list(made.state_dict()) == list(twin.state_dict())
    assert [name for name, _ in made.named_parameters()] == list(twin.state_dict())
    for outer in (made, nn.Sequential(made)):
        values = {key: value + 1 for key, value in outer.state_dict().items()}
        outer.load_state_dict(values)
        assert all(torch.equal(value, values[key]) for key, value in outer.state_dict().items())


def test_a_wrapped_module_inside_a_wrapped_model_shows_its_names():
    def build():
        inner = [torch7.Explicit(nn.Linear(3, 2)), torch7.Explicit(nn.Sequential(nn.Linear(2, 2)))]
        return torch7.Explicit(nn.Sequential(*inner))

    first, second = build(), build()
    names = ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert list(first.state_dict()) == names
    assert [name for name, _ in first.named_parameters()] == names
    second.share(first, "weight")
    for one, other in zip(first.modules(), second.modules(), strict=True):
        if isinstance(one, nn.Linear):
            assert other.weight is one.weight
            assert other.bias is not one.bias
    assert [name for name, _ in second.named_parameters()] == names
    assert first.get(0).in_features == 3  # an attribute of the module inside


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: torch7.DataParallelTable(0).add(net, "cpu"),
        lambda net: torch7.DataParallel(0).add(net, "cpu"),
        lambda net: torch7.ModelParallel(0).add(net, "cpu"),
        lambda net: torch7.GPU(net, "cpu"),
    ],
)
def test_containers_take_the_module_out_of_its_wrapper(wrap):
    net = mlp()
    assert wrap(torch7.Explicit(net)).get(0) is net


# --- names ----------------------------------------------------------------------------------------


def test_modes_are_switched_in_all_modules_inside(pair):
    made, _ = pair
    assert made.training
    assert made.evaluate() is made
    assert not made.training
    assert not any(module.training for module in made.modules())
    assert made.train() is made
    assert all(module.training for module in made.modules())


def test_children_are_counted_from_zero(pair):
    made, _ = pair
    assert isinstance(made.get(0), nn.Module)
    with pytest.raises(StateError, match="needs a module"):
        torch7.DataParallelTable(0).get(0)


def test_a_clone_is_equal_and_independent(pair):
    made, _ = pair
    x = draw(5, 4)
    expected = made.forward(x)
    made.backward(x, draw(5, 3))
    made.gradInput = None
    twin = made.clone()
    assert type(twin) is type(made)
    assert torch.equal(twin.forward(x), expected)
    assert twin.gradInput is None
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert torch.equal(twin.forward(x), expected)
    if hasattr(type(twin), "close"):
        twin.close()


def test_a_shared_clone_trains_with_its_model(pair):
    made, _ = pair
    x, g = draw(5, 4), draw(5, 3)
    twin = made.clone("weight", "bias", "gradWeight", "gradBias")
    for net in (made, twin):
        net.forward(x)
        net.backward(x, g)
    made.updateParameters(LR)
    assert torch.equal(made.forward(x), twin.forward(x))
    only = made.clone("weight")
    names = [name for name, _ in made.named_parameters()]
    shared = [a is b for a, b in zip(only.parameters(), made.parameters(), strict=True)]
    assert shared == [name.endswith("weight") for name in names]
    with pytest.raises(ConfigError, match="`names` must hold names of parameters"):
        twin.share(made, "gradWeight")
    for net in (twin, only):
        if hasattr(type(net), "close"):
            net.close()


def test_reset_draws_anew_with_the_deviation_asked():
    net = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
    made = torch7.DataParallelTable(0).add(net, THREE)
    before = net[0].weight.clone()
    assert made.reset() is made
    torch.manual_seed(1)
    made.reset()
    torch.manual_seed(1)
    assert torch.equal(net[0].weight.cpu(), nn.Linear(100, 100).weight)
    assert not torch.equal(net[0].weight, before)
    made.reset(0.5)
    assert net[0].weight.std().item() == pytest.approx(0.5, rel=0.02)  # of 10,000 draws
    assert net[0].weight.abs().max() <= 0.5 * 3**0.5
    assert net[1].weight.eq(1).all()


def test_clear_state_forgets_what_passes_keep(pair):
    made, _ = pair
    x = draw(5, 4)
    made.forward(x)
    made.backward(x, draw(5, 3))
    assert made.clearState() is made
    assert made.output.numel() == made.gradInput.numel() == 0


def test_threads_run_the_function_before_or_after_add():
    ran = []
    net = torch7.DataParallelTable(0, True).threads(lambda: ran.append(threading.get_ident()))
    with net.add(mlp(), THREE).threads(lambda: ran.append(0)).threads():
        net.forward(draw(5, 4))
        net.forward(draw(5, 4))
        net.syncParameters()
        assert len(ran) == 6
        assert ran.count(0) == 3
        assert len(set(ran)) == 4


def test_what_was_set_before_add_stays():
    seen = []
    net = torch7.DataParallelTable(0).evaluate()
    net.register_forward_hook(lambda *_: seen.append(1))
    with net.add(mlp(), THREE):
        assert not net.training
        net.forward(draw(5, 4))
        assert seen == [1]
        assert list(net.state_dict()) == list(mlp().state_dict())


def test_nccl_that_does_not_serve_the_devices_is_one_warning():
    net = torch7.DataParallelTable(0, True, True)
    with pytest.warns(UserWarning, match=r"`useNCCL` has no effect on .*cpu.*, which") as caught:
        net.add(mlp(), THREE)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with net:
        close(net.forward(draw(5, 4)), mlp()(draw(5, 4)).detach())
    with pytest.raises(ConfigError, match="`useNCCL` must come with `flattenParams`"):
        torch7.DataParallelTable(0, False, True)


class Flattened(nn.Module):
    """Returns (B·T, C) of [B, T, F], as for a criterion of Torch7's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(0, 1)


class Means(Flattened):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


@pytest.mark.parametrize("kind", [torch7.DataParallel, torch7.DataParallelTable])
@pytest.mark.parametrize(
    ("make", "shape", "sizes"),
    [(mlp, [12], [4, 4, 4]), (Flattened, [7, 2, 4], [3, 2, 2]), (Means, [5, 4], [2, 2, 1])],
    ids=["wide vectors", "rows and steps", "scalars"],
)
def test_outputs_of_any_size_are_joined(kind, make, shape, sizes):
    """fbcunn's own test splits one wide vector into an input for each column."""
    twin, x = make(), draw(*shape).requires_grad_()
    outputs = [twin(part) for part in x.split(sizes)]
    expected = torch.stack(outputs) if make is Means else torch.cat(outputs)
    gradient = draw(*expected.shape, seed=1)
    expected.backward(gradient)
    with kind(0) as net:
        for place in THREE:
            net.add(make(), place)
        close(net.forward(x), expected.detach())
        close(net.backward(x, gradient), x.grad)
        close(gradients(net), gradients(twin))


@pytest.mark.parametrize("kind", [torch7.DataParallel, torch7.DataParallelTable])
def test_an_empty_tensor_of_a_table_is_given_whole(kind):
    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, table: list[Tensor]) -> Tensor:
            assert table[0].shape == (0,)
            return self.layers(table[1])

    twin, x = mlp(), draw(7, 4).requires_grad_()
    expected, table = twin(x), [torch.empty(0), x]
    expected.backward(torch.ones(7, 3))
    with kind(0) as net:
        for place in THREE:
            net.add(Second(), place)
        close(net.forward(table), expected.detach())
        empty, found = net.backward(table, torch.ones(7, 3))
        assert empty.shape == (0,)
        close(found, x.grad)


# --- docs/migrating.md ----------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")


def rows_of_bugs():
    """Return [thread, what went wrong, test] of every row of the page's lists of bugs."""
    lists = PAGE.partition("## Bugs of the originals, and the test of each")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lists if "|" in line]
    return [row for row in rows if row[0] != "thread" and set(row[0]) != {"-"}]


def names_of_tests(path):
    """Return the names of all tests in a file, those in classes as ``Class::test``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = [("", tree.body)]
    bodies += [
        (f"{node.name}::", node.body) for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    return {
        before + node.name
        for before, body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_bug_of_the_page_has_a_test_that_exists():
    rows = rows_of_bugs()
    assert len(rows) > 40
    for thread, fault, test in rows:
        assert thread.startswith(("https://github.com/", "found in "))
        assert fault
        path, _, name = test.partition("::")
        assert name in names_of_tests(ROOT / path), test


def test_every_test_of_a_bug_is_on_the_page():
    listed = {row[2] for row in rows_of_bugs()}
    path = "tests/conformance/test_torch7_bugs.py"
    unlisted = {f"{path}::{name}" for name in names_of_tests(ROOT / path)} - listed
    assert unlisted == {
        f"{path}::test_what_is_written_into_a_flat_tensor_reaches_other_devices",
        f"{path}::test_a_gpu_that_is_not_there_is_one_warning",
    }


def test_the_scripts_of_the_page_train_the_same_weights():
    place = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, place)
    expected = list(place["plain_net"].parameters())
    for net in (place["conv_net"], place["explicit"]):
        for own, theirs in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(own, theirs, rtol=0, atol=1e-6)  # five steps in float32
    assert not torch.equal(expected[0], place["make_conv_net"]()[0].weight)


def test_the_names_of_the_page_exist():
    names = re.findall(
        r"^\| [^|]* \| [^|]* \| ([^|]*) \|$", PAGE.partition("## What is")[0], re.MULTILINE
    )
    words = {word for cell in names for word in re.findall(r"(?:net|dpt)\.(\w+)", cell)}
    assert len(words) > 15
    for word in words:
        assert hasattr(torch7.DataParallelTable, word), word

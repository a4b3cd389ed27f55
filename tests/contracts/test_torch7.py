"""Torch7's own calls: explicit passes, columns, flat parameters, and the page that tells of them.

What its containers share with ours is in `test_containers.py`. Every explicit pass is held against
autograd over a twin in plain PyTorch. Most twins are float64, where sums taken in another order
differ in the sixteenth digit. docs/original_faults.md names the tests of faults of the originals.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.compat import torch7
from phalanx.errors import ConfigError, StateError
from tests.contracts.containers import CPU, cpu_and_others, draw, stored
from tests.contracts.faces import Face, K, columns
from tests.zoo import ACCELERATOR_FIRST, assert_close, cnn, gradients_of, image_batch, twin_of
from tests.zoo import mlp as zoo_mlp

pytestmark = [pytest.mark.devices, pytest.mark.promise("torch7")]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30
F64 = torch.float64
THREE = cpu_and_others(3)
LR = 0.25


def net_of(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers).double()


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3)
    ).double()


def table(module: nn.Module, *options: bool) -> torch7.DataParallelTable:
    return torch7.DataParallelTable(0, *options).add(module, THREE)


def close(actual: Any, expected: Any) -> None:
    same_device = not ACCELERATOR_FIRST
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, check_device=same_device)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.cpu() for p in module.parameters()]


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in module.parameters()]


class ToAll(torch7.AbstractParallel):
    """A column of a script of Torch7's own."""

    def _distributeInput(self, input: Any) -> list[Any]:
        return [input] * len(self)


def equal_columns(nets: list[nn.Module], devices: list[torch.device]) -> Any:
    made = torch7.DataParallel(0)
    for device in devices:
        made.add(twin_of(nets[0]), device)
    return made


FACES = [
    Face("table", lambda nets, devices: torch7.DataParallelTable(0).add(nets[0], devices)),
    Face("flat", lambda nets, devices: torch7.DataParallelTable(0, True).add(nets[0], devices)),
    Face("DataParallel", equal_columns),
    Face("ModelParallel", columns(torch7.ModelParallel), K),
    Face("AbstractParallel", columns(ToAll), K),
    Face("GPU", lambda nets, devices: torch7.GPU(nets[0], devices[0])),
    Face("Explicit", lambda nets, _: torch7.Explicit(nets[0])),
]


@pytest.fixture(params=FACES, ids=[face.name for face in FACES])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, nn.Module]]:
    """Give a module with explicit passes and its twin; both take [B, 4]."""
    with request.param.open(mlp, CPU) as both:
        yield both


def g_for(made: nn.Module, seed: int = 0) -> Tensor:
    """Return a gradient of the outputs of one of `pair`."""
    return draw(5, 9 if isinstance(made, torch7.AbstractParallel) else 3, seed=seed)


# --- the training example -------------------------------------------------------------------------


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
        close(gradients(net), gradients(twin))
        close(values(net), values(twin))
    net.close()


# --- explicit passes ------------------------------------------------------------------------------


def test_a_pass_equals_autograds(pair):
    made, twin = pair
    x, g = draw(5, 4), g_for(made, seed=1)
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
    close(gradients(made), gradients(twin))


def test_the_two_passes_back_are_independent(pair):
    made, twin = pair
    x, g = draw(5, 4), g_for(made, seed=1)
    leaf = x.clone().requires_grad_()
    twin(leaf).backward(g)
    made.updateOutput(x)
    made.zeroGradParameters()
    close(made.updateGradInput(x, g), leaf.grad)
    assert all(not gradient.any() for gradient in gradients(made))
    before = made.gradInput
    assert made.accGradParameters(x, g) is None
    assert made.gradInput is before
    close(gradients(made), gradients(twin))


def test_passes_accumulate_and_are_scaled(pair):
    made, twin = pair
    leaves = [draw(5, 4, seed=seed).requires_grad_() for seed in range(3)]
    made.zeroGradParameters()
    for scale, leaf in zip([1.0, -0.5, 3.0], leaves, strict=True):
        g = g_for(made, seed=7)
        twin(leaf).backward(scale * g)
        made.forward(leaf)
        close(made.backward(leaf, g, scale), leaf.grad / scale)
    close(gradients(made), gradients(twin))
    twin(leaves[0]).backward(2 * g_for(made, seed=8))
    made.forward(leaves[0])
    made.accGradParameters(leaves[0], g_for(made, seed=8), 2)
    close(gradients(made), gradients(twin))


def test_an_immediate_update_leaves_gradients_alone(pair):
    made, twin = pair
    x, g = draw(5, 4), g_for(made, seed=1)
    twin(x).backward(g)
    torch.optim.SGD(twin.parameters(), lr=LR).step()
    made.zeroGradParameters()
    for gradient in gradients(made):
        gradient.fill_(7)
    made.forward(x)
    made.accUpdateGradParameters(x, g, LR)
    close(values(made), values(twin))
    assert all((gradient == 7).all() for gradient in gradients(made))


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
    inputs = {"words": torch.tensor([1, 6, 1, 0, 2]), "both": (draw(5, 4), g_for(made, seed=1))}
    g, h = g_for(made, seed=2), g_for(made, seed=3)
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
    close(gradients(made), gradients(twin))
    if kind == "table":
        made.close()


def test_input_gradients_can_be_switched_off(pair):
    made, twin = pair
    x, g = draw(5, 4), g_for(made)
    twin(x).backward(g)
    made.gradInput = None
    made.forward(x)
    assert made.backward(x, g) is None
    assert made.gradInput is None
    close(gradients(made), gradients(twin))
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
    x, g = draw(5, 4), g_for(made)
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
            made.backward(other, g_for(made))
    assert not any(gradient is not None and gradient.any() for gradient in gradients(made))
    made.backward(x.clone(), g_for(made))  # of the same values


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


class Doubled(nn.Module):
    """Two rows of output for each of input, so that a count of inputs does not cut gradOutput."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).repeat_interleave(2, 0) * draw(2, 1, device=x.device).repeat(
            len(x), 1
        )


def test_output_gradients_are_cut_where_outputs_were_joined():
    net = Doubled()
    twin = twin_of(net)
    x, g = draw(5, 4), draw(10, 3, seed=1)
    leaf = x.clone().requires_grad_()
    twin(leaf).backward(g)
    with table(net) as made:
        assert_close(made.forward(x), twin(x).detach(), F64)
        assert_close(made.backward(x, g), leaf.grad, F64)
        assert_close(gradients_of(net), gradients_of(twin), F64)


def test_leaves_of_different_batch_sizes_are_refused_by_name():
    with (
        table(nn.Identity()) as net,
        pytest.raises(ConfigError, match=r"`0\.scale` must have 5 rows"),
    ):
        net.forward({"x": draw(5, 4), "scale": draw(4, 1)})


def test_a_container_may_be_handed_to_another_thread():
    with table(net_of(4, 3)) as net:
        x, g = draw(5, 4), draw(5, 3)
        expected = net.forward(x)
        got = []

        def work(own):
            got.append((own.forward(x), own.backward(x, g)))
            own.close()

        for own in (net, pickle.loads(pickle.dumps(net))):
            thread = threading.Thread(target=work, args=(own,))
            thread.start()
            thread.join(DEADLINE_S)
        assert len(got) == 2
        assert all(torch.equal(output, expected) for output, _ in got)
        assert torch.equal(got[0][1], got[1][1])


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


# --- columns and devices --------------------------------------------------------------------------


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


def test_use_nccl_is_taken_and_changes_nothing():
    with torch7.DataParallelTable(0, True, True).add(mlp(), THREE) as net:
        close(net.forward(draw(5, 4)), mlp()(draw(5, 4)).detach())
    with pytest.raises(ConfigError, match="`useNCCL` must come with `flattenParams`"):
        torch7.DataParallelTable(0, False, True)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [False, True])
def test_the_first_device_may_be_any(first, gpu):
    devices = [gpu, "cpu"] if first else ["cpu", gpu]
    x, g, twin = draw(7, 4), draw(7, 3, seed=1), net_of(4, 3)
    leaf = x.clone().requires_grad_()
    twin(leaf).backward(g)
    with torch7.DataParallelTable(0).add(net_of(4, 3), devices) as net:
        assert_close(net.forward(x).cpu(), twin(x).detach(), F64)
        assert_close(net.backward(x, g), leaf.grad, F64)
        assert_close([p.grad.cpu() for p in net.parameters()], gradients_of(twin), F64)


@pytest.mark.parametrize("make", [torch7.DataParallel, torch7.DataParallelTable])
def test_columns_that_differ_are_refused_and_not_dropped(make):
    first, other = net_of(4, 3), net_of(4, 3)
    with torch.no_grad():
        other[0].bias[2] += 1
    made = make(0).add(first, "cpu")
    with pytest.raises(ConfigError, match=r"equal to the first column.*other values"):
        made.add(other, "cpu")
    for layer in (nn.ReLU(), net_of(4, 2), nn.Sequential(first[0], nn.Tanh())):
        with pytest.raises(ConfigError, match=r"equal to the first column.*has other layers"):
            made.add(layer, "cpu")
    kinds = [nn.Module(), nn.Module()]
    kinds[1].register_parameter("other", nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match="has other layers"):
        make(0).add(kinds[0], "cpu").add(kinds[1], "cpu")
    assert len(made.devices) == 1
    assert len(made.add(net_of(4, 3), "cpu").devices) == 2


def test_a_small_device_may_take_a_small_share_and_no_outputs():
    net, seen = net_of(4, 3), []
    net.register_forward_hook(lambda _, args, output: seen.append(len(output)))
    x = draw(10, 4)
    options = {"workloads": [1, 4], "output": "per_replica"}
    with phalanx.DataParallel(net, ["cpu", "cpu"], **options) as model:
        parts = model(x)
        assert sorted(seen) == [2, 8]
        assert [len(part) for part in parts] == [2, 8]
        assert_close(torch.cat(parts), twin_of(net)(x), F64)


def test_a_tensor_is_sent_to_the_destination_from_the_source():
    dest, source = torch.zeros(3, 4).T, torch.arange(12.0).reshape(4, 3)
    assert torch7.ModelParallel(0).gpuSend(dest, source) is dest
    source.add_(1)
    assert torch.equal(dest, torch.arange(12.0).reshape(4, 3))
    with pytest.raises(ConfigError, match=r"`dest` must have the shape of `source`"):
        torch7.ModelParallel(0).gpuSend(dest, source.T)


class Swapped(torch7.AbstractParallel):
    """Written as fbcunn's subclasses were: the old name of the rule."""

    def _distributeInput(self, input: Tensor) -> list[Tensor]:
        return list(input.chunk(2)[::-1])


def two(container: Any) -> Any:
    for place in THREE[:2]:
        container.add(mlp(), place)
    return container


def test_a_rule_of_ones_own_goes_by_its_old_name() -> None:
    x, plain = draw(5, 4), draw(5, 4).requires_grad_()
    first, second = plain.chunk(2)
    expected = torch.cat([mlp()(second), mlp()(first)])
    expected.sum().backward()
    with two(Swapped(0)) as net:
        output = net.forward(x)
        close(output, expected.detach())
        close(net.backward(x, torch.ones_like(output)), plain.grad)


# --- clones, modes, reset -------------------------------------------------------------------------


def test_a_shared_clone_trains_with_its_model(pair):
    made, _ = pair
    x, g = draw(5, 4), g_for(made)
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
    twin.close()
    only.close()


def norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def test_a_clone_of_a_gpu_is_a_gpu_and_a_gpu_may_hold_another():
    net = torch7.GPU(norm_net(), "cpu")
    x = draw(5, 4)
    net.evaluate()
    net.module.module[1].running_mean.fill_(0.5)
    expected = net.forward(x)
    assert net.output is expected
    assert net.module.module[1].running_mean.eq(0.5).all()
    clone = net.clone()
    assert type(clone) is torch7.GPU
    assert torch.equal(clone.forward(x), expected)
    around = torch7.GPU(net, "cpu")
    assert torch.equal(around.forward(x), expected)


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
    made.backward(x, g_for(made))
    assert made.clearState() is made
    assert made.output.numel() == made.gradInput.numel() == 0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inside = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * self.scale


class Redrawn(Scaled):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


@pytest.mark.parametrize("make", [Redrawn, lambda: nn.MultiheadAttention(4, 2), mlp])
def test_reset_reaches_every_parameter(make: Any) -> None:
    for wrap in (table, torch7.ModelParallel(0).add):
        module = make()
        for parameter in module.parameters():
            nn.init.constant_(parameter, 7.0)
        (wrap(module) if wrap is table else wrap(module, "cpu")).reset()
        assert not any(bool((parameter == 7).any()) for parameter in module.parameters())


# --- flat parameters ------------------------------------------------------------------------------


def test_flat_tensors_have_exactly_the_parameters_elements():
    """The authors' case: 10·5 + 5 elements, in the second of two layers."""
    inner = torch7.DataParallelTable(0, True).add(nn.Linear(10, 5), THREE)
    net = nn.Sequential(nn.Linear(10, 10).to(THREE[0]), inner.module)
    assert [each.shape for each in inner.getParameters()] == [(55,), (55,)]
    assert [each.shape for each in torch7.Explicit(net).getParameters()] == [(165,), (165,)]
    assert [each.shape for each in inner.getParameters()] == [(55,), (55,)]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("way", [lambda net: net, lambda net: net.clone(), stored])
def test_flat_tensors_stay_the_parameters(flatten, way):
    first = torch7.DataParallelTable(0, flatten).add(cnn(F64), THREE)
    first.getParameters()
    x, y = image_batch(7, F64)[0], draw(7, 4)
    net = way(first)
    values, grads = net.getParameters()
    twin = cnn(F64)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for _ in range(3):
        optimizer.zero_grad()
        twin(x).backward(y)
        optimizer.step()
        net.zeroGradParameters()
        net.forward(x)
        net.backward(x, y)
        values.sub_(grads, alpha=LR)  # what Torch7's optim does
        net.clearState()
    assert_close(list(net.parameters()), list(twin.parameters()), F64)
    assert values.data_ptr() == net.getParameters()[0].data_ptr()
    values.zero_()
    assert not net.forward(x).any()
    assert not any(parameter.any() for parameter in net.parameters())
    net.close()
    if net is not first:
        assert first.getParameters()[0].any()


def test_zeroing_keeps_gradients_flat():
    for net in (
        torch7.Explicit(zoo_mlp(F64)),
        torch7.DataParallelTable(0).add(zoo_mlp(F64), THREE),
    ):
        _, grads = net.getParameters()
        net(draw(5, 7)).sum().backward()
        assert grads.any()
        net.zeroGradParameters()
        assert not grads.any()
        net(draw(5, 7)).sum().backward()
        assert torch.equal(grads, torch.cat([g.flatten() for g in gradients_of(net)]))
        torch.optim.SGD(net.parameters(), lr=LR).zero_grad(set_to_none=False)
        assert not net.getParameters()[1].any()
        assert net.getParameters()[1].data_ptr() == grads.data_ptr()


@pytest.mark.parametrize("flatten", [False, True])
def test_gradients_are_right_when_only_the_flat_tensor_was_zeroed(flatten):
    twin = net_of(4, 5, 3)
    with table(net_of(4, 5, 3), flatten) as net:
        _, grads = net.getParameters()
        for seed in range(3):
            x, g = draw(7, 4, seed=seed), draw(7, 3, seed=seed + 5)
            twin.zero_grad()
            twin(x).backward(g)
            grads.zero_()
            net.forward(x)
            net.backward(x, g)
            assert_close(grads, torch.cat([p.grad.flatten() for p in twin.parameters()]), F64)


def test_flat_tensors_of_a_model_and_of_a_part_stay_right_in_either_order():
    for inner_first in (True, False):
        part = table(nn.Linear(10, 5), True)
        outer = torch7.Explicit(nn.Sequential(nn.Linear(10, 10).to(THREE[0]), part.module))
        if inner_first:
            part.getParameters()
        values, grads = outer.getParameters()
        inner, inner_grads = part.getParameters()
        assert (values.numel(), inner.numel()) == (165, 55)
        x, g = torch.ones(4, 10, device=THREE[0]), torch.ones(4, 5)
        outer.forward(x)  # flattening again here would take the part out of the whole
        outer.backward(x, g)
        assert torch.equal(inner_grads, grads[110:])
        assert inner_grads[50:].eq(4.0).all()
        values.fill_(0.5)
        assert inner.eq(0.5).all()
        assert outer.forward(x).eq(0.5 + 10 * 0.5 * 5.5).all()
        part.close()


def test_pinning_a_module_keeps_what_is_shared_or_flat():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    torch7.Explicit(inner).getParameters()
    values, grads = torch7.GPU(inner, "cpu").getParameters()
    assert values.numel() == grads.numel() == 24
    assert inner[1].weight is inner[0].weight
    values.fill_(2.0)
    assert inner[1].weight.eq(2).all()
    assert inner[1].bias.eq(2).all()


# --- docs/migrating.md ----------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")


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
        assert hasattr(torch7.DataParallelTable(0).add(nn.Linear(1, 1), "cpu"), word), word

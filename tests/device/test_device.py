"""The test device computes what the CPU computes, and is an accelerator in all that torch asks."""

from __future__ import annotations

import copy
import io
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# It changes with `native/` alone.
pytestmark = pytest.mark.night

FIRST, LAST = "dev:0", "dev:1"
STEPS = 4


class Sequence(nn.Module):
    """A small GPT: embeddings, a causal layer with dropout, and the tied matrix as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = x[:, :5].abs().mul(7).long() % 11
        h = self.tokens(ids) + self.positions(torch.arange(5, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(5, device=x.device, dtype=x.dtype)
        return self.layer(h, mask, is_causal=True) @ self.tokens.weight.t()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.view(-1, 4, 3))[0]


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), *layers, nn.Linear(3, 2))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Dropout(0.3), nn.Linear(5, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "gpt": Sequence,
    "lstm": partial(Recurrent, nn.LSTM),
    "gru": partial(Recurrent, nn.GRU),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    f"{kind.__name__}-{way}": partial(kind, **options, **{way: True})
    # A bias of keys has no gradient but rounding, which a small `eps` would blow up.
    for kind, options in ((torch.optim.SGD, {"lr": 0.05}), (torch.optim.AdamW, {"eps": 1e-3}))
    for way in ("fused", "foreach")
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> list[Tensor]:
    """Return what is left after some steps: losses, weights, buffers, on the CPU."""
    torch.manual_seed(3)
    losses = []
    for step in range(STEPS):
        x = torch.randn(7, 12, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [each.detach().cpu() for each in (*losses, *model.state_dict().values())]


@pytest.fixture(autouse=True)
def doubles() -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_is_that_of_the_cpu(name: str, optimizer: str) -> None:
    model = MODELS[name]()
    twin = copy.deepcopy(model).to(LAST)
    expected = train(model, OPTIMIZERS[optimizer](model.parameters()), "cpu")
    before = torch.dev.kernels(FIRST)
    found = train(twin, OPTIMIZERS[optimizer](twin.parameters()), LAST)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.dev.kernels(FIRST) == before


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def written(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    x = x.clone()
    write(x)
    return x


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "views": lambda x: (x.t(), x[1:, ::2], x.unfold(1, 2, 1), x.view(-1)[3:], x.diagonal()),
    "write through views": lambda x: written(x, lambda y: y.t()[1::2].mul_(3).add_(y[0, 0])),
    "fill": lambda x: written(x, lambda y: y[:, 1].fill_(2)),
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "out that grows": lambda x: torch.cat([x, x], out=x.new_empty(0)),
    "out of two": lambda x: torch.max(x, 1, out=(x.new_empty(0), x.new_empty(0, dtype=torch.long))),
    "index": lambda x: (x[[0, 2]], x[x > 0], x[torch.tensor([1, 1])], x[:, [2, 0]]),
    "index_put": lambda x: written(x, lambda y: y.__setitem__(y > 0, 0)),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 2, 0], device=x.device), x),
    "scatter": lambda x: x.scatter(1, torch.zeros(3, 1, dtype=torch.long, device=x.device), 5.0),
    "order": lambda x: (x.sort(), x.topk(2), x.argmax(1), x.unique(), (x > 0).nonzero()),
    "reduce": lambda x: (x.sum(), x.mean(0), x.std(), x.norm(), x.logsumexp(1), x.cumsum(0)),
    "matrices": lambda x: (x @ x.t(), torch.addmm(x, x[:, :3], x), x[0] @ x[1]),
    "linalg": lambda x: (torch.linalg.svdvals(x), torch.linalg.inv(x[:, :3]), x[:, :3].det()),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "types": lambda x: (x.float(), x.long(), x > 0, x.half().float(), x.to(torch.complex128)),
    "complex": lambda x: (torch.complex(x, x).conj().mul(2j), torch.view_as_real(x + 1j), (x * 1j)),
    "scalars": lambda x: (x + 1, 2 - x, x * torch.tensor(3.0), x.clamp(-1, 1), x.pow(2)),
    "pad": lambda x: (F.pad(x, (1, 2)), x.roll(1, 0), x.repeat(2, 1), x.flip(1)),
    "resize": lambda x: (x.clone().resize_(2, 2), x.clone().resize_(5, 4)[:3]),
    "set": lambda x: x.new_empty(0).set_(x.untyped_storage(), 2, (2, 2), (4, 1)),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    "losses": lambda x: (
        F.cross_entropy(x, x.argmin(1)),
        F.mse_loss(x, x + 1),
        F.smooth_l1_loss(x, -x),
    ),
    "norms": lambda x: (F.layer_norm(x, (4,)), F.group_norm(x, 2), F.normalize(x)),
    "foreach": lambda x: (torch._foreach_add([x, x[0]], 2.0), torch._foreach_norm([x, x[1]])),
    "clip": lambda x: nn.utils.clip_grad_norm_([with_grad(x), with_grad(x[0])], 0.5),
    "factories": lambda x: (torch.eye(3, device=x.device), torch.tril(torch.ones_like(x))),
    "packed": lambda x: nn.utils.rnn.pack_padded_sequence(x[..., None], [4, 3, 1], True).data,
    "numbers": lambda x: (x.tolist(), x[0, 0].item(), bool(x.any()), torch.equal(x, x.clone())),
    "format": lambda x: x.expand(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "chunks": lambda x: (x.split(2, 1), x.unbind(), torch.stack(x.chunk(2, 1))),
    "vmap": lambda x: torch.func.vmap(lambda row: row.dot(row))(x),
    "grad": lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
}


def with_grad(x: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(x.clone())
    parameter.grad = x.clone()
    return parameter


def to_cpu(value: Any) -> Any:
    def moved(leaf: Any) -> Any:
        return leaf.cpu() if isinstance(leaf, Tensor) else leaf

    return torch.utils._pytree.tree_map(moved, value)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_computes_what_the_cpu_computes(name: str) -> None:
    x = drawn(3, 4)
    expected, found = OPERATORS[name](x), OPERATORS[name](x.to(LAST))
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
    assert all(str(leaf.device) == LAST for leaf in leaves)
    torch.testing.assert_close(to_cpu(found), expected, rtol=0, atol=1e-12, equal_nan=True)


def test_only_foreach_steps_count_as_changes_of_a_parameter() -> None:
    """As on CUDA: who goes by the version counter alone misses a fused step."""
    versions = {}
    for way in ("fused", "foreach"):
        weight = nn.Parameter(drawn(3).to(FIRST))
        weight.grad = torch.ones_like(weight)
        before = weight.detach().clone()
        torch.optim.AdamW([weight], **{way: True}).step()
        assert not torch.equal(before, weight)
        versions[way] = weight._version
    assert versions["fused"] == 0 < versions["foreach"]


@pytest.mark.parametrize("ways", [("cpu", "dev:0"), ("dev:1", "cpu"), ("dev:0", "dev:1")])
@pytest.mark.parametrize("source", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]])
def test_copies_convert_and_are_counted(ways: tuple[str, str], source: Any) -> None:
    x = drawn(3, 4)
    first, last = source(x.to(ways[0])), source(x.flip(0).clone().to(ways[1]).float())
    number, num_bytes = torch.dev.copies(*ways)
    last.copy_(first)
    assert torch.equal(last.cpu(), source(x).float())
    assert torch.dev.copies(*ways) == (number + 1, num_bytes + last.nbytes)


def test_a_storage_moves_with_its_views() -> None:
    x = drawn(3, 4).to(FIRST)
    twin = copy.deepcopy([x, x[1]])
    twin[1].zero_()
    assert twin[0][1].tolist() == [0, 0, 0, 0]
    assert x.untyped_storage().cpu().nbytes() == x.nbytes
    assert x.cpu().numpy().shape == (3, 4)
    with pytest.raises(TypeError):
        x.numpy()


def test_each_thread_has_a_current_device_and_streams_of_its_own() -> None:
    seen = []

    def look() -> None:
        seen.append((torch.dev.current_device(), torch.dev.current_stream(1).stream_id))
        torch.dev.set_device(1)

    with torch.dev.device("dev:1"), torch.Stream("dev:1") as stream:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.dev.current_device() == 1
        assert torch.dev.current_stream() == stream
        assert str(torch.empty(2, device="dev").device) == LAST
        with torch.dev.device(0), torch.dev.stream(torch.dev.default_stream(0)):
            assert str(torch.empty(2, device="dev").device) == FIRST
        assert torch.dev.current_stream() == stream
    assert seen == [(0, 0)]
    assert torch.dev.current_device() == 0
    assert torch.dev.current_stream(1) == torch.dev.default_stream(1) != stream


def test_a_backward_runs_on_the_device_and_stream_of_its_forward() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((torch.dev.current_device(), torch.dev.current_stream()))
            return grad * 2

    x = torch.ones(3, device=LAST, requires_grad=True)
    stream = torch.Stream(LAST)
    stream.wait_stream(torch.dev.current_stream(1))
    with stream:
        loss = Look.apply(x).sum()
    torch.dev.current_stream(1).wait_stream(stream)
    loss.backward()
    assert seen == [(1, stream)]
    assert x.grad.tolist() == [2, 2, 2]


def test_each_device_has_a_generator() -> None:
    torch.manual_seed(5)
    first, last = (torch.randn(3, device=device) for device in (FIRST, LAST))
    assert torch.equal(first.cpu(), last.cpu())
    state = torch.dev.get_rng_state(1)
    own = torch.Generator(device="dev:1").manual_seed(9)
    drawn_by_own = torch.rand(3, generator=own, device=LAST)
    assert torch.equal(
        drawn_by_own.cpu(), torch.rand(3, generator=own.manual_seed(9), device=LAST).cpu()
    )
    assert torch.equal(torch.dev.get_rng_state(1), state)
    next_one = torch.rand(2, device=LAST)
    torch.dev.set_rng_state(state, 1)
    assert torch.equal(torch.rand(2, device=LAST), next_one)
    before = torch.get_rng_state()
    F.dropout(torch.ones(50, device=LAST))
    torch.randperm(5, device=LAST)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(torch.dev.get_rng_state(1), state)
    with torch.random.fork_rng(devices=[1], device_type="dev"):
        torch.rand(1, device=LAST)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(), device=LAST)


@pytest.mark.parametrize(
    ("where", "expected"), [(None, "dev:1"), ("cpu", "cpu"), ({"dev:1": "dev:0"}, "dev:0")]
)
def test_a_file_brings_tensors_back_to_any_device(where: Any, expected: str) -> None:
    file = io.BytesIO()
    torch.save({"weight": drawn(3).to(LAST)}, file)
    file.seek(0)
    found = torch.load(file, map_location=where)["weight"]
    assert str(found.device) == expected
    assert torch.equal(found.cpu(), drawn(3))


def test_a_loader_pins_its_batches() -> None:
    for (x,) in DataLoader(TensorDataset(drawn(5, 2)), batch_size=2, pin_memory=True):
        assert x.is_pinned()
        assert torch.equal(x.to(LAST, non_blocking=True).cpu(), x)
    assert not drawn(2).is_pinned()


def test_a_module_that_moves_keeps_its_parameters_and_what_is_tied() -> None:
    """Also where an optimizer holds them already."""
    net = Sequence()
    net.head = nn.Linear(8, 11, bias=False)
    net.head.weight = net.tokens.weight
    before = list(net.parameters())
    net.to(LAST)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert net.head.weight is net.tokens.weight
    assert str(net.head.weight.device) == LAST


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_lowers_what_cuda_lowers(dtype: torch.dtype) -> None:
    model, x = nn.Linear(4, 2, dtype=torch.float32).to(LAST), drawn(3, 4).float().to(LAST)
    scaler = torch.amp.GradScaler("dev", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("dev", dtype=dtype):
        y = model(x)
        loss = y.log_softmax(1).square().mean()
    assert (y.dtype, loss.dtype) == (dtype, torch.float32)
    before = model.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.weight)
    assert model.weight.grad.dtype == torch.float32


def test_memory_is_counted_reused_and_never_zero() -> None:
    before = torch.dev.memory_allocated(FIRST)
    x = torch.empty(100, device=FIRST)
    assert torch.dev.memory_allocated(FIRST) == before + 1024
    assert x.isnan().all()
    x.zero_()
    address = x.data_ptr()
    del x
    again = torch.empty(100, device=FIRST)
    assert again.data_ptr() == address
    assert again.isnan().all()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1 << 30, device=FIRST)


def test_threads_may_share_a_stream() -> None:
    total = torch.zeros(1, device=FIRST)

    def add() -> None:
        for _ in range(200):
            total.add_(1)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total.item() == 600


def test_there_are_as_many_devices_as_asked() -> None:
    count = 1 if torch.dev.device_count() > 1 else 3
    script = (
        "import torch; from tests.device import accelerator; accelerator.register(); "
        "print([str(torch.ones(1).dev(i).device) for i in range(torch.dev.device_count())])"
    )
    environment = {
        **os.environ,
        "TEST_DEVICES": str(count),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == str([f"dev:{i}" for i in range(count)]), found.stderr


def test_torch_knows_it_as_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("dev")
    assert torch.accelerator.device_count() == torch.get_device_module("dev").device_count() >= 2
    assert str(nn.Linear(2, 2).dev(1).weight.device) == LAST
    assert next(itertools.chain(nn.Linear(2, 2).to("dev").parameters())).is_dev

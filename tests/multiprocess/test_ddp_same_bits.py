"""`DistributedDataParallel` trains the same bits on any number of ranks, in a loop of one's own."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from phalanx import ConfigError, DistributedDataParallel, Layout, PeerLost, StateError
from tests.multiprocess.ranks import Ranks
from tests.zoo import (
    CASES,
    CLASSES,
    CNN_NORM,
    GPT_DROPOUT,
    MLP,
    Case,
    PartlyUsed,
    adamw,
    image_batch,
    sgd,
    state_of,
    vector_batch,
)

pytestmark = pytest.mark.promise("loops-of-your-own-on-ranks")

CPU = torch.device("cpu")
STEPS = 4
SMALL_BUCKETS_MB = 1e-3


class Dropped(nn.Module):
    """A convolutional network with batch norm, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.net = CNN_NORM.build()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.drop(x))


def dropped(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Dropped().to(dtype)


class Wide(nn.Module):
    """Weights of 1 MiB: one used twice, two whose gradients share memory, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 512)
        self.left = nn.Linear(512, 512, bias=False)
        self.right = nn.Linear(512, 512, bias=False)
        self.idle = nn.Linear(512, 512)
        self.last = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = nn.functional.linear(hidden, self.left.weight + self.right.weight.view(512, 512))
        return self.last(torch.tanh(self.left(torch.tanh(hidden))))


def wide(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Wide().to(dtype)


MODELS = (
    MLP,
    Case("cnn", dropped, image_batch, CNN_NORM.loss),
    GPT_DROPOUT,
    Case("wide", wide, vector_batch, MLP.loss),
)
# (reduction, microbatches, rows): 10 rows are no multiple of 4; of 5 microbatches, 2 are empty.
CUTS = [("mean", 4, 24), ("sum", 4, 10), ("sum", 12, 24), ("sum", 5, 3)]


def own_rows(rank: int, rows: int, microbatches: int) -> slice:
    """Return the rows of a rank, written down a second time: larger microbatches come first."""
    size = dist.get_world_size()
    small, left = divmod(rows, microbatches)
    starts = [place * small + min(place, left) for place in range(microbatches + 1)]
    return slice(starts[microbatches * rank // size], starts[microbatches * (rank + 1) // size])


def hash_of(module: nn.Module) -> str:
    state = state_of(module).values()
    return hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in state)).hexdigest()[:16]


def train(
    rank: int,
    case: Case,
    reduction: str,
    microbatches: int,
    rows: int,
    home: torch.device = CPU,
    group: dist.ProcessGroup | None = None,
) -> str:
    """Train a model, whose initial weights and seed are rank 0's; return a hash of its state."""
    net = case.build(seed=rank).to(home)
    model = DistributedDataParallel(
        net,
        microbatches,
        reduction=reduction,
        bucket_cap_mb=SMALL_BUCKETS_MB,
        process_group=group,
    )
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        own = own_rows(rank, rows, microbatches)
        inputs, targets = (each[own].to(home) for each in case.batch(rows, seed=step))
        outputs = model(inputs)
        if reduction == "mean":
            loss = case.loss(outputs, targets)
        elif len(inputs):
            loss = case.loss(outputs, targets) * targets.numel()
            model.set_weight(torch.tensor(targets.numel()))
        else:
            loss = outputs.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    model.requires_grad_(False)(inputs)  # without a backward pass its buffers are merged, too
    return hash_of(model)


def train_all(
    rank: int, home: torch.device = CPU, group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    torch.manual_seed(3 + rank)
    cuts = [cut for cut in CUTS if cut[0] == "sum" or dist.get_world_size() != 3]
    return {
        f"{case}, {cut}": train(rank, case, *cut, home, group)
        for case in MODELS
        for cut in cuts
        if not (case.build is dropped and cut[2] == 3)  # batch norm wants two rows
    }


def misplaced(rank: int) -> list[int]:
    """Return how far gradients lie behind where torch would have put them."""
    model = DistributedDataParallel(MLP.build(), 4)
    inputs, targets = (each[own_rows(rank, 24, 4)] for each in MLP.batch(24))
    MLP.loss(model(inputs), targets).backward()
    return [each.grad.data_ptr() % 64 for each in model.parameters()]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, str]:
    with Ranks(1) as ranks:
        (found,) = ranks.run(train_all)
    return found


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_gradients_lie_as_kernels_find_them_on_one_rank(two: Ranks) -> None:
    """A norm adds in another order where memory is not aligned, on a GPU."""
    assert not any(map(any, two.run(misplaced)))


WORLDS = [
    pytest.param("gloo", 2),
    pytest.param("gloo", 3, marks=pytest.mark.night),
    pytest.param("gloo", 4, marks=pytest.mark.night),
    pytest.param("phalanx", 1, marks=pytest.mark.night),
    pytest.param("phalanx", 2, marks=pytest.mark.night),
    pytest.param("phalanx", 3),
    pytest.param("phalanx", 4),
]


@pytest.mark.parametrize(("backend", "size"), WORLDS)
def test_any_number_of_ranks_trains_the_same_bits(
    one_rank: dict[str, str], backend: str, size: int
) -> None:
    with Ranks(size, backend=backend) as ranks:
        for found in ranks.run(train_all):
            assert found == {name: one_rank[name] for name in found}


def gradient_of(rank: int, dtype: torch.dtype) -> str:
    """Return a hash of the gradients of a layer whose weight is of 1 MiB or more."""
    torch.manual_seed(0)
    layer = nn.Linear(1024, 512).to(dtype)
    inputs = torch.randn(8, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = DistributedDataParallel(layer, 4)
    loss = model(inputs[own_rows(rank, 8, 4)]).square().mean()
    (loss * 1024).backward()  # halves of the smallest numbers of 16 bits are not exact
    found = torch.cat([each.grad.flatten() for each in layer.parameters()])  # type: ignore[union-attr]
    return hashlib.sha256(found.double().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_gradients_are_added_in_one_order(
    two: Ranks, alone: Ranks, dtype: torch.dtype
) -> None:
    expected = alone.run(gradient_of, dtype)
    assert two.run(gradient_of, dtype) == expected * 2
    with Ranks(2, backend="phalanx") as ranks:
        assert ranks.run(gradient_of, dtype) == expected * 2


# --- beside torch's own class ---------------------------------------------------------------------


def final_loss(
    rank: int, case: Case, wrap: Callable[..., nn.Module], home: torch.device = CPU
) -> float:
    model = wrap(case.build().to(home))
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        own = own_rows(rank, 24, 4)
        inputs, targets = (each[own].to(home) for each in case.batch(24, seed=step))
        optimizer.zero_grad()
        case.loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        inputs, targets = (each.to(home) for each in case.batch(24, seed=STEPS))
        return float(case.loss(model.module(inputs), targets))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_is_that_of_torchs_class(two: Ranks, case: Case) -> None:
    ours = two.run(final_loss, case, DistributedDataParallel)
    theirs = two.run(final_loss, case, TorchDDP)
    assert ours == pytest.approx(theirs, abs=1e-6)


def chained(rank: int, wrap: Callable[..., nn.Module]) -> list[float]:
    """Return the gradients of one module whose outputs another takes, as a generator's are."""
    first = MLP.build()
    generator, critic = wrap(first), wrap(nn.Linear(CLASSES, 1))
    inputs = vector_batch(8)[0][own_rows(rank, 8, 4)]
    critic(generator(inputs)).square().mean().backward()
    return [each.grad.double().sum().item() for each in first.parameters()]


def test_wrapped_modules_can_be_chained(two: Ranks, alone: Ranks) -> None:
    found = two.run(chained, DistributedDataParallel)
    assert found == alone.run(chained, DistributedDataParallel) * 2
    assert found[0] == pytest.approx(two.run(chained, TorchDDP)[0], abs=1e-6)


# --- in the loops of others -----------------------------------------------------------------------


def accumulate(rank: int) -> str:
    model = DistributedDataParallel(GPT_DROPOUT.build())
    torch.manual_seed(0)
    for step in range(3):
        inputs, targets = (each[own_rows(rank, 8, 4)] for each in GPT_DROPOUT.batch(8, seed=step))
        with model.no_sync() if step < 2 else contextlib.nullcontext():
            (GPT_DROPOUT.loss(model(inputs), targets) / 3).backward()
    adamw(model.parameters()).step()
    return hash_of(model)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(CLASSES)  # which counts the computation in the backward pass, too
        self.inner = nn.Sequential(MLP.build(), norm)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Reentrant(nn.Module):
    """Gradients of a large weight come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 512)
        self.inner = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(checkpoint(self.inner, self.first(x), use_reentrant=True))
        return checkpoint(self.inner, hidden, use_reentrant=True)[:, :CLASSES]


NETS = {"checkpointed": Checkpointed, "reentrant": Reentrant}


def one_step(rank: int, kind: str) -> str:
    net: Any = NETS.get(kind, MLP.build)()
    if kind == "compiled":
        net = torch.compile(net, backend="aot_eager")
    model = DistributedDataParallel(net, 2)
    inputs, targets = (each[own_rows(rank, 8, 2)] for each in vector_batch(8))
    with torch.autocast("cpu", enabled=kind == "autocast"):
        MLP.loss(model(inputs), targets).backward()
    adamw(model.parameters()).step()
    return hash_of(model)


def lay_weights_out_anew(rank: int) -> str:
    model = DistributedDataParallel(CNN_NORM.build(), 2, bucket_cap_mb=1e-4)
    for step in range(STEPS):
        if step == 2:
            model.to(memory_format=torch.channels_last)
        inputs, targets = (each[own_rows(rank, 8, 2)] for each in image_batch(8, seed=step))
        CNN_NORM.loss(model(inputs), targets).backward()
        adamw(model.parameters()).step()
        model.zero_grad()
    return hash_of(model)


def train_a_part(rank: int) -> str:
    """Keep a module in evaluation, but for its dropout and its norms."""
    model = DistributedDataParallel(dropped(seed=rank))
    model.eval()
    for each in model.modules():
        if isinstance(each, (nn.Dropout, nn.BatchNorm2d)):
            each.train()
    optimizer = sgd(model.parameters())
    for step in range(2):
        inputs, targets = (each[own_rows(rank, 8, 4)] for each in image_batch(8, seed=step))
        MODELS[1].loss(model(inputs), targets).backward()
        optimizer.step()
    return hash_of(model)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs, (hidden, _) = self.inner(x)
        return outputs, hidden


def train_recurrent(rank: int) -> str:
    """Train with the rows along dim 1, of inputs and of both outputs."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Recurrent(), layout=Layout(dim=1), output="cat(1)")
    outputs, hidden = model(torch.randn(6, 8, 3)[:, own_rows(rank, 8, 4)])
    (outputs.mean() + hidden.mean()).backward()
    sgd(model.parameters()).step()
    return hash_of(model)


def weigh_two_passes(rank: int) -> str:
    """Go back through two forward passes at once: one weight holds for both."""
    model = DistributedDataParallel(nn.Linear(7, 1), reduction="sum", buffers="first")
    with torch.no_grad():
        model.module.weight.zero_()
    inputs = torch.ones(8, 7)[own_rows(rank, 8, 4)]
    total = model(inputs).sum() + model(inputs).sum()
    model.set_weight(2 * len(inputs))
    total.backward()
    assert torch.equal(model.module.weight.grad, torch.ones(1, 7))
    model(inputs).sum().backward()  # by rows again
    assert torch.equal(model.module.weight.grad, torch.full((1, 7), 2.0))
    return hash_of(model)


LOOPS = [
    pytest.param(train_a_part, (), id="partly in evaluation"),
    pytest.param(lay_weights_out_anew, (), id="weights laid out anew"),
    pytest.param(train_recurrent, (), id="rows along dim 1"),
    pytest.param(weigh_two_passes, (), id="two passes, one weight"),
    pytest.param(accumulate, (), id="accumulation"),
    pytest.param(one_step, ("autocast",), id="autocast"),
    pytest.param(one_step, ("checkpointed",), id="checkpointed"),
    pytest.param(one_step, ("reentrant",), id="checkpointed, reentrant"),
    pytest.param(one_step, ("compiled",), id="compiled", marks=pytest.mark.night),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.mark.parametrize(("loop", "args"), LOOPS)
def test_loops_of_others_have_the_same_bits(
    alone: Ranks, two: Ranks, loop: Callable[..., str], args: tuple[Any, ...]
) -> None:
    assert two.run(loop, *args) == alone.run(loop, *args) * 2


def use_parts(rank: int) -> tuple[bool, bool, bool]:
    """Parameters that nobody uses have no gradient; one that rank 1 uses has it everywhere."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = PartlyUsed()
            self.on_one = nn.Linear(7, 4)

        def forward(self, x: Tensor, other: bool) -> Tensor:
            return self.on_one(x) if other else self.always(x)

    model = DistributedDataParallel(Sometimes())
    model(torch.ones(4, 7), rank == 1).sum().backward()
    net = model.module
    return (
        net.always.idle.weight.grad is None,
        torch.equal(net.on_one.weight.grad, torch.full((4, 7), 2.0)),
        torch.equal(net.always.used.weight.grad, torch.full((4, 7), 2.0)),
    )


def test_unused_parameters_keep_no_gradient(two: Ranks) -> None:
    assert two.run(use_parts) == [(True, True, True)] * 2


def load_states(rank: int) -> list[list[str]]:
    model = DistributedDataParallel(MLP.build())
    plain = MLP.build(seed=1).state_dict()
    for state in (plain, {f"module.{name}": each for name, each in plain.items()}):
        model.load_state_dict(state)
        assert all(torch.equal(each, plain[name]) for name, each in model.state_dict().items())
    theirs = TorchDDP(MLP.build())
    theirs.load_state_dict({f"module.{name}": each for name, each in model.state_dict().items()})
    averaged = torch.optim.swa_utils.AveragedModel(model)  # a deep copy
    averaged.update_parameters(model)
    return [list(model.state_dict()), list(copy.deepcopy(model).state_dict())]


def test_state_dict_has_the_modules_own_keys(two: Ranks) -> None:
    keys = list(MLP.build().state_dict())
    assert two.run(load_states) == [[keys, keys]] * 2


def fail_half_way(rank: int) -> tuple[str, str]:
    """Fail in a backward pass that has sent gradients, and try another one."""
    net = nn.Sequential(nn.Linear(7, 512), nn.Linear(512, 512))
    model = DistributedDataParallel(net)
    calls = []

    def fail(*_: object) -> None:
        calls.append(rank)
        if len(calls) == 2:  # in the last microbatch
            raise ZeroDivisionError

    inputs = vector_batch(8)[0][own_rows(rank, 8, 4)]
    hook = net[0].register_forward_hook(lambda _, __, outputs: outputs.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        model(inputs).sum().backward()
    hook.remove()
    with pytest.raises(StateError) as raised:
        model(inputs).sum().backward()
    return str(raised.value), str(net[0].weight.grad)


def test_a_backward_pass_after_half_of_another_is_refused(two: Ranks) -> None:
    for message, gradient in two.run(fail_half_way):
        assert "failed here after it had sent gradients. Start the job again" in message
        assert gradient == "None"


# --- refusals -------------------------------------------------------------------------------------


def refuse_rows(rank: int, reduction: str, rows: list[int]) -> tuple[str, bool]:
    case = MODELS[1]
    model = DistributedDataParallel(case.build(), reduction=reduction)
    before = hash_of(model)
    inputs, targets = (each[: rows[rank]] for each in case.batch(12))
    for _ in range(2):  # the first one leaves no gradients on their way
        with pytest.raises(ConfigError) as raised:
            case.loss(model(inputs), targets).backward()
    unchanged = hash_of(model) == before and all(p.grad is None for p in model.parameters())
    return str(raised.value), unchanged


@pytest.mark.parametrize(
    ("reduction", "rows", "words"),
    [
        (
            "mean",
            [8, 4],
            "6 on rank 0 and 6 on rank 1 for a batch of 12 in 4 microbatches, but have 8 on rank 0",
        ),
        ("mean", [5, 5], "a multiple of 4 rows, its microbatches, with reduction='mean'"),
        ("sum", [5, 5], "6 on rank 0 and 4 on rank 1 for a batch of 10"),
    ],
)
def test_other_rows_are_refused_and_change_nothing(
    two: Ranks, reduction: str, rows: list[int], words: str
) -> None:
    for message, unchanged in two.run(refuse_rows, reduction, rows):
        assert words in message
        assert unchanged


def refuse_arguments(rank: int) -> list[str]:
    calls: list[Callable[[], object]] = [
        lambda: DistributedDataParallel(MLP.build(), 3),
        lambda: DistributedDataParallel(MLP.build(), 1, reduction="sum"),
        lambda: DistributedDataParallel(MLP.build(), reduction="max"),
        lambda: DistributedDataParallel(MLP.build(), 4 + 4 * rank),
        lambda: DistributedDataParallel(MLP.build(), 1 + 3 * rank),
        lambda: DistributedDataParallel([MLP, MODELS[1]][rank].build()),
        lambda: DistributedDataParallel(nn.BatchNorm1d(3, track_running_stats=rank == 0)),
        lambda: DistributedDataParallel(MLP.build(), device_ids=[rank]),
        lambda: DistributedDataParallel(MLP.build()).set_weight(3),
        lambda: DistributedDataParallel(MLP.build(), reduction="sum").set_weight(-1),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ConfigError) as raised:
            call()
        messages.append(str(raised.value))
    return messages


def test_wrong_arguments_are_refused_on_every_rank(two: Ranks) -> None:
    words = [
        "a power of two and divides the microbatches. Give reduction='sum'",
        "`microbatches` must be at least the number of ranks (2), but is 1",
        "`reduction` must be 'mean' or 'sum'",
        "in the same way, but rank 1 has other `microbatches` than rank 0. Make it from the same",
        "in the same way, but rank 1 has other `microbatches` than rank 0",
        "in the same way, but rank 1 has other parameters or buffers than rank 0",
        "in the same way, but rank 1 has other parameters or buffers than rank 0",
        "`device_ids` is no argument of this class. Leave out those of torch's class",
        "`set_weight()` needs the reduction 'sum'",
        "`weight` must be finite and at least 0, but is -1",
    ]
    for messages in two.run(refuse_arguments):
        assert all(word in message for word, message in zip(words, messages, strict=True)), messages


class Branch(nn.Module):
    """Two layers of over 1 MiB, of odd sizes; one of them is used by batches with a sign only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_times = nn.Linear(521, 511), nn.Linear(521, 511)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.at_times(x) if x[0, 0] > 0 else self.always(x)


def use_a_layer_on_one_rank(rank: int, how: str) -> str:
    torch.manual_seed(0)
    net = Branch()
    if how == "with a hook":
        net.at_times.weight.register_hook(lambda gradient: 2 * gradient)
    net.always.requires_grad_(how != "beside frozen layers")
    model = DistributedDataParallel(net)
    x = torch.randn(16, 521)
    x[:, 0] = -1
    x[0, 0] = 1
    model(x[own_rows(rank, 16, 4)]).square().mean().backward()
    found = [each.grad for each in net.parameters()]
    assert [each is None for each in found].count(True) == 2 * (how == "beside frozen layers")
    return hashlib.sha256(
        b"".join(each.numpy().tobytes() for each in found if each is not None)
    ).hexdigest()


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("how", ["alone", "with a hook", "beside frozen layers"])
def test_a_large_layer_that_one_rank_uses_changes_no_bit(
    backend: str, how: str, alone: Ranks
) -> None:
    (wanted,) = alone.run(use_a_layer_on_one_rank, how)
    with Ranks(2, backend=backend) as ranks:
        assert ranks.run(use_a_layer_on_one_rank, how) == [wanted] * 2


def freeze_another_layer(rank: int) -> str:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = DistributedDataParallel(net)
    net[2 * rank].requires_grad_(False)
    with pytest.raises(ConfigError) as raised:
        model(torch.randn(4, 4)).square().mean().backward()
    assert all(each.grad is None for each in net.parameters())
    return str(raised.value)


def test_ranks_that_freeze_different_layers_are_refused(two: Ranks) -> None:
    for message in two.run(freeze_another_layer):
        assert "All ranks must train the same parameters, but rank 1 has frozen" in message


def lose_rank_1(rank: int) -> str:
    model = DistributedDataParallel(MLP.build())
    inputs, targets = (each[own_rows(rank, 8, 4)] for each in vector_batch(8))
    loss = MLP.loss(model(inputs), targets)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as raised:
        loss.backward()
    assert raised.value.rank == 1
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_rank_that_dies_is_an_error_on_the_others(backend: str) -> None:
    with Ranks(2, backend=backend) as ranks, pytest.raises(AssertionError) as raised:
        ranks.run(lose_rank_1)
    assert "rank 1: its process ended" in str(raised.value)
    assert "rank 0: " in str(raised.value)
    assert "Traceback" not in str(raised.value)

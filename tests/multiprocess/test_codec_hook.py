"""DDP through a codec: the mean of what comes out, few bytes, and errors that survive."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from phalanx.codecs import Codec, Feedback, OneBit, TopK
from phalanx.distributed import codec_hook
from tests.multiprocess.ranks import Ranks

pytestmark = pytest.mark.promise("codec-hook")

SIZE = 3
SMALL_BUCKETS_MB = 1e-3
CODECS = [OneBit(), TopK()]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE) as ranks:
        yield ranks


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(45, 13), nn.Tanh(), nn.Linear(13, 3)
    )


def make_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = (4, 2, 5, 5), (4, 3)
    inputs, targets = (torch.randn(shape, generator=generator) for shape in shapes)
    return inputs, targets


def gradients_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def local_gradients(rank: int, steps: list[int]) -> dict[str, Tensor]:
    net = make_net()
    for step in steps:
        inputs, targets = make_batch(rank, step)
        mse_loss(net(inputs), targets).backward()
    return gradients_of(net)


def make_ddp(
    net: nn.Module, codec: Codec, bucket_cap_mb: float = SMALL_BUCKETS_MB
) -> tuple[DistributedDataParallel, Feedback]:
    ddp = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb)
    return ddp, codec_hook(codec, ddp)


class ByHand:
    """The judge: every rank's gradients, each through its own `Feedback`, added in order."""

    def __init__(self, codec: Codec) -> None:
        self.feedbacks = [Feedback(codec) for _ in range(SIZE)]

    def merge(self, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        merged = {}
        for name in gradients[0]:
            total = torch.zeros_like(gradients[0][name])
            for feedback, mine in zip(self.feedbacks, gradients, strict=True):
                payload = feedback.encode(name, mine[name])
                total += feedback.codec.decode(payload, total.shape, total.dtype)
            merged[name] = total / SIZE
        return merged


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(left) == list(right)
    for name, value in right.items():
        assert torch.equal(left[name], value), name


def merge_steps(
    rank: int, codec: Codec, bucket_cap_mb: float, steps: list[list[int]]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return what DDP made of each group of accumulation steps, and what is made by hand."""
    net = make_net()
    ddp, feedback = make_ddp(net, codec, bucket_cap_mb)
    by_hand = ByHand(codec)
    merged, expected = [], []
    for group in steps:
        ddp.zero_grad()
        for step in group:
            with contextlib.nullcontext() if step == group[-1] else ddp.no_sync():
                inputs, targets = make_batch(rank, step)
                mse_loss(ddp(inputs), targets).backward()
        merged.append(gradients_of(net))
        expected.append(by_hand.merge([local_gradients(each, group) for each in range(SIZE)]))
        assert_same_bits(feedback.state_dict(), by_hand.feedbacks[rank].state_dict())
    return merged, expected


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_gradient_is_the_mean_of_what_comes_out(ranks: Ranks, codec: Codec) -> None:
    """DDP cuts its final buckets after the first step; the errors are those of the parameters."""
    answers = ranks.run(merge_steps, codec, SMALL_BUCKETS_MB, [[0], [1], [2, 3], [4]])
    for merged, expected in answers:
        for mine, other in zip(merged, expected, strict=True):
            assert_same_bits(mine, other)
    for (merged, _), other in itertools.pairwise(answers):
        assert all(torch.equal(merged[-1][name], other[0][-1][name]) for name in merged[-1])
    plain = [local_gradients(rank, [0])["3.weight"] for rank in range(SIZE)]
    assert not torch.allclose(answers[0][0][0]["3.weight"], sum(plain) / SIZE, rtol=0.1)


class Scale(nn.Module):
    """Its gradient is its input."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * inputs


def merge_values(rank: int, codec: Codec, by_step: list[list[float]]) -> tuple[list[Tensor], Any]:
    """Merge gradients that hold one value everywhere but in two places."""
    net = Scale(5, 7)
    ddp, feedback = make_ddp(net, codec)
    merged, states = [], []
    for values in by_step:
        ddp.zero_grad()
        gradient = torch.full((5, 7), values[rank])
        gradient[0, 0], gradient[3, 3] = 1.0, -2.0
        ddp(gradient).sum().backward()
        assert net.scale.grad is not None
        merged.append(net.scale.grad.clone())
        states.append(feedback.state_dict())
    return merged, states


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_gradient_that_is_not_finite_is_seen_on_every_rank(
    ranks: Ranks, codec: Codec, bad: float
) -> None:
    answers = ranks.run(merge_values, codec, [[0.3, 0.2, 0.1], [0.1, bad, 0.1], [0.0, 0.0, 0.0]])
    for rank, ((before, at, after), states) in enumerate(answers):
        assert before.isfinite().all()
        assert not at.isfinite().all()
        assert after.isfinite().all()
        same = torch.equal(states[0]["scale"], states[1]["scale"])
        assert same == (rank == 1)  # the others' gradients were good, and so is their error


def count_bytes(rank: int, codec: Codec) -> tuple[int, int]:
    """Return how many bytes this rank hands to collectives in one merge, and how many DDP would."""
    net = nn.Sequential(nn.Linear(255, 65), nn.Linear(65, 3))
    ddp, _ = make_ddp(net, codec)
    sent = []
    all_gather, all_reduce = dist.all_gather, dist.all_reduce

    def counted_gather(out: list[Tensor], tensor: Tensor, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_gather(out, tensor, **options)

    def counted_reduce(tensor: Tensor, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted_gather)
        patch.setattr(dist, "all_reduce", counted_reduce)
        ddp(torch.randn(4, 255)).sum().backward()
    return sum(sent), sum(p.nbytes for p in net.parameters())


@pytest.mark.parametrize(
    ("codec", "times_fewer"),
    [(OneBit(), 20), (TopK(), 4.9), (TopK(0.01), 40)],
)
def test_few_bytes_travel(ranks: Ranks, codec: Codec, times_fewer: float) -> None:
    for sent, plain in ranks.run(count_bytes, codec):
        assert 0 < sent <= plain / times_fewer


def copy_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone().contiguous() for name, value in net.state_dict().items()}


def train(rank: int, codec: Codec, stop: int | None, keep: bool) -> dict[str, Tensor]:
    """Train six steps; at ``stop`` go on from files, with errors or without."""
    net = make_net()
    ddp, feedback = make_ddp(net, codec)
    for step in range(6):
        if step == stop:
            weights = safetensors.torch.save(copy_state(net))
            errors = safetensors.torch.save(feedback.state_dict())
            net = make_net()
            net.load_state_dict(safetensors.torch.load(weights))
            ddp, feedback = make_ddp(net, codec)
            if keep:
                feedback.load_state_dict(safetensors.torch.load(errors))
        ddp.zero_grad()
        inputs, targets = make_batch(rank, step)
        mse_loss(ddp(inputs), targets).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    return copy_state(net)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_saved_state_goes_on_with_the_same_bits(ranks: Ranks, codec: Codec) -> None:
    whole, resumed, forgotten = (
        ranks.run(train, codec, *how) for how in ((None, True), (3, True), (3, False))
    )
    for rank in range(SIZE):
        assert_same_bits(resumed[rank], whole[rank])
        assert_same_bits(whole[rank], whole[0])
    assert not torch.equal(forgotten[0]["3.weight"], whole[0]["3.weight"])


def merge_in_a_group(rank: int) -> Tensor | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    net = Scale(3, 7)
    ddp = DistributedDataParallel(net, process_group=group)
    codec_hook(OneBit(), ddp)
    ddp(torch.full((3, 7), 1.0 + rank)).sum().backward()
    return net.scale.grad


def test_a_group_of_some_ranks(ranks: Ranks) -> None:
    merged = ranks.run(merge_in_a_group)
    assert merged[1] is None
    for rank in (0, 2):
        assert torch.equal(merged[rank], torch.full((3, 7), 2.0))

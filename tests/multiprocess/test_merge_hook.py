"""With merge_hook, DDP's gradient is that of the whole batch; plain DDP's is not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from phalanx.distributed import merge_hook
from phalanx.errors import ConfigError, PeerError
from tests.multiprocess.ranks import Ranks

pytestmark = pytest.mark.promise("ddp-hooks")

WEIGHT_RULE = "`weight_fn` must return a finite number of samples or tokens ≥ 0"
SMALL_BUCKETS_MB = 1e-4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def make_net() -> nn.Sequential:
    """float64, so that a wrong weight cannot hide in rounding."""
    torch.manual_seed(0)
    layers = (nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3))
    return nn.Sequential(*layers).double()


def make_batch(rank: int, step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    draw = torch.randn(size, 10, generator=generator, dtype=torch.float64)
    return draw[:, :7], draw[:, 7:]


def gradients_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def whole_gradient(sizes: list[list[int]]) -> dict[str, Tensor]:
    """The judge: one process, one batch of everything."""
    batches = [
        make_batch(rank, step, size)
        for step, row in enumerate(sizes)
        for rank, size in enumerate(row)
    ]
    net = make_net()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    mse_loss(net(inputs), targets, reduction="sum").div(len(inputs)).backward()
    return gradients_of(net)


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest gradient."""
    assert list(left) == list(right)
    largest = max(float(value.abs().max()) for value in right.values())
    return max(float((left[name] - right[name]).abs().max()) for name in right) / largest


def run_steps(
    rank: int,
    sizes: list[list[int]],
    reduction: str | None,
    options: dict[str, bool] | None = None,
) -> tuple[list[dict[str, Tensor]], int, int]:
    """Merge the same samples three times; DDP cuts its final buckets after the first.

    Returns the gradients, how many buckets the last merge had, and how often a weight was asked.
    """
    net = make_net()
    ddp = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB, **(options or {}))
    counts: list[int] = []
    buckets: list[int] = []
    asked = 0

    def weight() -> float:
        nonlocal asked
        asked += 1
        total = sum(counts)
        counts.clear()
        return total

    if reduction is not None:
        hook = merge_hook(weight, reduction=reduction)

        def watched(state: object, bucket: dist.GradBucket):  # type: ignore[no-untyped-def]
            buckets.append(bucket.index())
            return hook(state, bucket)

        watched.__annotations__.clear()  # DDP refuses annotations that are strings
        ddp.register_comm_hook(None, watched)
    merged = []
    for _ in range(3):
        ddp.zero_grad()
        for step, row in enumerate(sizes):
            inputs, targets = make_batch(rank, step, row[rank])
            counts.append(len(inputs))
            is_last = step == len(sizes) - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                rule = "mean" if reduction in (None, "mean") else "sum"
                mse_sum = mse_loss(ddp(inputs), targets, reduction="sum")
                (mse_sum / len(inputs) if rule == "mean" else mse_sum).backward()
        merged.append(gradients_of(net))
    return merged, max(buckets, default=0) + 1, asked


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_1_5_and_9_samples_give_the_gradient_of_all_15(ranks: Ranks, reduction: str) -> None:
    expected = whole_gradient([[1, 5, 9]])
    for merged, num_buckets, asked in ranks.run(run_steps, [[1, 5, 9]], reduction):
        assert all(difference(each, expected) < 1e-14 for each in merged)
        assert num_buckets >= 3
        assert asked == 3  # once for each merge, not for each bucket
    for merged, _, _ in ranks.run(run_steps, [[1, 5, 9]], None):
        assert difference(merged[-1], expected) > 0.1


def test_two_unequal_accumulation_steps(ranks: Ranks) -> None:
    sizes = [[1, 5, 9], [4, 2, 0]]
    expected = whole_gradient(sizes)
    for merged, num_buckets, asked in ranks.run(run_steps, sizes, "sum"):
        assert all(difference(each, expected) < 1e-14 for each in merged)
        assert num_buckets >= 3
        assert asked == 3
    plain = [[1, 5, 9], [4, 2, 1]]  # a mean over nothing would be NaN
    for merged, _, _ in ranks.run(run_steps, plain, None):
        assert difference(merged[-1], whole_gradient(plain)) > 0.1


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters"])
def test_options_of_ddp(ranks: Ranks, option: str) -> None:
    expected = whole_gradient([[1, 5, 9], [4, 2, 3]])
    for merged, _, _ in ranks.run(run_steps, [[1, 5, 9], [4, 2, 3]], "sum", {option: True}):
        assert all(difference(each, expected) < 1e-14 for each in merged)


def merge_of(
    rank: int, weight: float, reduction: str, loss: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    net = make_net()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(None, merge_hook(lambda: weight, reduction=reduction))
    loss(ddp(make_batch(rank, 0, 2)[0])).backward()
    return gradients_of(net)


def merge_without_rank_1(rank: int, reduction: str) -> dict[str, Tensor]:
    """Rank 1 has weight 0, and a loss that is a mean over nothing."""
    if rank == 1:
        return merge_of(rank, 0, reduction, lambda outputs: outputs.sum() * math.nan)
    return merge_of(rank, 2, reduction, lambda outputs: outputs.sum() / 2)


@pytest.mark.parametrize(("reduction", "share"), [("sum", 0.25), ("mean", 0.5)])
def test_a_rank_with_weight_0_does_not_count(ranks: Ranks, reduction: str, share: float) -> None:
    net = make_net()
    for rank in (0, 2):
        net(make_batch(rank, 0, 2)[0]).sum().mul(share / 2).backward()
    for merged in ranks.run(merge_without_rank_1, reduction):
        assert difference(merged, gradients_of(net)) < 1e-14


def merge_nothing(rank: int) -> dict[str, Tensor]:
    return merge_of(rank, 0, "mean", lambda outputs: outputs.sum() * math.nan)


def test_without_samples_anywhere_the_gradient_is_zero(ranks: Ranks) -> None:
    for merged in ranks.run(merge_nothing):
        assert len(merged) == 6
        assert all(value.count_nonzero() == 0 for value in merged.values())


def merge_a_bad_weight(rank: int) -> tuple[str, str]:
    """Let rank 1 have a weight that is none; the others miss it in the merge."""
    group = dist.new_group(backend="phalanx")
    ddp = DistributedDataParallel(make_net(), process_group=group)
    hook = merge_hook(lambda: math.nan if rank == 1 else 1.0, process_group=group)
    ddp.register_comm_hook(None, hook)
    loss = ddp(make_batch(rank, 0, 2)[0]).sum()
    with pytest.raises((ConfigError, PeerError, RuntimeError)) as caught:
        loss.backward()
    dist.destroy_process_group(group)
    return type(caught.value).__name__, str(caught.value)


def test_a_bad_weight_is_refused_where_it_is_and_ends_the_merge_elsewhere(ranks: Ranks) -> None:
    others, refused, _ = ranks.run(merge_a_bad_weight)
    assert refused == ("ConfigError", f"{WEIGHT_RULE}, but returned nan.")
    assert "ank 1 of 3" in others[1]


def merge_large(rank: int, dtype: torch.dtype) -> Tensor:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = parameter

        def forward(self, inputs: Tensor) -> Tensor:
            return self.scale * inputs

    ddp = DistributedDataParallel(Scale())
    ddp.register_comm_hook(None, merge_hook(lambda: 100_000))
    ddp(torch.full((3,), 40_000.0, dtype=dtype)).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_and_weights_beyond_float16(ranks: Ranks, dtype: torch.dtype) -> None:
    """Σ g = 120 000 and Σ w = 300 000, where float16 ends at 65 504."""
    expected = (3 * torch.tensor(40_000.0, dtype=dtype).float() / 300_000).to(dtype)
    for merged in ranks.run(merge_large, dtype):
        assert merged.dtype == dtype
        assert torch.equal(merged, expected.expand(3))


def train_unevenly(rank: int) -> list[dict[str, Tensor]]:
    """Rank r has r + 1 batches; those that have run out join."""
    net = make_net()
    ddp = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB)
    counts: list[int] = []

    def weight() -> float:
        total = sum(counts)
        counts.clear()
        return total

    ddp.register_comm_hook(None, merge_hook(weight))
    merged = []
    with Join([ddp]):
        for step in range(rank + 1):
            ddp.zero_grad()
            inputs, targets = make_batch(rank, step, 2 * rank + 1)
            counts.append(len(inputs))
            mse_loss(ddp(inputs), targets, reduction="sum").backward()
            merged.append(gradients_of(net))
    return merged


def test_ranks_that_have_run_out_of_batches_join(ranks: Ranks) -> None:
    last = ranks.run(train_unevenly)[2]
    assert len(last) == 3
    for step, (merged, sizes) in enumerate(
        zip(last, ([1, 3, 5], [0, 3, 5], [0, 0, 5]), strict=True)
    ):
        expected = whole_gradient([[0, 0, 0]] * step + [sizes])
        assert difference(merged, expected) < 1e-14


def merge_in_a_group(rank: int) -> dict[str, Tensor] | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    net = make_net()
    ddp = DistributedDataParallel(net, process_group=group)
    hook = merge_hook(lambda: 2.0 + rank, process_group=group)
    ddp.register_comm_hook(None, hook)
    inputs, targets = make_batch(rank, 0, 2 + rank)
    mse_loss(ddp(inputs), targets, reduction="sum").backward()
    return gradients_of(net)


def test_a_group_of_some_ranks(ranks: Ranks) -> None:
    merged = ranks.run(merge_in_a_group)
    expected = whole_gradient([[2, 0, 4]])
    assert merged[1] is None
    assert difference(merged[0], expected) < 1e-14
    assert difference(merged[2], expected) < 1e-14


def fail_on_rank_1(rank: int) -> int:
    if rank == 1:
        raise ValueError(f"planted on rank {rank}")
    return rank


def test_every_rank_reports_its_own_traceback_and_the_next_call_runs(ranks: Ranks) -> None:
    """A control of the harness itself; it starts the ranks anew."""
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*planted on rank 1"):
        ranks.run(fail_on_rank_1)
    assert ranks.run(abs) == [0, 1, 2]

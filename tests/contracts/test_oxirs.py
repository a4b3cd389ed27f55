"""oxirs-embed's split and merge: its own tests, and its bugs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.compat.oxirs import (
    DataParallelTrainer,
    DistributedTrainingSample,
    ModelUpdate,
    WorkerUpdate,
)
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("oxirs")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating_oxirs.md").read_text(encoding="utf-8")
NAN = float("nan")


def samples(count: int) -> list[DistributedTrainingSample]:
    return [DistributedTrainingSample([float(index)], index * 0.5) for index in range(count)]


# --- the crate's own tests ------------------------------------------------------------------------


TRAINER = DataParallelTrainer()


def test_split_over_no_workers():
    assert TRAINER.split_batch(samples(5), 0) == []


def test_split_of_nothing_holds_nothing():
    # The crate asserts that there are no buckets, which is a bug; that there are no samples holds.
    assert sum(len(bucket) for bucket in TRAINER.split_batch([], 4)) == 0


def test_merge_of_equal_updates():
    updates = [WorkerUpdate(index, [1.0, 2.0], 0.5, 10) for index in range(2)]
    assert TRAINER.merge_worker_updates(updates) == ModelUpdate([1.0, 2.0], 0.5, 20)


def test_merge_is_weighted():
    updates = [WorkerUpdate(0, [4.0], 2.0, 1), WorkerUpdate(1, [0.0], 0.0, 3)]
    assert TRAINER.merge_worker_updates(updates) == ModelUpdate([1.0], 0.5, 4)


def test_merge_of_nothing():
    assert TRAINER.merge_worker_updates([]) == ModelUpdate([], 0.0, 0)
    idle = [WorkerUpdate(index, [1.0], 1.0, 0) for index in range(2)]
    assert TRAINER.merge_worker_updates(idle) == ModelUpdate([], 0.0, 0)


@pytest.mark.parametrize(
    "value",
    [
        DistributedTrainingSample([1.0, 2.0], 0.5),
        DistributedTrainingSample([1.0, 2.0], 0.5, weight=0.25),
        WorkerUpdate(3, [0.1, 0.2], 0.3, 8),
        WorkerUpdate(3, [0.1], 0.3, 4, weight=2.5),
        ModelUpdate([0.1, 0.2], 0.3, 16),
    ],
)
def test_json_round_trips(value):
    assert type(value)(**json.loads(json.dumps(asdict(value)))) == value


# --- bugs of the crate that cannot happen ---------------------------------------------------------


def test_samples_are_dealt_in_turn():
    for count, workers in ((10, 3), (8, 4), (2, 5), (7, 1), (0, 3)):
        data = samples(count)
        buckets = TRAINER.split_batch(data, workers)
        assert buckets == [data[worker::workers] for worker in range(workers)]


def test_sample_weights_count():
    updates = [WorkerUpdate(0, [4.0], 1.0, 1, 3.0), WorkerUpdate(1, [0.0], 5.0, 2, 1.0)]
    assert TRAINER.merge_worker_updates(updates) == ModelUpdate([3.0], 2.0, 3)
    for weight in (0.0, -1.0, math.inf):
        with pytest.raises(ConfigError, match="`weight` must be finite, at least 0 and not 0"):
            TRAINER.merge_worker_updates([WorkerUpdate(0, [1.0], 0.0, 1, weight)])


def test_gradients_of_different_lengths_are_refused():
    updates = [WorkerUpdate(0, [1.0, 2.0], 0.0, 1), WorkerUpdate(1, [1.0], 0.0, 1)]
    with pytest.raises(
        ConfigError, match=r"`gradients` of update 1 must have the shapes of update 0"
    ):
        TRAINER.merge_worker_updates(updates)


def test_a_loss_that_is_no_number_is_refused_and_named():
    updates = [WorkerUpdate(0, [1.0], 0.5, 1), WorkerUpdate(1, [1.0], NAN, 1)]
    with pytest.raises(ConfigError, match="`loss` of update 1 must be a finite number, but is nan"):
        TRAINER.merge_worker_updates(updates)


def test_a_worker_without_samples_changes_nothing():
    working = [WorkerUpdate(0, [1.5], 0.5, 2), WorkerUpdate(2, [4.5], 2.0, 1)]
    for idle in (WorkerUpdate(1, [NAN], NAN, 0), WorkerUpdate(1, [], 0.0, 0)):
        merged = TRAINER.merge_worker_updates([working[0], idle, working[1]])
        assert merged == ModelUpdate([2.5], 1.0, 3)


def test_totals_do_not_overflow():
    for count in (2**31, 2**32 - 1, 2**62):
        updates = [WorkerUpdate(0, [1.0], 2.0, count), WorkerUpdate(1, [3.0], 4.0, count)]
        assert TRAINER.merge_worker_updates(updates) == ModelUpdate([2.0], 3.0, 2 * count)


def test_no_samples_make_a_bucket_for_each_worker():
    assert TRAINER.split_batch([], 4) == [[], [], [], []]
    with pytest.raises(ConfigError, match="`n_workers` must be at least 0"):
        TRAINER.split_batch(samples(3), -1)


# --- a real module --------------------------------------------------------------------------------


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def found(
    net: nn.Module, worker: int, rows: list[tuple[torch.Tensor, torch.Tensor, float]]
) -> WorkerUpdate:
    """Return the weighted mean loss of some rows, and its gradient."""
    if not rows:
        return WorkerUpdate(worker, [], NAN, 0)
    x, y, weights = (
        torch.stack([torch.as_tensor(each) for each in c]) for c in zip(*rows, strict=True)
    )
    total = math.fsum(weights.tolist())
    losses = nn.functional.mse_loss(net(x), y, reduction="none").mean(1)
    loss = (losses * weights).sum() / total
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return WorkerUpdate(worker, gradients, loss.item(), len(rows), total)


@given(
    count=st.integers(1, 12),
    workers=st.integers(1, 15),
    data=st.data(),
    weighted=st.booleans(),
)
def test_the_merged_gradient_is_that_of_the_whole_batch(count, workers, data, weighted):
    torch.manual_seed(count * 100 + workers)
    net = small_net()
    choices = st.sampled_from([0.25, 1.0, 3.5])
    weights = [data.draw(choices) if weighted else 1.0 for _ in range(count)]
    rows = [
        (torch.randn(3, dtype=torch.float64), torch.randn(2, dtype=torch.float64), weight)
        for weight in weights
    ]
    parts = TRAINER.split_batch(rows, workers)
    merged = TRAINER.merge_worker_updates([found(net, i, part) for i, part in enumerate(parts)])
    whole = found(net, 0, rows)
    assert merged.total_samples == count
    # float64: matrix products of other shapes round otherwise, and no more.
    assert merged.mean_loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-12)
    for own, wanted in zip(merged.averaged_gradients, whole.gradients, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**62),
            st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
            st.floats(0, 1e6),
        ),
        min_size=1,
        max_size=7,
    ).filter(lambda updates: any(count for count, _, _ in updates)),
    st.data(),
)
def test_any_updates_in_any_order_make_the_mean_of_fractions(found, data):
    updates = [WorkerUpdate(worker, *each[1:], each[0]) for worker, each in enumerate(found)]
    merged = TRAINER.merge_worker_updates(data.draw(st.permutations(updates)))
    assert merged == TRAINER.merge_worker_updates(updates)
    total = sum(count for count, _, _ in found)
    assert merged.total_samples == total
    exact_loss = sum(n * Fraction(loss) for n, _, loss in found) / total
    assert abs(Fraction(merged.mean_loss) - exact_loss) <= 1e6 * 8 * 2.0**-53
    for place, value in enumerate(merged.averaged_gradients):
        exact = sum(n * Fraction(gradients[place]) for n, gradients, _ in found) / total
        assert abs(Fraction(value) - exact) <= 1e6 * 8 * 2.0**-53


# --- docs/migrating_oxirs.md ----------------------------------------------------------------------


def test_the_examples_of_the_page_say_what_they_promise(capsys):
    place: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, place)
    promised = re.findall(r"print\(.*\)  # (.*)", PAGE)
    assert capsys.readouterr().out.splitlines() == promised == ["[3, 2, 2] 7", "True", "True"]

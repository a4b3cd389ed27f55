"""The whole batch's mean loss from the slices' own, and what is no such loss."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.errors import ConfigError
from phalanx.parallel.replica_losses import ReplicaLosses, loss_of_nothing

CPU = torch.device("cpu")
NAN = float("nan")
Pair = namedtuple("Pair", ["left", "right"])


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def losses(loss_fn: Any = F.mse_loss) -> ReplicaLosses:
    return ReplicaLosses(loss_fn)


# --- weights --------------------------------------------------------------------------------------

SLICES = [t(1, 2, 3), t(4, 5), t(6)]


def total(own: Tensor) -> float:
    return own.sum().item()


@pytest.mark.parametrize(
    ("slices", "sizes", "weight_fn", "expected"),
    [
        (SLICES, [3, 2, 1], None, [3.0, 2.0, 1.0]),
        ([t(1), None, t(2)], [1, 0, 1], None, [1.0, 0.0, 1.0]),
        ([t(), None, None], [0, 0, 0], None, [1.0, 1.0, 1.0]),  # an empty batch: somebody counts
        (SLICES, [3, 2, 1], total, [6.0, 9.0, 6.0]),
        (SLICES, [3, 2, 1], lambda own: own.sum(), [6.0, 9.0, 6.0]),  # a tensor serves too
        ([t(1), None, t(2)], [1, 0, 1], total, [1.0, 0.0, 2.0]),  # nobody asks about None
        (SLICES, [3, 2, 1], lambda own: len(own) == 2, [0.0, 1.0, 0.0]),
    ],
)
def test_what_each_slice_stands_for(
    slices: Any, sizes: list[int], weight_fn: Any, expected: list[float]
) -> None:
    found = losses().weights(slices, sizes, weight_fn)
    assert found == expected
    assert all(type(weight) is float for weight in found)


# --- the mean -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([2.0], [5.0], 2.0),
        ([1.0, 4.0], [2.0, 1.0], 2.0),
        ([1.0, 4.0, 9.0], [1.0, 1.0, 2.0], 5.75),
        ([1.0, NAN, 4.0], [2.0, 0.0, 1.0], 2.0),  # a mean over nothing is NaN, and weighs nothing
        ([NAN, 3.0], [0.0, 7.0], 3.0),
        ([NAN, 3.0], [1.0, 1.0], NAN),  # a true one is not hidden
        ([1.0, 3.0], [1e-300, 1e-300], 2.0),
    ],
)
def test_the_mean_of_the_whole(values: list[float], weights: list[float], expected: float) -> None:
    found = losses().mean([torch.tensor(value) for value in values], weights, CPU)
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, nan_ok=True)


def test_gradients_of_the_mean_are_the_weights_and_none_for_what_is_left_out() -> None:
    leaves = [torch.tensor(1.0, requires_grad=True) for _ in range(3)]
    losses().mean(leaves, [3.0, 0.0, 1.0], CPU).backward()
    assert [None if leaf.grad is None else leaf.grad.item() for leaf in leaves] == [
        0.75,
        None,
        0.25,
    ]


# --- targets --------------------------------------------------------------------------------------


def test_targets_are_cut_as_the_inputs_are() -> None:
    targets = {"y": torch.arange(6), "pair": Pair(torch.zeros(6, 2), "word"), "none": None}
    first, second, third = losses().cut_targets(targets, [3, 0, 3], 0)
    assert (first["y"].tolist(), third["y"].tolist()) == ([0, 1, 2], [3, 4, 5])
    assert second["pair"].left.shape == (0, 2)
    assert third["pair"].right == "word"
    assert [len(part[0]) for part in losses().cut_targets(torch.zeros(2, 5), [1, 4], 1)] == [1, 4]


# --- one slice's loss -----------------------------------------------------------------------------


def test_one_slice() -> None:
    assert losses().of(t(1, 2), t(1, 4)).item() == 2.0
    assert losses(lambda out, target: out["a"].sum()).of({"a": t(1, 2)}, None).item() == 3.0
    assert losses(lambda out, target: torch.tensor(7)).of("no tensors", None).item() == 7


def test_a_criterion_with_parameters_is_refused_with_a_way_out() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

    match = r"`loss_fn` must have no parameters of its own, but has\. Make it part of the module"
    with pytest.raises(ConfigError, match=match):
        losses(Learned())
    losses(nn.CrossEntropyLoss(weight=torch.ones(3)))  # buffers are no parameters


# --- a slice that counts nothing ------------------------------------------------------------------


def test_a_loss_of_nothing_is_zero_and_brings_zeros_whatever_the_outputs_are() -> None:
    outputs = torch.tensor([NAN, math.inf, 1.0], requires_grad=True)
    loss = loss_of_nothing({"a": outputs, "n": torch.ones(2, dtype=torch.int64), "s": "text"})
    loss.backward()
    assert (loss.item(), loss.shape) == (0.0, ())
    assert outputs.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("outputs", ["text", [], torch.ones(2, dtype=torch.int64)], ids=repr)
def test_a_loss_of_nothing_over_nothing_is_zero(outputs: Any) -> None:
    assert loss_of_nothing(outputs).item() == 0.0


def test_a_loss_of_nothing_over_several_dtypes() -> None:
    outputs = [
        torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64)
    ]
    loss_of_nothing(outputs).backward()
    assert [leaf.grad.tolist() for leaf in outputs] == [[0.0, 0.0]] * 2


# --- through the container ------------------------------------------------------------------------


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over targets that are not negative; NaN where all are."""
    return F.cross_entropy(outputs, targets, ignore_index=-1)


def counted(targets: Tensor) -> float:
    return float((targets >= 0).sum())


TARGETS = torch.tensor([0, 1, -1, -1, -1, 2, -1])  # of slices of 3, 2 and 2 rows, the second none


def test_a_slice_without_any_weight_brings_no_nan() -> None:
    net, twin, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(7, 4)
    twin.load_state_dict(net.state_dict())
    assert masked(twin(x[3:5]), TARGETS[3:5]).isnan()
    with phalanx.DataParallel(net, 3) as model:
        loss = model.forward_loss(masked, x, TARGETS, weight_fn=counted)
        loss.backward()
    expected = masked(twin(x), TARGETS)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(net.weight.grad, twin.weight.grad)


def test_a_loss_that_is_nan_everywhere_stays_nan() -> None:
    with phalanx.DataParallel(nn.Linear(4, 3), 3) as model:
        assert model.forward_loss(masked, torch.full((7, 4), torch.nan), TARGETS * 0).isnan()


def test_the_criterion_runs_once_per_slice_in_use_with_its_own_rows() -> None:
    seen: list[tuple[int, int]] = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((len(outputs), len(targets)))
        return outputs.mean()

    with phalanx.DataParallel(nn.Linear(4, 1), 3) as model:
        model.forward_loss(loss_fn, torch.randn(5, 4), torch.zeros(5))
        assert sorted(seen) == [(1, 1), (2, 2), (2, 2)]
        seen.clear()
        model.forward_loss(loss_fn, torch.randn(5, 4), torch.zeros(5), sizes=[0, 5, 0])
        assert seen == [(5, 5)]


def test_the_layouts_dim_counts_for_targets_too() -> None:
    layout = phalanx.Layout(1)
    net, x, y = nn.Linear(4, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    with phalanx.DataParallel(net, 3, layout=layout) as model:
        torch.testing.assert_close(model.forward_loss(F.mse_loss, x, y), F.mse_loss(net(x), y))


def test_an_empty_batch_gives_what_the_criterion_gives_for_nothing() -> None:
    with phalanx.DataParallel(nn.Linear(4, 1), 3) as model:
        x, y = torch.zeros(0, 4), torch.zeros(0, 1)
        assert model.forward_loss(F.mse_loss, x, y).isnan()
        summed = model.forward_loss(lambda out, target: (out - target).sum(), x, y)
    assert summed.item() == 0.0


def test_a_criterion_that_raises_keeps_its_type_and_names_the_replica() -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        if (targets == 5).any():
            raise KeyError("five")
        return outputs.mean()

    with phalanx.DataParallel(nn.Linear(4, 1), 3) as model:
        with pytest.raises(KeyError, match="five") as caught:
            model.forward_loss(loss_fn, torch.randn(7, 4), torch.arange(7.0))
        assert "replica 2" in caught.value.__notes__[0]
        assert model.forward_loss(loss_fn, torch.randn(7, 4), torch.zeros(7)).shape == ()

"""The whole batch's mean loss from the slices' own, and what is no such loss."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.errors import ConfigError

Pair = namedtuple("Pair", ["left", "right"])


def test_a_criterion_with_parameters_is_refused_with_a_way_out() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    match = r"`loss_fn` must have no parameters of its own, but has\. Make it part of the module"
    with phalanx.DataParallel(nn.Linear(3, 3), 2) as model:
        with pytest.raises(ConfigError, match=match):
            model.forward_loss(Learned(), x, y)
        weighted = nn.CrossEntropyLoss(weight=torch.ones(3))  # buffers are no parameters
        torch.testing.assert_close(model.forward_loss(weighted, x, y), weighted(model(x), y))


def test_a_piece_counts_by_its_weight_and_targets_may_be_nested() -> None:
    """The whole mean is weighted by what each piece counts, a number or a tensor."""
    x, y = torch.arange(5.0).unsqueeze(1), torch.tensor([1, 1, 0, 0, 3])

    def mean_over_counted(outputs: Tensor, targets: Any) -> Tensor:
        return (outputs[:, 0] * targets["n"].left).sum() / targets["n"].left.sum()

    targets = {"n": Pair(y, "word"), "none": None}
    with phalanx.DataParallel(nn.Identity(), 3) as model:
        for weight_fn in (lambda own: own["n"].left.sum(), lambda own: int(own["n"].left.sum())):
            found = model.forward_loss(mean_over_counted, x, targets, weight_fn=weight_fn)
            torch.testing.assert_close(found, (x[:, 0] * y).sum() / y.sum())


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

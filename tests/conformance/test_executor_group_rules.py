"""How an executor group cuts, what it refuses, and that a refused call changes nothing.

The sizes are those where MXNet raised, left devices idle that had work, or gave the last one all of
the remainder.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.compat.mxnet import DataBatch, DataParallelExecutorGroup
from phalanx.errors import ConfigError, StateError
from phalanx.plan import equal_sizes, workload_sizes
from tests.contracts.containers import draw
from tests.contracts.groups import (
    F64,
    THREE,
    TWO,
    Loss,
    Net,
    check_against_plain,
    check_picture,
    classes,
    desc,
    group_of,
    labels_desc,
    picture,
)
from tests.zoo import assert_close, gradients_of

pytestmark = pytest.mark.devices

# --- the table of splits --------------------------------------------------------------------------

SPLITS = {
    (5, 2): [3, 2],
    (6, 4): [2, 2, 1, 1],
    (10, 4): [3, 3, 2, 2],
    (20, 8): [3] * 4 + [2] * 4,
    (15, 8): [2] * 7 + [1],
    (36, 7): [6] + [5] * 6,
    (100, 8): [13] * 4 + [12] * 4,
}
# What MXNet refused though there were rows enough, in Python 3 and in Scala.
REFUSED = [(6, 4), (8, 5), (9, 6), (10, 6), (11, 7), (12, 7), (18, 7), (12, 8), (13, 8), (14, 8)]
REFUSED += [(21, 8), (28, 8), (15, 6), (20, 8)]
FEWER_ROWS_THAN_DEVICES = [(0, 3), (1, 3), (2, 3), (7, 8)]


@pytest.mark.parametrize(("rows", "devices"), [*SPLITS, *REFUSED, *FEWER_ROWS_THAN_DEVICES])
def test_every_case_of_the_table_gives_sizes_to_all_devices(rows, devices):
    sizes = SPLITS.get((rows, devices), equal_sizes(rows, devices))
    assert workload_sizes(rows, [1] * devices) == sizes
    x = draw(rows, 3)
    with group_of(nn.Identity(), desc("input", rows, 3), devices=devices) as group:
        assert [part.stop - part.start for part in group.slices] == sizes
        group.forward(x)
        assert seen_rows(group) == sizes
        assert torch.equal(group.get_outputs()[0], x)


def seen_rows(group: DataParallelExecutorGroup) -> list[int]:
    """Return how many rows each device's output has; 0 for a device that took no part."""
    (parts,) = group.get_outputs(False)
    return [0 if part is None else len(part) for part in parts]


@pytest.mark.parametrize(
    ("rows", "workloads", "sizes"),
    [
        (23, [10, 10, 3], [10, 10, 3]),  # two K40c and a K4000, as users asked for
        (7, [10, 10, 3], [3, 3, 1]),
        (15, [1, 5, 9], [1, 5, 9]),
        (5, [1, 0, 1], [3, 0, 2]),
        (1, [1, 5, 9], [0, 0, 1]),
        (9, [0, 0, 2], [0, 0, 9]),
    ],
)
def test_workloads_are_followed_and_zero_switches_a_device_off(rows, workloads, sizes):
    net = Net()
    data = desc("data", rows, 5)
    with group_of(net, data, devices=THREE, workload=workloads, inputs_need_grad=True) as group:
        check_against_plain(group, net, {"data": draw(rows, 5)}, draw(rows, 4, seed=1))
        assert seen_rows(group) == sizes
        assert [part.stop - part.start for part in group.slices] == sizes


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 16])
def test_a_last_batch_of_any_size_gives_the_whole_batchs_loss_and_gradient(rows):
    net = Loss()
    with group_of(net, desc("data", 7, 5), label_shapes=[labels_desc(7)]) as group:
        group.forward(DataBatch(draw(rows, 5), classes(rows)))
        twin = Loss()
        if rows == 0:
            return
        expected = twin(draw(rows, 5), classes(rows))
        expected.backward()
        assert_close(group.get_outputs()[0], expected.detach(), F64)
        group.backward()
        assert_close(gradients_of(net), gradients_of(twin), F64)


# --- what is given whole, and outputs that have no rows -------------------------------------------


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(5, 4).double()

    def forward(self, data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(data * mask), self.fc.weight.sum(1)


def test_an_output_without_rows_is_the_first_devices():
    net = Masked()
    outputs = [desc("logits", 15, 4, layout="NC"), desc("sums", 4, layout="C")]
    data = [desc("data", 15, 5), desc("mask", 5, layout="C")]
    with group_of(net, *data, output_shapes=outputs) as group:
        group.forward((draw(15, 5), draw(5, seed=1)))
        expected = net(draw(15, 5), draw(5, seed=1))
        assert_close(list(group.get_outputs()), [each.detach() for each in expected], F64)
        assert list(group.get_output_shapes()) == [("logits", (15, 4)), ("sums", (4,))]


def test_outputs_are_merged_each_by_its_own_layout():
    class Three(nn.Module):
        def forward(self, data: Tensor) -> tuple[Tensor, ...]:
            return data, data.transpose(0, 1), data.unsqueeze(0)

    outputs = [desc("a", 15, 5), desc("b", 5, 15, layout="CN"), desc("c", 1, 15, 5, layout="TNC")]
    x = draw(15, 5)
    with group_of(Three(), desc("data", 15, 5), output_shapes=outputs) as group:
        group.forward(x)
        for found, expected in zip(group.get_outputs(), Three()(x), strict=True):
            assert torch.equal(found.cpu(), expected)


def test_a_loss_over_the_merged_outputs_reaches_every_device():
    """Contrastive: every row is held against all rows, so activations are gathered before it."""

    def contrast(z: Tensor) -> Tensor:
        return torch.logsumexp(z @ z.T, 1).mean()

    net, twin = Net(), Net()
    with group_of(net, desc("data", 15, 5)) as group:
        group.forward(draw(15, 5))
        merged = group.get_outputs()[0].detach().requires_grad_()
        contrast(merged).backward()
        group.backward([merged.grad])
    contrast(twin(draw(15, 5))).backward()
    assert_close(gradients_of(net), gradients_of(twin), F64)


# --- what is refused ------------------------------------------------------------------------------


def loss_group(net: Loss, **options: Any) -> DataParallelExecutorGroup:
    return group_of(net, desc("data", 7, 5), label_shapes=[labels_desc(7)], **options)


def forward(group: DataParallelExecutorGroup, rows: int = 7) -> None:
    group.forward(DataBatch(draw(rows, 5), classes(rows)))


X, Y = draw(7, 5), classes(7)

BAD_BATCHES = {
    "a name is missing": ({}, ConfigError, r"`?data`?"),
    "a name is extra": ({"data": X, "mask": X}, ConfigError, r"mask"),
    "another name": ({"date": X}, ConfigError, r"date"),
    "too many by place": ((X, X), ConfigError, r"1.*2|2.*1"),
    "other dims": ({"data": draw(7, 5, 2)}, ConfigError, r"`?data`?.*5.*\(7, 5, 2\)"),
    "no tensor": ({"data": "abc"}, ConfigError, r"`?data`?"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_batch_that_does_not_fit_is_refused_by_name(case):
    batch, error, match = BAD_BATCHES[case]
    net = Loss()
    with loss_group(net) as group:
        forward(group)
        group.backward()
        check_refusal(group, net, lambda: group.forward(batch), error, match)


def check_refusal(
    group: DataParallelExecutorGroup,
    net: nn.Module,
    call: Any,
    error: type[Exception],
    match: str,
) -> None:
    """Check the sentence, that all is as it was, and that a good pass after it is right."""
    before = picture(group, net)
    outputs = list(group.get_outputs())
    with pytest.raises(error, match=match):
        call()
    check_picture(group, net, before)
    torch.testing.assert_close(list(group.get_outputs()), outputs, rtol=0, atol=0)
    twin = Loss()
    twin(X, Y).backward()
    forward(group)
    group.backward()
    assert_close(gradients_of(net), gradients_of(twin), F64)


def test_backward_needs_a_forward_pass():
    net = Loss()
    with loss_group(net) as group:
        with pytest.raises(StateError, match=r"`backward\(\)` needs"):
            group.backward()
        assert gradients_of(net) == [None] * 4
        forward(group)
        group.backward()
        check_refusal(group, net, group.backward, StateError, r"`backward\(\)` needs")


def test_backward_needs_a_training_pass():
    net = Loss()
    with loss_group(net, for_training=False) as group:
        forward(group)
        with pytest.raises(StateError, match="training"):
            group.backward()
        assert gradients_of(net) == [None] * 4
    with loss_group(net) as group:
        group.forward(DataBatch(X, Y), is_train=False)
        with pytest.raises(StateError, match="train"):
            group.backward()
        assert gradients_of(net) == [None] * 4
        forward(group)
        group.backward()
        assert all(gradient is not None for gradient in gradients_of(net))


def test_binding_again_always_binds():
    net = Loss()
    with loss_group(net) as group:
        forward(group)
        group.bindExec([desc("data", 9, 5)], [labels_desc(9)], None)
        assert group.getBatchSize() == 9
        group.bind_exec([desc("data", 8, 5)], [labels_desc(8)], None, reshape=True)
        assert group.batch_size == 8
        with pytest.raises(StateError, match="forward"):
            group.backward()


def test_a_module_that_fails_leaves_the_group_usable():
    class Failing(Net):
        fails = False

        def forward(self, data: Tensor) -> Tensor:
            if self.fails:
                raise ZeroDivisionError("asked to")
            return super().forward(data)

    net, twin = Failing(), Net()
    with group_of(net, desc("data", 7, 5)) as group:
        group.forward(X)
        net.fails = True
        with pytest.raises(ZeroDivisionError, match="asked to"):
            group.forward(X)
        net.fails = False
        group.forward(X)
        group.backward([draw(7, 4)])
    twin(X).backward(draw(7, 4))
    assert_close(gradients_of(net), gradients_of(twin), F64)


def test_a_closed_group_leaves_the_module_as_it_was():
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with group_of(net, desc("data", 7, 5), devices=TWO) as group:
            group.forward(X)
        group.close()
    assert [parameter.requires_grad for parameter in net.parameters()] == [True] * 4

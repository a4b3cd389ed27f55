"""What a group is given: of which kind it must be, in whatever memory; and what lies across groups.

Every refusal is checked for its sentence and for having changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor, nn
from torchmetrics import MeanMetric

from phalanx.compat.mxnet import DataBatch, DataParallelExecutorGroup
from tests.conformance.containers import draw
from tests.conformance.groups import (
    CLASSES,
    F64,
    Cell,
    Loss,
    classes,
    desc,
    group_of,
    labels_desc,
)
from tests.zoo import assert_close

pytestmark = pytest.mark.devices

ROWS = 7
X, Y, G = draw(ROWS, 5), classes(ROWS), draw(ROWS, CLASSES, seed=1)


def frozen(module: nn.Module) -> list[str]:
    return [name for name, each in module.named_parameters() if not each.requires_grad]


# --- where rows lie, for metrics ------------------------------------------------------------------


def test_a_loss_stands_for_its_rows_where_labels_have_them_in_another_dim():
    class Mean(nn.Module):
        def forward(self, data: Tensor, label: Tensor) -> Tensor:
            return (data * label).mean()

    x, y, mean = draw(3, 15), draw(3, 15, seed=1), MeanMetric().set_dtype(F64)
    labels = [desc("mask", 3, layout="C"), desc("label", 3, 15, layout="TN")]
    with group_of(Mean(), desc("data", 3, 15, layout="TN"), label_shapes=labels) as group:
        group.forward(DataBatch(x, {"label": y}))
        group.update_metric(mean)
    assert_close(mean.compute(), (x * y).mean(), F64)


# --- of which kind an argument must be ------------------------------------------------------------


@pytest.fixture
def net() -> Loss:
    return Loss()


@pytest.fixture
def group(net: Loss) -> Iterator[DataParallelExecutorGroup]:
    with group_of(net, desc("data", ROWS, 5), label_shapes=[labels_desc(ROWS)]) as group:
        group.forward(DataBatch(X, Y))
        group.backward()
        yield group


H, C = draw(ROWS, 3, seed=2), draw(ROWS, 3, seed=3)


def test_states_may_be_arrays_and_are_converted_as_bound():
    states = [desc("h", ROWS, 3), desc("c", ROWS, 3)]
    with group_of(Cell(), desc("data", ROWS, 5), states=states) as group:
        group.set_states([H.float(), C.numpy()])
        group.forward(X)
        expected = Cell()(X, H.float().double(), C)
        assert_close(list(group.get_outputs()), [each.detach() for each in expected], F64)

"""What an attack on executor groups found, each as a user would meet it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from phalanx.errors import StateError
from tests.conformance.containers import draw
from tests.conformance.groups import (
    CLASSES,
    Net,
    classes,
    desc,
    group_of,
)

pytestmark = pytest.mark.devices

X, Y, G = draw(7, 5), classes(7), draw(7, CLASSES, seed=1)
DATA = desc("data", 7, 5)


# --- inference mode -------------------------------------------------------------------------------


def test_backward_after_a_forward_in_inference_mode_is_refused_and_changes_nothing():
    net = Net()
    with group_of(net, DATA, inputs_need_grad=True) as group:
        group.forward(X)
        group.backward([G])
        before = [parameter.grad for parameter in net.parameters()]
        with torch.inference_mode():
            group.forward(X)
        with pytest.raises(StateError, match="inference_mode"):
            group.backward([G])
        with pytest.raises(StateError, match="backward"):
            group.get_input_grads()
        after = [parameter.grad for parameter in net.parameters()]
        assert all(a is b for a, b in zip(before, after, strict=True))


def test_the_ported_script_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "migrating_mxnet.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec("\n".join(blocks), {"__name__": "ported"})
    assert "probabilities: (6, 3)" in capsys.readouterr().out

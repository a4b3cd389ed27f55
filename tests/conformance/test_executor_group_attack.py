"""What an attack on executor groups found, each as a user would meet it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.compat import mxnet
from phalanx.compat.mxnet import DataBatch, parameters
from phalanx.errors import ConfigError, StateError
from tests.conformance.containers import draw
from tests.conformance.groups import (
    CLASSES,
    F64,
    TWO,
    Net,
    classes,
    desc,
    group_of,
)
from tests.zoo import assert_close

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


# --- failures on the way back ---------------------------------------------------------------------


def run_interrupted(line: int, call: Any) -> bool:
    """Run ``call`` with Ctrl-C at the line number ``line`` of parameters.py; tell if it came."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename != parameters.__file__:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_line_of_backward_loses_no_gradient():
    net = Net()
    with group_of(net, DATA) as group:
        group.forward(X)
        group.backward([G])
        before = [parameter.grad for parameter in net.parameters()]
        line = 1
        while True:
            group.forward(X)
            if not run_interrupted(line, lambda: group.backward([G])):
                break
            after = [parameter.grad for parameter in net.parameters()]
            assert all(a is b for a, b in zip(before, after, strict=True)), line
            line += 1
    assert line > len(before)  # at least once for each parameter that is written


# --- states ---------------------------------------------------------------------------------------


class Shifted(nn.Module):
    def forward(self, data: Tensor, h: Tensor) -> Tensor:
        return data + h


def test_states_are_told_for_what_forward_took_with_padded_rows():
    rows = torch.arange(8, dtype=F64)[:, None]
    with group_of(Shifted(), desc("data", 8, 1), devices=3, states=[desc("h", 8, 1)]) as group:
        group.set_states([rows])
        group.forward(DataBatch(torch.zeros(8, 1, dtype=F64), pad=3))
        assert_close(torch.cat([p for p in group.get_states()[0] if p is not None]), rows[:5], F64)


# --- MXNet's names --------------------------------------------------------------------------------


def test_names_of_states_are_described_among_the_data():
    data = [desc("data", 2, 1), desc("h", 2, 1)]
    with mxnet.DataParallelExecutorGroup(Shifted(), TWO, None, data, state_names=["h"]) as group:
        group.set_states(value=3)
        group.forward(torch.zeros(2, 1, dtype=F64))
        assert group.get_outputs()[0].unique().tolist() == [3]
        for again in (data, data[:1]):
            group.bind_exec(again)
            assert [each.name for each in group.data_shapes] == ["data"]
    with pytest.raises(ConfigError, match="state_names"):
        mxnet.DataParallelExecutorGroup(Shifted(), TWO, None, data[:1], state_names=["h"])


def test_the_ported_script_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "migrating_mxnet.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec("\n".join(blocks), {"__name__": "ported"})
    assert "probabilities: (6, 3)" in capsys.readouterr().out

"""Where torch's engine goes back: in the thread that called it, or in one of the device's own."""

from __future__ import annotations

import pytest
import torch

from phalanx.replicas.source_gradients import has_own_thread


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("cpu", False),
        ("meta", False),
        ("cuda", True),
        ("xpu", True),
        ("mps", True),
        ("hpu", True),
        ("privateuseone", True),
    ],
)
def test_every_accelerator_has_a_thread(kind: str, own: bool) -> None:
    assert has_own_thread(torch.device(kind)) is own

"""What is private to torch does what we use it for."""

from __future__ import annotations

import torch

from phalanx import torch_internals as internals


def test_this_version_of_torch_was_tried() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in internals.TRIED_ON

"""The private parts of torch that we use were tried on this version."""

from __future__ import annotations

import torch

from phalanx import torch_internals as internals


def test_this_version_of_torch_was_tried() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in internals.TRIED_ON

"""What collectives are given is taken for the numbers that it shows."""

from __future__ import annotations

import torch

from phalanx.distributed.tensors import flat_of


def test_negative_views_are_copies_of_what_they_show():
    flat = flat_of(torch._neg_view(torch.ones(3)), "tensor")
    assert flat.copied
    assert flat.data.tolist() == [-1, -1, -1]

"""What collectives refuse before anybody waits for anybody."""

from __future__ import annotations

import pytest
import torch

from phalanx.distributed.tensors import as_bytes, flat_of


def test_nothing_has_no_memory_and_is_no_less_for_it():
    assert flat_of(torch.empty(0, 3), "tensor").data.shape == (0,)


@pytest.mark.parametrize("count", [0, 1])
def test_none_or_one_of_every_second_element_has_bytes(count):
    tensor = torch.arange(8, dtype=torch.int32)[3 : 3 + count : 2]
    found = as_bytes(flat_of(tensor, "tensor").data)
    assert found.view(torch.int32).tolist() == [3] * count


def test_negative_views_are_copies_of_what_they_show():
    flat = flat_of(torch._neg_view(torch.ones(3)), "tensor")
    assert flat.copied
    assert flat.data.tolist() == [-1, -1, -1]

"""What collectives refuse before anybody waits for anybody."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.distributed.tensors import as_bytes, flat_of
from phalanx.errors import ConfigError, UnsupportedError


def freed() -> Tensor:
    tensor = torch.ones(20_000)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(20_000)


@pytest.mark.parametrize("make", [freed, fake])
def test_a_tensor_without_memory_is_refused(make):
    with pytest.raises(UnsupportedError, match=r"`tensor` must hold numbers, but is a \w*Tensor"):
        flat_of(make(), "tensor")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused():
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    words = r"`tensor` must hold numbers as they are, but is quantized \(torch\.qint8\)\. Give"
    with pytest.raises(ConfigError, match=words):
        flat_of(tensor, "tensor")


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(layout):
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(ConfigError, match=r"`tensor` must have one shape, but is nested\. Give"):
        flat_of(tensor, "tensor")


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

"""Tensors that travel in one buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.replicas.flat_layout import FlatLayout, sent_at_once


def several() -> list[Tensor]:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    return [torch.randn(5), torch.randn(0), torch.tensor(3.0), image, torch.randn(7, 3).t()]


def test_they_arrive_as_they_were_and_in_one_storage() -> None:
    given = several()
    found = sent_at_once(given, torch.device("cpu"))
    assert all(map(torch.equal, found, given))
    assert [each.stride() for each in found] == [each.stride() for each in given]
    assert len({each.untyped_storage().data_ptr() for each in found}) == 1
    assert all(each.data_ptr() % 64 == 0 for each in found)


def test_a_write_to_one_is_counted_in_none_of_the_others() -> None:
    layout = FlatLayout(several())
    places = layout.places_in(layout.zeros(torch.device("cpu")))
    before = [each._version for each in places]
    places[0].add_(1)
    raised = [each._version - own for each, own in zip(places, before, strict=True)]
    assert raised == [1, 0, 0, 0, 0]
    assert all(not each.any() for each in places[1:])


def test_gaps_are_left_behind_and_nothing_may_be_all_there_is() -> None:
    (found,) = sent_at_once([torch.arange(12.0).view(3, 4)[:, ::2]], torch.device("cpu"))
    assert found.tolist() == [[0, 2], [4, 6], [8, 10]]
    assert found.is_contiguous()
    (nothing,) = sent_at_once([torch.empty(0, 3)], torch.device("cpu"))
    assert nothing.shape == (0, 3)

"""What the commands of all benchmarks have in common."""

from __future__ import annotations

import pytest

from benchmarks.command import read_counts, read_names
from phalanx.errors import ConfigError


@pytest.mark.parametrize("text", ["", "0", "two", "1,-2"])
def test_numbers_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="`--workers` must be whole numbers from 1 on"):
        read_counts("workers", text, least=1)


@pytest.mark.parametrize("text", ["", "mpi", "phalanx,mpi"])
def test_unknown_names_are_refused(text):
    with pytest.raises(ConfigError, match="`--peers` must name some of phalanx, torch, sep"):
        read_names("peers", text, ("phalanx", "torch"))


def test_names_are_read_once_each_in_their_order():
    assert read_names("peers", "b, a,b", ("a", "b")) == ["b", "a"]

"""The hash index against a dictionary."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from phalanx.tables.hash_index import ENTRIES_PER_KEY, HashIndex, mix

CAPACITY = 64
int64s = st.integers(-(1 << 63), (1 << 63) - 1)
edges = st.sampled_from([0, 1, -1, (1 << 63) - 1, -(1 << 63)])
some_keys = st.lists(int64s | edges | st.integers(0, 20), max_size=12)


def empty() -> HashIndex:
    return HashIndex(
        np.zeros(CAPACITY * ENTRIES_PER_KEY, np.int32), np.zeros(CAPACITY, dtype=np.int64)
    )


def as_array(keys: list[int]) -> np.ndarray:
    return np.array(keys, dtype=np.int64)


@given(batches=st.lists(some_keys, max_size=5), sought=some_keys, dropped=st.integers(0, 5))
def test_it_finds_what_a_dictionary_finds(batches, sought, dropped):
    index, model = empty(), {}
    sizes = [0]
    for batch in batches:
        new = sorted(set(batch) - model.keys())
        index.insert(as_array(new), len(model))
        model.update({key: len(model) + i for i, key in enumerate(new)})
        sizes.append(len(model))
    kept = sizes[max(0, len(sizes) - 1 - dropped)]
    index.drop(kept)
    model = {key: slot for key, slot in model.items() if slot < kept}
    asked = [*sought, *model, *sought]
    assert index.find(as_array(asked)).tolist() == [model.get(key, -1) for key in asked]


def test_keys_of_one_hash_are_all_found(monkeypatch):
    monkeypatch.setattr("phalanx.tables.hash_index.mix", lambda x: np.full(len(x), 255, np.uint64))
    index = empty()
    keys = np.arange(-32, 32)
    index.insert(keys[:10], 0)
    index.insert(keys[10:], 10)
    assert index.find(keys).tolist() == list(range(64))
    assert index.find(as_array([64, -33])).tolist() == [-1, -1]


def test_mix_gives_every_number_another():
    numbers = np.concatenate([np.arange(-50_000, 50_000), np.arange(50_000) << 40])
    assert len(np.unique(mix(numbers))) == len(np.unique(numbers))

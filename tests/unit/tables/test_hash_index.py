"""The hash index against a dictionary."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

from phalanx import tables
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


def unmix(number: int) -> int:
    """Return the number that ``mix`` makes ``number`` of."""

    def unshift(x: int, bits: int) -> int:
        whole = x
        for _ in range(64 // bits):
            whole = x ^ (whole >> bits)
        return whole

    x = unshift(number, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) % (1 << 64)
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) % (1 << 64)
    return unshift(x, 30)


def rounds_of(index: HashIndex, keys: np.ndarray) -> int:
    """Return how many entries the longest search looks at."""
    buckets, longest = index._first_buckets(keys), 0
    for bucket, slot in zip(buckets.tolist(), index.find(keys).tolist(), strict=True):
        length = 1
        while index._entries[(bucket + length - 1) & index._mask] != slot + 1:
            length += 1
        longest = max(longest, length)
    return longest


def test_keys_chosen_to_begin_at_one_place_do_so_under_no_other_seed():
    chosen = np.array([unmix(i << 40 | 5) for i in range(2000)], np.uint64).view(np.int64)
    assert set((mix(chosen) & np.uint64(0xFFFFFFFF)).tolist()) == {5}
    lengths = []
    for seed in (0, 1, -1, 987654321 << 31):
        index = HashIndex(np.zeros(8192, np.int32), np.zeros(2048, np.int64), seed)
        index.insert(chosen, 0)
        lengths.append(rounds_of(index, chosen))
    assert lengths[0] == 2000
    assert max(lengths[1:]) < 40


def test_every_table_draws_its_seed_and_keeps_it_as_it_grows():
    with tables.join() as world:
        made = [world.keys(1, capacity=16, num_shards=3) for _ in range(3)]
        seeds = {table._storage._seed() for table in made}
        assert len(seeds) == 3
        table = made[0]
        keys = torch.arange(-500, 500) << 33
        table.add(torch.ones(1000, 1), rows=keys)
        for shard in table._storage.shards:
            assert shard.newest()._index._seed == table._storage._seed()
            assert 200 < shard.num_rows < 500
        assert torch.equal(table.keys(), keys)

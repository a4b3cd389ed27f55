"""Tables whose rows are found by key: what one process shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx import tables
from phalanx.errors import ConfigError
from phalanx.tables.cut import Cut
from phalanx.tables.keys import KeyPart
from phalanx.tables.part import UNSETTLED

NAN = float("nan")
EDGES = [0, -1, 7, (1 << 63) - 1, -(1 << 63), 10**18]
KEYS_OF_5 = torch.tensor([5, -(1 << 63), 0, 123456789012345, -9])


@pytest.fixture
def world():
    with tables.join(timeout_s=20.0) as world:
        yield world


def test_any_int64_is_a_key(world):
    table = world.keys(1, torch.int64)
    table.add([[i] for i in range(6)], rows=EDGES)
    table.add([[10 * i] for i in range(6)], rows=np.array(EDGES))
    assert table.get(torch.tensor(EDGES)).view(-1).tolist() == [11 * i for i in range(6)]
    assert table.keys().tolist() == sorted(EDGES)
    assert (len(table), table.shape) == (6, (6, 1))


@pytest.mark.parametrize(
    ("num_shards", "kind", "name"), [(1, KeyPart, "_add_once"), (3, Cut, "owners")]
)
def test_keys_that_the_caller_changes_meanwhile_come_once_and_in_their_place(
    world, monkeypatch, num_shards, kind, name
):
    table = world.keys(1, torch.int64, num_shards=num_shards)
    rows, ones = torch.arange(100), torch.ones(100, 1, dtype=torch.int64)
    look_up = getattr(kind, name)

    def look_up_and_change(self, *given):
        found = look_up(self, *given)
        rows.add_(1)  # as another thread may at this moment
        return found

    for _ in range(3):
        rows.copy_(torch.arange(100))
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, look_up_and_change)
            table.add(ones, rows)
    assert table.keys().tolist() == list(range(100))
    assert table.get(range(100)).tolist() == [[3]] * 100


def test_a_get_does_not_bring_a_key_and_reads_the_first_row(world):
    table = world.keys(2, init=[3.0, 4.0])
    assert table.get([8, 8]).tolist() == [[3.0, 4.0]] * 2
    assert len(table) == 0
    table.add([[1, 1]], rows=[8])
    assert table.get([9, 8]).tolist() == [[3.0, 4.0], [4.0, 5.0]]
    assert table.keys().tolist() == [8]


def test_an_add_of_zeros_brings_its_keys_and_one_of_nothing_none(world):
    table = world.keys(2, init=1.0)
    table.add([], rows=[])
    table.add(torch.zeros(3, 2), rows=[4, -4, 4])
    assert table.keys().tolist() == [-4, 4]
    assert table.get([]).shape == (0, 2)
    assert table.get(table.keys()).tolist() == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_it_grows_and_keeps_every_row(world, dtype, num_shards):
    table = world.keys(3, dtype, capacity=1, num_shards=num_shards)
    keys = torch.randperm(3000) * 977 - 10**6
    for some in keys.split(271):
        table.add(torch.ones(len(some), 3, dtype=dtype), rows=some)
        table.add((some % 5).to(dtype).view(-1, 1).expand(-1, 3), rows=some)
    assert torch.equal(table.get(keys), (1 + keys % 5).to(dtype).view(-1, 1).expand(-1, 3))
    assert torch.equal(table.keys(), keys.sort().values)


def test_one_add_may_bring_more_keys_than_there_is_room_for(world):
    table = world.keys(1, capacity=1)
    keys = torch.arange(5000).repeat(2)
    table.add(torch.ones(10_000, 1), rows=keys)
    assert table.get(torch.arange(5001)).sum() == 10_000


@pytest.mark.parametrize("updater", tables.updaters._BUILT_IN)
def test_every_updater_does_to_keys_what_it_does_to_rows(world, updater):
    size = 200
    draw = torch.Generator().manual_seed(1)
    keys = torch.randperm(size, generator=draw) * 7919 - 10**5
    ours = world.keys(3, init=1.0, updater=updater, capacity=8, num_shards=2)
    plain = world.matrix(size, 3, init=1.0, updater=updater)
    for _ in range(12):
        rows = torch.randperm(size, generator=draw)[:60]  # of repeats the sums may differ
        delta = torch.randn(60, 3, generator=draw)
        ours.add(delta, rows=keys[rows])
        plain.add(delta, rows=rows)
    assert torch.equal(ours.get(keys), plain.get())


def test_dc_asgd_makes_up_for_what_came_since_the_key_was_read():
    rule = {"name": "dc_asgd", "lr": 0.5, "compensation": 0.1}
    with tables.join(num_workers=2) as one, one.thread_worker() as two:
        ours = [w.keys(2, init=1.0, updater=rule, capacity=1, name="k") for w in (one, two)]
        plain = [w.matrix(40, 2, init=1.0, updater=rule, name="m") for w in (one, two)]
        draw = torch.Generator().manual_seed(2)
        for _ in range(30):
            k = int(torch.randint(0, 2, (), generator=draw))
            rows = torch.randint(0, 40, (5,), generator=draw)
            delta = torch.randn(5, 2, generator=draw)
            ours[k].add(delta, rows=-3 * rows)
            plain[k].add(delta, rows=rows)
            again = torch.randint(0, 40, (4,), generator=draw)
            assert torch.equal(ours[1 - k].get(-3 * again), plain[1 - k].get(again))


class Fails(tables.Updater):
    name = "fails"

    def apply(self, change: tables.Change) -> None:
        raise RuntimeError("no")


def test_an_updater_that_fails_brings_no_key(world):
    table = world.keys(2, updater=Fails(), capacity=1)
    for rows in ([1, 2], list(range(100))):
        with pytest.raises(RuntimeError, match="no"):
            table.add(torch.ones(len(rows), 2), rows=rows)
        assert len(table) == 0
        assert table.keys().tolist() == []
        assert table.get(rows).sum() == 0


@pytest.mark.parametrize("sync", [False, True])
def test_assign_replaces_rows_and_brings_keys_past_the_updater(world, sync):
    table = world.keys(2, updater={"name": "sgd", "lr": 0.5}, init=9.0, sync=sync)
    table.add([[2, 2]], rows=[1])
    table.assign([[5, 6], [7, 8]], rows=[1, -1])
    assert table.get([1, -1, 0]).tolist() == [[5.0, 6.0], [7.0, 8.0], [9.0, 9.0]]
    with pytest.raises(ConfigError, match="`rows` must hold each key once for `assign`"):
        table.assign([[0, 0]] * 2, rows=[3, 3])
    assert table.keys().tolist() == [-1, 1]


def test_what_a_uniform_table_holds_depends_on_key_and_seed_alone(world):
    keys = torch.arange(-500, 500)
    rule = tables.Uniform(-0.25, 0.5, seed=11)
    first = world.keys(8, init=rule).get(keys)
    grown = world.keys(8, init=rule, capacity=1, num_shards=3)
    grown.add(torch.zeros(1000, 8), rows=keys.flip(0))
    assert torch.equal(grown.get(keys), first)
    assert first.unique().numel() > 7990
    assert (first.min() >= -0.25) & (first.max() < 0.5)
    assert first.mean().item() == pytest.approx(0.125, abs=0.01)
    assert first.var().item() == pytest.approx(0.75**2 / 12, rel=0.05)
    other = world.keys(8, init=tables.Uniform(-0.25, 0.5, seed=12)).get(keys)
    assert not (other == first).any()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_snapshot_brings_keys_values_and_state_back(tmp_path, num_shards):
    def steps(table, k):
        for i in range(k):
            table.add(torch.full((5, 3), float(i + 1)), rows=KEYS_OF_5 + i)

    with tables.join() as world:
        kept = world.keys(3, name="t", updater="adam", init=1.0, capacity=1)
        steps(kept, 3)
        kept.snapshot(tmp_path)
        steps(kept, 2)
        after = kept.get(kept.keys())
        keys = kept.keys()
    with tables.join() as world:
        back = world.keys(3, name="t", updater="adam", init=1.0, num_shards=num_shards)
        back.add(torch.ones(1, 3), rows=[77])
        back.restore(tmp_path)
        assert 77 not in back.keys().tolist()
        steps(back, 2)
        assert torch.equal(back.keys(), keys)
        assert torch.equal(back.get(keys), after)


@pytest.mark.parametrize(
    ("delta", "rows", "message"),
    [
        (
            torch.ones(2, 3),
            None,
            "`rows` must be keys of table 'embed' to read or add to, but is",
        ),
        (torch.ones(2, 3), [0.5, 1.5], "`rows` must hold integers, but holds torch.float32"),
        (torch.ones(2, 3), [[1, 2]], r"`rows` must be a list of row numbers, but has shape"),
        (torch.ones(1, 3), [1 << 63], "`rows` must be a list of integers"),
        (torch.ones(1, 3), np.array([1 << 63], np.uint64), r"`rows` must be below 2\^63"),
        (torch.ones(2, 3), [1, 2, 3], r"`delta` must have shape \(3, 3\) for table 'embed'"),
        (torch.ones(2, 2), [1, 2], r"`delta` must have shape \(2, 3\)"),
        (torch.ones(2, 3).double(), [1, 2], "`delta` must be of torch.float32 like table 'embed'"),
        (torch.tensor([[1, NAN, 1]]), [6], "`delta` must be finite for table 'embed'"),
    ],
)
def test_an_add_that_cannot_be_is_refused_and_brings_no_key(world, delta, rows, message):
    table = world.keys(3, name="embed", updater="adam", init=1.0)
    table.add(torch.ones(2, 3), rows=[1, 2])
    before = table._storage.copy_all(1.0)
    with pytest.raises(ConfigError, match=message):
        table.add(delta, rows=rows)
    for part, was in zip(table._storage.copy_all(1.0), before, strict=True):
        assert torch.equal(part, was)


@pytest.mark.parametrize("updater", ["sum", "adam"])
@pytest.mark.parametrize("capacity", [1, 1 << 17])
def test_a_large_add_that_is_refused_in_its_last_block_brings_no_key(world, updater, capacity):
    table = world.keys(64, updater=updater, init=1.0, capacity=capacity)
    table.add(torch.ones(3, 64), rows=[5, -5, 10**6])
    before = table._storage.copy_all(1.0)
    delta = torch.ones(20_000, 64)
    delta[-1, -1] = NAN
    with pytest.raises(ConfigError, match="`delta` must be finite"):
        table.add(delta, rows=torch.arange(20_000))
    assert len(table) == 3
    assert table.get([7]).unique().tolist() == [1.0]
    for part, was in zip(table._storage.copy_all(1.0), before, strict=True):
        assert torch.equal(part, was)
    table.add(torch.ones(20_000, 64), rows=torch.arange(20_000))
    assert len(table) == 20_002


def test_gets_go_into_out(world):
    table = world.keys(2)
    table.add([[1, 2]], rows=[-1])
    out = torch.empty(2, 2)
    assert table.get([-1, 3], out=out) is out
    assert out.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    with pytest.raises(ConfigError, match="`rows` must be keys of table"):
        table.get()


# --- readers that meet a writer -------------------------------------------------------------------


@pytest.fixture
def two():
    with tables.join(num_workers=2) as one, one.thread_worker() as other:
        yield tuple(w.keys(1, name="t") for w in (one, other))


def after_each_look(monkeypatch, act):
    """Call ``act`` between a reader's look at the rows and what it makes of it."""
    read = KeyPart._read_with

    def overtaken(part, index, keys, out):
        answer = read(part, index, keys, out)
        return UNSETTLED if not part.lock.owner and act() else answer

    monkeypatch.setattr(KeyPart, "_read_with", overtaken)


def test_a_reader_that_found_a_key_missing_reads_again_where_an_add_brings_it(two, monkeypatch):
    reader, writer = two
    writer.add([[1]], rows=[1])
    overtaken = []

    def act():
        if overtaken:
            return False
        overtaken.append(True)
        writer.add([[1], [2]], rows=[1, 2])
        return True

    after_each_look(monkeypatch, act)
    assert reader.get([1, 2]).tolist() == [[2.0], [2.0]]


def test_a_reader_whom_every_look_is_overtaken_takes_the_lock(two, monkeypatch):
    reader, writer = two
    came = []

    def act():
        came.append(-1 - len(came))
        writer.add([[1]] * 9, rows=range(9 * came[-1], 9 * came[-1] + 9))
        return True

    after_each_look(monkeypatch, act)
    assert reader.get([1, 2]).tolist() == [[0.0], [0.0]]
    assert len(came) == 3


def test_many_restores_leave_room_and_take_no_memory(tmp_path, world):
    """Rows of a restore lie where no others are; the memory of those goes back."""
    table = world.keys(2, torch.int64, name="t")
    table.add(torch.ones(5000, 2, dtype=torch.int64), rows=torch.arange(5000))
    table.snapshot(tmp_path)
    nbytes = []
    for i in range(7):
        table.add([[i, i]] * 3, rows=[i, -1 - i, -77])
        table.restore(tmp_path)
        assert table.keys().tolist() == list(range(5000))
        assert table.get([0, 4999, -77]).tolist() == [[1, 1], [1, 1], [0, 0]]
        nbytes.append(table.stats().nbytes)
    assert max(nbytes) < 3 * nbytes[0]

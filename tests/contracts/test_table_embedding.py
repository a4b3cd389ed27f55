"""Embeddings over a table, beside torch's own over a parameter: the same values, the same rows."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import tables
from phalanx.errors import UnsupportedError
from tests.worlds import in_table_worlds

pytestmark = pytest.mark.promise("updaters-are-their-formulas")

ROWS, DIM, LR = 11, 3, 0.5


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def open_table(world: tables.TableGroup, **how: object) -> tables.Table:
    dtype = how.get("dtype", torch.float32)
    how = {"name": "t", "init": weights(dtype=dtype), "updater": tables.Sgd(lr=LR), **how}
    return world.matrix(ROWS, DIM, **how)


def torchs_own(dtype: torch.dtype = torch.float32, **how: object) -> nn.Embedding:
    return nn.Embedding(ROWS, DIM, _weight=weights(dtype=dtype), **how)


def some_loss(out: Tensor) -> Tensor:
    """Every element has a gradient of its own, and rows that stand twice get different ones."""
    factors = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape) / 8
    return (out * factors).tanh().sum()


# --- TableEmbedding -------------------------------------------------------------------------------


SHAPES = [(7,), (4, 5), (2, 1, 3), (0,), (3, 0), ()]


def train_in_turn(world: tables.TableGroup, dtype: torch.dtype, padding: int | None) -> None:
    """All train the twin; the table gets each gradient of one worker."""
    draw = torch.Generator().manual_seed(1)
    twin = torchs_own(dtype, padding_idx=padding)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    table = open_table(world, dtype=dtype)
    embedding = tables.TableEmbedding(table, padding_idx=padding)
    for step, shape in enumerate(2 * SHAPES):
        indices = torch.randint(0, ROWS, shape, generator=draw)
        out, want = embedding(indices), twin(indices)
        assert torch.equal(out, want)
        assert out.dtype == dtype
        world.barrier()
        if step % world.num_workers == world.worker_id:
            some_loss(out).backward()
        optimizer.zero_grad()
        some_loss(want).backward()
        optimizer.step()
        world.barrier()
        assert torch.equal(table.get(), twin.weight)


@in_table_worlds(padding=[0, 10, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_trained_rows_are_those_of_nn_embedding(world, n, padding, dtype, run):
    world.run(partial(train_in_turn, dtype=dtype, padding=padding), n, run=run)


def test_a_padding_row_has_no_part_in_an_updater_with_state():
    with tables.join() as world:
        table = open_table(world, updater="adam")
        embedding = tables.TableEmbedding(table, padding_idx=2)
        some_loss(embedding(torch.tensor([2, 3, 2]))).backward()
        some_loss(embedding(torch.tensor([2, 2]))).backward()  # nothing but padding
        assert torch.equal(table.get([2])[0], weights()[2])
        untouched = open_table(world, updater="adam")
        for each in (table, untouched):  # the first update of the row, as of one never asked for
            each.add(torch.ones_like(weights()[2:3]), rows=[2])
        assert torch.equal(table.get([2]), untouched.get([2]))


def test_nothing_is_pushed_without_a_backward_pass():
    with tables.join() as world:
        table = open_table(world)
        embedding = tables.TableEmbedding(table)
        with torch.no_grad():
            assert not embedding(torch.tensor([1])).requires_grad
        embedding(torch.tensor([1]))
        torch.autograd.grad(
            (embedding(torch.tensor([1])) * (x := torch.ones(1, requires_grad=True))).sum(), x
        )
        assert torch.equal(table.get(), weights())


def test_every_backward_pass_pushes_once():
    with tables.join() as world:
        table = open_table(world)
        embedding = tables.TableEmbedding(table)
        out = embedding(torch.tensor([4, 4]))
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        torch.testing.assert_close(table.get([4])[0], weights()[4] - 4 * LR)


# --- freezing, several look-ups, copies -----------------------------------------------------------


def freeze_by_module(net: nn.Module) -> None:
    net.requires_grad_(False)


def freeze_by_parameters(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.requires_grad = False


@pytest.mark.parametrize("freeze", [freeze_by_module, freeze_by_parameters])
def test_what_freezes_the_parameters_of_a_module_freezes_the_rows(freeze):
    with tables.join() as world:
        table = open_table(world)
        net = nn.Sequential(tables.TableEmbedding(table), nn.Linear(DIM, 2))
        freeze(net)
        assert not net(torch.tensor([5])).requires_grad
        net[1].requires_grad_(True)
        net(torch.tensor([5])).sum().backward()
        assert torch.equal(table.get(), weights())
        net.requires_grad_(True)
        net(torch.tensor([5])).sum().backward()
        assert not torch.equal(table.get(), weights())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_look_ups_of_one_backward_pass_are_one_update(name, padding, modules):
    """Rows of one look-up, of two, of three; and an updater sees each of them once."""
    twin = torchs_own(padding_idx=padding)
    optimizer = OPTIMIZERS[name](twin.parameters())
    with tables.join() as world:
        table = open_table(world, updater={"name": name, "lr": 0.1})
        ours = [tables.TableEmbedding(table, padding) for _ in range(modules)]
        order = torch.arange(ROWS)
        for _ in range(3):
            for looks in (ours[0], ours[-1], ours[0]), (twin, twin, twin):
                a, b, c = (
                    look(rows)
                    for look, rows in zip(looks, (order, order[:7], order[:5]), strict=True)
                )
                (some_loss(a[:7] * b) + some_loss(c)).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(table.get(), twin.weight)


def test_a_backward_pass_that_failed_leaves_nothing_for_the_next_one():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            raise RuntimeError("on its way back")

    with tables.join() as world:
        table = open_table(world)
        embedding = tables.TableEmbedding(table)
        fails, other = Fails.apply(embedding(torch.tensor([1]))), embedding(torch.tensor([2]))
        with pytest.raises(RuntimeError, match="on its way back"):
            (fails + other).sum().backward()
        assert torch.equal(table.get(), weights())
        first, second = embedding(torch.tensor([3])), embedding(torch.tensor([4]))
        first.sum().backward()
        second.sum().backward()
        moved = table.get() - weights()
        assert moved.abs().sum(1).nonzero().flatten().tolist() == [3, 4]


def in_trainer(net: nn.Module) -> None:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return out.square().mean()

    phalanx.Trainer(net, loss, partial(torch.optim.SGD, lr=0.1), replicas=2, microbatches=2).step(
        (torch.tensor([1, 2]), torch.tensor([1, 2]))
    )


def in_data_parallel(net: nn.Module) -> None:
    phalanx.DataParallel(net, devices=2)(torch.tensor([1, 2]))


@pytest.mark.parametrize("use", [in_trainer, in_data_parallel, copy.deepcopy, pickle.dumps])
def test_it_says_that_it_cannot_be_copied_into_replicas(use):
    with tables.join() as world:
        net = nn.Sequential(tables.TableEmbedding(open_table(world)), nn.Linear(DIM, 2))
        with pytest.raises(UnsupportedError, match="Table 't' must stay with the worker that"):
            use(net)


# --- rows found by key ----------------------------------------------------------------------------

KEYS = torch.tensor([-7, 10**18, 0, 3, 2**63 - 1, -(2**63)])


def train_by_key_in_turn(world: tables.TableGroup, padding: int | None) -> None:
    first = tables.Uniform(-1.0, 1.0, seed=3)
    table = world.keys(DIM, name="t", init=first, updater=tables.Sgd(lr=LR))
    twin = nn.Embedding.from_pretrained(table.get(KEYS), freeze=False, padding_idx=padding)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    given = None if padding is None else int(KEYS[padding])
    embedding = tables.TableEmbedding(table, padding_idx=given)
    assert (len(table), embedding.embedding_dim) == (0, DIM)
    for step, places in enumerate(([[0, 1, 1], [5, 4, 1]], [[2, 2, 0]])):
        out, want = embedding(KEYS[torch.tensor(places)]), twin(torch.tensor(places))
        assert torch.equal(out, want)
        world.barrier()
        if step % world.num_workers == world.worker_id:
            some_loss(out).backward()
        optimizer.zero_grad()
        some_loss(want).backward()
        optimizer.step()
        world.barrier()
        assert torch.equal(table.get(KEYS), twin.weight)
    come = {0, 1, 2, 4, 5} - {padding}
    assert table.keys().tolist() == sorted(int(KEYS[place]) for place in come)


@in_table_worlds(padding=[1, None])
def test_over_a_keys_table_indices_are_keys(world, n, padding, run):
    world.run(partial(train_by_key_in_turn, padding=padding), n, run=run)

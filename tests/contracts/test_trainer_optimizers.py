"""A training step is `optimizer.step()` of a plain loop over the same gradients, bit for bit."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed import TCPStore
from torch.optim import Optimizer

import phalanx
from tests.multiprocess.children import Children, Parent
from tests.worlds import EXECUTOR_WORLDS, World

pytestmark = pytest.mark.promise("replicas-change-no-bit", "whole-training-loops")

STEPS = 8
SHAPES = ((7, 5), (300, 9), (9,), (64,), (3, 2, 4, 4), (), (0,))
MISSING = {1: (2,), 4: (1, 2, 4), 5: (0,)}  # by step: parameters without a gradient
LATE = 5  # the parameter whose first gradient comes in the second step, if one does
CHANGED = 3  # the step before which options are changed
GROUPS = 2
HALF = len(SHAPES) // GROUPS

Make = Callable[[list[nn.Parameter]], Optimizer]


class Given(nn.Module):
    """A model whose gradients are what its buffers say for each step.

    Args:
        dtype: Of its parameters; None: one of them is of another than the others.
        late: Whether one gets its first gradient later than the others.
    """

    def __init__(self, dtype: torch.dtype | None, *, late: bool = True) -> None:
        super().__init__()
        self.late = late
        draw = torch.Generator().manual_seed(7)
        for index, shape in enumerate(SHAPES):
            kind = dtype or (torch.bfloat16 if index == 3 else torch.float32)
            value = torch.randn(shape, generator=draw).to(kind)
            if value.dim() == 4:
                value = value.to(memory_format=torch.channels_last)
            if index == 0:  # with gaps in its memory
                value = torch.stack([value, value], 2)[:, :, 0]
            self.register_parameter(f"p{index}", nn.Parameter(value))
            self.register_buffer(f"g{index}", torch.randn(STEPS, *shape, generator=draw).to(kind))

    def gradients(self, step: int) -> list[Tensor | None]:
        missing = (LATE,) if self.late and step == 0 else MISSING.get(step, ())
        places = range(len(SHAPES))
        return [None if i in missing else getattr(self, f"g{i}")[step] for i in places]

    def forward(self, step_N: Tensor) -> Tensor:
        given = self.gradients(int(step_N[0]))
        parameters = list(self.parameters())
        pairs = zip(parameters, given, strict=True)
        return torch.stack([(p * g).sum().double() for p, g in pairs if g is not None]).sum()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def in_groups(kind: type[Optimizer], **options: Any) -> Make:
    return partial(_in_groups, kind, options)


def _in_groups(
    kind: type[Optimizer], options: dict[str, Any], parameters: list[nn.Parameter]
) -> Optimizer:
    if kind is optim.Adafactor:  # which divides by a parameter's number of elements
        parameters = [each for each in parameters if each.numel()]
    groups: list[dict[str, Any]] = [{"params": parameters[HALF:]}, {"params": parameters[:HALF]}]
    groups[0]["lr"] = 0.02
    return kind(groups, **{"lr": 0.01, **options})


OPTIMIZERS: dict[str, Make] = {
    "sgd": in_groups(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd without momentum": in_groups(optim.SGD),
    "sgd that maximizes": in_groups(optim.SGD, momentum=0.9, dampening=0.3, maximize=True),
    "adam": in_groups(optim.Adam, amsgrad=True),
    "adamw": in_groups(optim.AdamW, weight_decay=0.1),
    "adamw foreach": in_groups(optim.AdamW, foreach=True),
    "rmsprop": in_groups(optim.RMSprop, centered=True, momentum=0.9),
    "adagrad": in_groups(optim.Adagrad, lr_decay=0.1),
    "nadam": in_groups(optim.NAdam),
    "radam": in_groups(optim.RAdam),
    "adamax": in_groups(optim.Adamax),
    "adadelta": in_groups(optim.Adadelta),
    "asgd": in_groups(optim.ASGD),
    "rprop": in_groups(optim.Rprop),
    "adafactor": in_groups(optim.Adafactor),
}
WITH_MOMENTUM = ("sgd", "sgd that maximizes")
FUSED = (*WITH_MOMENTUM, "sgd without momentum", "adam", "adamw", "adagrad")
"""Where nothing else is chosen, these are stepped by torch's fused kernels on a CPU."""


def change_options(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        if "weight_decay" in group:
            group["weight_decay"] = 0.02
        if group.get("momentum") == 0:
            group["momentum"] = 0.9  # from now on there is state


Left = tuple[list[Tensor], dict[int, dict[str, Any]]]


def left_by(module: nn.Module, optimizer: Optimizer) -> Left:
    state = optimizer.state_dict()["state"]
    return [p.detach().clone() for p in module.parameters()], state


def given(name: str, dtype: torch.dtype | None) -> Given:
    return Given(
        dtype, late=name not in WITH_MOMENTUM
    )  # torch's fused SGD begins all momentum at once


def plain(name: str, dtype: torch.dtype | None) -> Left:
    module = given(name, dtype)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()  # torch's fused kernels know of no gaps
    optimizer = OPTIMIZERS[name](list(module.parameters()))
    if name in FUSED:
        least = 4 if name.startswith("sgd") else 1  # its kernel computes short floats wrongly
        for group in optimizer.param_groups:
            group["fused"] = all(p.itemsize >= least for p in group["params"])
    for step in range(STEPS):
        if step == CHANGED:
            change_options(optimizer)
        for parameter, gradient in zip(module.parameters(), module.gradients(step), strict=True):
            parameter.grad = None
            if gradient is not None:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
    return left_by(module, optimizer)


def trained(
    executor: Any, replicas: int, name: str, dtype: torch.dtype | None, folder: Path
) -> Left:
    module = given(name, dtype)
    with phalanx.Trainer(
        module, loss, OPTIMIZERS[name], executor=executor, replicas=replicas, microbatches=4
    ) as trainer:
        for step in range(STEPS):
            if step == CHANGED:
                change_options(trainer.optimizer)
            trainer.step((torch.full((8,), step), torch.zeros(8)))
        trainer.save(folder / "checkpoint")  # ranks bring the whole state together
        return left_by(module, trainer.optimizer)


def assert_same(found: Left, expected: Left) -> None:
    weights, state = found
    assert all(map(torch.equal, weights, expected[0]))
    assert state.keys() == expected[1].keys()
    for index, entries in expected[1].items():
        assert state[index].keys() == entries.keys()
        for key, value in entries.items():
            got = state[index][key]
            if isinstance(value, Tensor):
                assert got.dtype == value.dtype
                assert torch.equal(got, value), (index, key)
            else:
                assert got == value, (index, key)


EVERYWHERE = ("sgd", "adamw", "nadam", "adafactor")
"""By day the others meet threads and ranks alone, which divide them into shards."""


def names_in_worlds() -> Iterator[Any]:
    for each in EXECUTOR_WORLDS:
        for name in OPTIMIZERS:
            by_day = name in EVERYWHERE or each.id in ("3 threads", "3 ranks")
            marks = each.marks if by_day else pytest.mark.night
            yield pytest.param(*each.values, name, id=f"{name}-{each.id}", marks=marks)


@pytest.mark.parametrize(("world", "n", "name"), list(names_in_worlds()))
def test_a_step_equals_a_plain_loops_in_every_executor(
    world: World, n: int, name: str, tmp_path: Path
) -> None:
    expected = plain(name, torch.float32)
    for found in world.run(trained, n, name=name, dtype=torch.float32, folder=tmp_path):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in ("sgd", "adamw", "nadam")),
        *((name, torch.bfloat16) for name in ("sgd", "sgd without momentum", "adamw", "nadam")),
        ("sgd", torch.float16),
        *((name, None) for name in ("sgd", "adamw", "adamax")),
    ],
)
def test_a_step_equals_a_plain_loops_in_other_dtypes(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    assert_same(trained("threads", 2, name, dtype, tmp_path), plain(name, dtype))


def test_momentum_may_begin_later_for_some_parameters() -> None:
    found = []
    for replicas in (1, 2, 3):
        module = Given(torch.float64)
        with phalanx.Trainer(module, loss, OPTIMIZERS["sgd"], replicas=replicas) as trainer:
            for step in range(STEPS):
                trainer.step((torch.full((8,), step), torch.zeros(8)))
            found.append(left_by(module, trainer.optimizer))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    twin = Given(torch.float64)
    optimizer = OPTIMIZERS["sgd"](list(twin.parameters()))
    for step in range(STEPS):
        for parameter, gradient in zip(twin.parameters(), twin.gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for ours, theirs in zip(found[0][0], twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())


def trained_with_another_layout(executor: Any, replicas: int, *, changes: bool = True) -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten()).double()
    batch = torch.randn(8, 3, 4, 4).double(), torch.randn(8, 20).double()
    with phalanx.Trainer(
        net, nn.MSELoss(), optim.AdamW, executor=executor, replicas=replicas
    ) as trainer:
        for step in range(STEPS):
            if step == CHANGED and changes:
                net.to(memory_format=torch.channels_last)
                trainer.refresh()
            trainer.step(batch)
    return net[0].weight.detach().contiguous()


@pytest.mark.parametrize(("world", "n"), EXECUTOR_WORLDS)
def test_weights_may_be_laid_out_anew(world: World, n: int) -> None:
    expected = trained_with_another_layout("inline", 1, changes=False)
    for found in world.run(trained_with_another_layout, n):
        torch.testing.assert_close(found, expected)


def test_a_large_sparse_gradient_comes_from_a_worker_process() -> None:
    found = []
    for executor in ("inline", "processes"):
        torch.manual_seed(0)
        net = nn.Embedding(2048, 128, sparse=True)
        with phalanx.Trainer(net, nn.MSELoss(), optim.SGD, executor=executor) as trainer:
            trainer.step((torch.arange(8), torch.ones(8, 128)))
        found.append(net.weight.detach().clone())
    assert torch.equal(*found)


def step_all_in_elastic_ranks(
    parent: Parent, rank: int, size: int, port: int, folder: Path
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent keeps it
    for run, name in enumerate(OPTIMIZERS):
        own = folder / name.replace(" ", "-")
        own.mkdir(exist_ok=True)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(run)
        parent.tell(pickle.dumps(trained(phalanx.Ranks(), 1, name, torch.float32, own)))


def test_a_step_equals_a_plain_loops_in_elastic_ranks(tmp_path: Path) -> None:
    """Each of them steps all parameters."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with Children() as children:
        ranks = [
            children.start(step_all_in_elastic_ranks, rank, 2, store.port, tmp_path)
            for rank in range(2)
        ]
        for name in OPTIMIZERS:
            expected = plain(name, torch.float32)
            for each in ranks:
                assert_same(pickle.loads(each.get()), expected)

"""What every container has: threads and their start, graphs, copies.

Held for replicas of one module and for columns alike.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import AbstractParallel, DataParallel
from phalanx.errors import StateError
from phalanx.parallel import container
from phalanx.parallel.container import Container


class Mixture(AbstractParallel):
    def distribute(self, inputs: Tensor) -> list[Tensor]:
        return [inputs] * len(self)

    def merge(self, outputs: list[Tensor]) -> Tensor:
        return torch.stack(outputs).sum(0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def replicas(make: Callable[[], nn.Module] = net) -> DataParallel:
    return DataParallel(make(), 3)


def columns(make: Callable[[], nn.Module] = net) -> Mixture:
    model = Mixture()
    for _ in range(3):
        model.add(make(), "cpu")
    return model


def plain(model: nn.Module, x: Tensor) -> Tensor:
    """Return what the container returns, by plain torch."""
    if isinstance(model, DataParallel):
        return model.module(x)
    assert isinstance(model, Mixture)
    return torch.stack([model.get(index)(x) for index in range(len(model))]).sum(0)


def twin_gradients(model: nn.Module, *batches: Tensor) -> list[Tensor]:
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for x in batches:
        plain(twin, x).square().sum().backward()
    return [parameter.grad for parameter in twin.parameters()]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def draw(rows: int = 5) -> Tensor:
    return torch.randn(rows, 3)


def worker_names() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("phalanx-replica"))


NAMES = [f"phalanx-replica-{index}" for index in range(3)]
MAKE = {"replicas": replicas, "columns": columns}


@pytest.fixture(params=MAKE.values(), ids=MAKE.keys())
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


@pytest.fixture
def model(make: Callable[[], Any]) -> Iterator[Any]:
    with make() as made:
        yield made


# --- several callers ------------------------------------------------------------------------------


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], None]:
    """Return what lets a function wait at its end for another call of it, which shall not come."""

    def let_meet(owner: Any, name: str) -> None:
        call, met = getattr(owner, name), threading.Barrier(2)

        def call_together(*args: Any) -> Any:
            found = call(*args)
            with suppress(threading.BrokenBarrierError):
                met.wait(0.3)
            return found

        monkeypatch.setattr(owner, name, call_together)

    return let_meet


def called_by_two(model: nn.Module, x: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    callers = [threading.Thread(target=lambda: found.append(model(x))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    return found


def test_threads_that_call_one_container_lose_no_count_and_draw_each_their_own(
    make: Any, meeting: Any
) -> None:
    meeting(container, "check_statistics")
    x = draw(64)
    with make(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())) as model:
        first, second = called_by_two(model, x)
        assert not torch.equal(first == 0, second == 0)
        counts = [each for name, each in model.named_buffers() if name.endswith("tracked")]
        assert counts
        assert all(each.item() == 2 for each in counts)


def test_threads_that_make_the_first_call_make_one_set_of_threads(make: Any, meeting: Any) -> None:
    with make() as model:
        meeting(type(model), "_make_executor")
        first, second = called_by_two(model, draw())
        assert torch.equal(first, second)
        assert worker_names() == NAMES


# --- threads --------------------------------------------------------------------------------------


def test_threads_are_made_by_the_first_pass_and_dismissed_by_close(make: Any) -> None:
    model = make()
    assert worker_names() == []
    model(draw())
    model(draw())
    assert worker_names() == NAMES
    model.close()
    model.close()
    assert worker_names() == []
    assert model(draw()).shape == (5, 2)
    assert worker_names() == NAMES
    model.close()


def test_leaving_the_block_dismisses_them_also_by_an_exception(make: Any) -> None:
    def use() -> None:
        with make() as model:
            model(draw())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert worker_names() == []


def test_a_container_that_is_dropped_dismisses_them(make: Any) -> None:
    model = make()
    model(draw())
    made = [t for t in threading.enumerate() if t.name.startswith("phalanx-replica")]
    del model
    gc.collect()
    for thread in made:
        thread.join(30)
    assert worker_names() == []


def test_init_runs_once_in_every_thread_before_the_first_pass(model: Any) -> None:
    seen: list[str] = []
    assert model.threads(lambda: seen.append(threading.current_thread().name)) is model
    assert seen == []
    model(draw())
    assert sorted(seen) == NAMES
    model(draw())
    assert sorted(seen) == NAMES


def test_init_of_later_makes_new_threads_and_runs_all_again(model: Any) -> None:
    seen: list[str] = []
    model.threads(lambda: seen.append("first"))
    model(draw())
    model.threads(lambda: seen.append("second"))
    assert worker_names() == []
    model(draw())
    assert seen == ["first"] * 6 + ["second"] * 3
    assert worker_names() == NAMES


def test_init_that_raises_keeps_its_type_and_leaves_no_thread(model: Any) -> None:
    fails = [True]

    def init() -> None:
        if fails and threading.current_thread().name.endswith("1"):
            raise KeyError("init")

    model.threads(init)
    for _ in range(2):
        with pytest.raises(KeyError, match="init"):
            model(draw())
        assert worker_names() == []
    fails.clear()
    x = draw()
    assert_close(model(x), plain(model, x))


def test_every_thread_runs_its_operators_on_as_many_threads_as_asked_for() -> None:
    seen: list[int] = []
    for made in (DataParallel(net(), 3, intra_op=2), Mixture(intra_op=2)):
        if isinstance(made, Mixture):
            made.add(net(), "cpu").add(net(), "cpu").add(net(), "cpu")
        before = torch.get_num_threads()
        with made as model:
            for child in model.children():
                child.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
            model(draw())
        assert torch.get_num_threads() == before
    assert seen == [2] * 6


# --- modes ----------------------------------------------------------------------------------------


def test_random_numbers_are_those_of_the_processes_seed(make: Any) -> None:
    with make(lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))) as model:
        x = torch.ones(9, 3)
        model(x)  # now it is known that the model draws
        torch.manual_seed(3)
        first, second = model(x), model(x)
        torch.manual_seed(3)
        assert torch.equal(model(x), first)
        assert torch.equal(model(x), second)
        assert not torch.equal(first, second)
        model.close()
        torch.manual_seed(3)
        assert torch.equal(model(x), first)  # also in the first pass of new threads


# --- graphs ---------------------------------------------------------------------------------------


def test_backward_twice_needs_the_graph_kept(model: Any) -> None:
    x = draw()
    value = loss(model, x)
    value.backward(retain_graph=True)
    value.backward(retain_graph=True)
    assert_close(gradients(model), [2 * grad for grad in twin_gradients(model, x)])
    output = model(x)
    output.sum().backward()
    with pytest.raises((StateError, RuntimeError), match="retain_graph=True"):
        output.sum().backward()


def test_outputs_may_be_changed_in_place(model: Any) -> None:
    x = draw()
    output = model(x)
    output.mul_(2).add_(1)
    output.sum().backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    plain(twin, x).mul(2).add(1).sum().backward()
    assert_close(gradients(model), gradients(twin))


@pytest.mark.parametrize("rule", ["per_replica", "first"])
def test_an_output_that_backward_needs_and_that_was_changed_is_noticed(rule: str) -> None:
    """Unmerged outputs are the replicas' own memory."""
    with DataParallel(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), 3, output=rule) as model:
        output = model(draw())
        output = output[0] if rule == "per_replica" else output
        output.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_an_input_may_be_changed_before_the_backward_pass(model: Any) -> None:
    """Replicas have copies of the inputs."""
    x = draw()
    expected = twin_gradients(model, x)
    value = loss(model, x)
    x.zero_()
    value.backward()
    assert_close(gradients(model), expected)


def test_a_pass_that_fails_leaves_the_next_one_whole(make: Any) -> None:
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise KeyError("nan")
            return super().forward(x)

    with make(lambda: Picky(3, 2)) as model:
        x = draw()
        loss(model, x).backward()
        bad = x.clone()
        bad[-1] = float("nan")
        with pytest.raises(KeyError, match="nan"):
            model(bad)
        loss(model, x).backward()
        assert_close(gradients(model), twin_gradients(model, x, x))


def test_a_module_without_inputs_runs_on_one_replica() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3.0))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self) -> Tensor:
            self.calls += 1
            return 2 * self.weight

    net = Constant()
    with DataParallel(net, 3, buffers="sum") as model:
        found = model()
        found.sum().backward()
    assert torch.equal(found, 2 * net.weight)
    assert net.calls == 1
    assert torch.equal(net.weight.grad, torch.full((3,), 2.0))


# --- copies and the source ------------------------------------------------------------------------


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("duplicate", WAYS.values(), ids=WAYS.keys())
def test_a_copy_is_equal_independent_and_has_threads_of_its_own(model: Any, duplicate: Any) -> None:
    x = draw()
    model(x)
    other = duplicate(model)
    assert type(other) is type(model)
    assert isinstance(other, Container)
    assert worker_names() == NAMES
    with other:
        assert torch.equal(other(x), model(x))
        assert worker_names() == sorted(NAMES * 2)
        with torch.no_grad():
            next(iter(other.parameters())).add_(1)
        assert not torch.equal(other(x), model(x))
    assert worker_names() == NAMES

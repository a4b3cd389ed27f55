"""What every container has: threads and their start, flat and shared parameters, held gradients.

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

from phalanx import AbstractParallel, DataDesc, DataParallel, DataParallelExecutorGroup
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


def test_init_runs_before_the_module_does(make: Any) -> None:
    order: list[str] = []

    class Tells(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            order.append("forward")
            return super().forward(x)

    with make(lambda: Tells(3, 2)) as model:
        model.threads(lambda: order.append("init"))
        model(draw())
    assert order == ["init"] * 3 + ["forward"] * 3


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


def test_init_may_keep_what_is_the_threads_own(model: Any) -> None:
    own = threading.local()

    def init() -> None:
        own.name = threading.current_thread().name

    found: list[str] = []
    model.threads(init)
    for child in model.children():
        child.register_forward_hook(lambda *_: found.append(own.name))
    model(draw())
    assert sorted(found) == NAMES


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


# --- flat parameters ------------------------------------------------------------------------------


def assert_flat(model: Any, values: Tensor, grads: Tensor) -> None:
    parameters = list(model.parameters())
    assert values.numel() == grads.numel() == sum(p.numel() for p in parameters)
    assert torch.equal(torch.cat([p.detach().flatten() for p in parameters]), values)
    assert torch.equal(torch.cat([p.grad.flatten() for p in parameters]), grads)
    inside = range(grads.data_ptr(), grads.data_ptr() + grads.nbytes)
    assert all(p.grad.data_ptr() in inside for p in parameters)


def test_flat_parameters_are_the_models(model: Any) -> None:
    x = draw()
    model(x)
    values, grads = model.flat_parameters()
    assert_flat(model, values, grads)
    assert grads.count_nonzero() == 0
    loss(model, x).backward()
    assert_flat(model, values, grads)
    assert_close(gradients(model), twin_gradients(model, x))
    values.sub_(grads, alpha=0.1)
    assert_close(model(x), plain(model, x))
    values.zero_()
    assert model(x).count_nonzero() == 0


def test_gradients_that_were_there_are_kept(model: Any) -> None:
    x = draw()
    loss(model, x).backward()
    values, grads = model.flat_parameters()
    assert_flat(model, values, grads)
    assert_close(gradients(model), twin_gradients(model, x))


ZERO: dict[str, Callable[[Any], object]] = {
    "to none": lambda model: model.zero_grad(set_to_none=True),
    "to zero": lambda model: model.zero_grad(set_to_none=False),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).zero_grad(),
    "each": lambda model: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO.keys())
def test_flat_gradients_stay_flat_whoever_zeroes_them(model: Any, zero: Any) -> None:
    x = draw()
    values, grads = model.flat_parameters()
    loss(model, x).backward()
    zero(model)
    loss(model, x).backward()
    assert_flat(model, values, grads)
    assert_close(gradients(model), twin_gradients(model, x))


def test_zeroing_flat_gradients_zeroes_the_tensor(model: Any) -> None:
    _, grads = model.flat_parameters()
    loss(model, draw()).backward()
    model.zero_grad()
    assert grads.count_nonzero() == 0
    assert all(p.grad is not None for p in model.parameters())


def test_ties_are_counted_once() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    for model in (DataParallel(tied, 3), Mixture().add(tied[0], "cpu").add(tied[1], "cpu")):
        with model:
            model.zero_grad()
            values, grads = model.flat_parameters()
            assert values.numel() == 9 + 3 + 3
            x = draw()
            loss(model, x).backward()
            assert_flat(model, values, grads)
            assert_close(gradients(model), twin_gradients(model, x))
            assert tied[0].weight is tied[1].weight


def test_frozen_parameters_are_in_the_values_and_get_no_step(model: Any) -> None:
    """As in plain torch, where an optimizer leaves out what has no gradient."""
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    values, _ = model.flat_parameters()
    assert values.numel() == sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    loss(model, draw()).backward()
    optimizer.step()
    assert torch.equal(frozen.detach(), before)


def test_a_change_of_dtype_needs_flat_parameters_anew(model: Any) -> None:
    x = draw()
    values, _ = model.flat_parameters()
    loss(model, x).backward()
    model.double()
    assert_close(model(x.double()), plain(model, x.double()))
    again, grads_again = model.flat_parameters()
    assert again is not values
    assert again.dtype == grads_again.dtype == torch.float64
    model.zero_grad()
    loss(model, x.double()).backward()
    assert_flat(model, again, grads_again)
    assert values.dtype == torch.float32


def test_a_replaced_parameter_needs_flat_parameters_anew(model: Any) -> None:
    values, _ = model.flat_parameters()
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer.weight = nn.Parameter(torch.ones(4, 3))
    again, grads = model.flat_parameters()
    assert again is not values
    assert_flat(model, again, grads)


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


WAYS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda model: model.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
}
COPY = pytest.mark.parametrize("duplicate", WAYS.values(), ids=WAYS.keys())


@COPY
def test_a_copy_of_a_flat_model_is_equal_independent_and_may_be_flat(
    model: Any, duplicate: Any
) -> None:
    x = draw()
    values, grads = model.flat_parameters()
    loss(model, x).backward()
    kept = grads.clone()
    with duplicate(model) as other:
        assert torch.equal(other(x), model(x))
        values_of_other, grads_of_other = other.flat_parameters()
        assert torch.equal(values_of_other, values)
        other.zero_grad()
        loss(other, x).backward()
        assert_flat(other, values_of_other, grads_of_other)
        values_of_other.zero_()
    assert torch.equal(grads, kept)
    assert values.count_nonzero() > 0
    assert_flat(model, values, grads)


# --- shared parameters ----------------------------------------------------------------------------


def identities(model: nn.Module) -> list[int]:
    return [id(parameter) for parameter in model.parameters()]


def test_shared_parameters_are_the_very_objects_also_after_a_pass(make: Any) -> None:
    with make() as model, make() as other:
        x, y = draw(), draw(7)
        model(x)
        assert model.share(other) is model
        assert identities(model) == identities(other)
        assert_close(model(x), plain(other, x))
        (loss(model, x) + loss(other, y)).backward()
        assert_close(gradients(model), twin_gradients(other, x, y))


def test_only_parameters_of_the_names_given_are_shared(make: Any) -> None:
    model, other = make(), make()
    model.share(other, "weight")
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter is theirs[name]) == name.endswith("weight"), name


def test_ties_are_shared_as_ties() -> None:
    def tied() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        made[1].weight = made[0].weight
        return made

    model, other = DataParallel(tied(), 2), tied()
    model.share(other)
    assert model.module[0].weight is model.module[1].weight is other[0].weight


class Recurrent(nn.Module):
    """A recurrent layer, which keeps a second list of its weights."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", ["share", "shared_group"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_run_with_shared_weights(kind: type[nn.RNNBase], by: str) -> None:
    first, second = Recurrent(kind), Recurrent(kind)
    x, data = torch.randn(5, 2, 3), [DataDesc("x", (5, 2, 3), torch.float32)]
    if by == "share":
        with DataParallel(first, 2) as one, DataParallel(second, 2) as two:
            two(x)
            two.share(one)
            found = two(x)
    else:
        group = DataParallelExecutorGroup
        with (
            group(first, 2, data_shapes=data) as lender,
            group(second, 2, data_shapes=data, shared_group=lender) as two,
        ):
            two.forward(x)
            (found,) = two.get_outputs()
    assert second.layer.weight_hh_l0 is first.layer.weight_hh_l0
    assert_close(found, first(x))
    assert_close(second(x), first(x))


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


# --- drawing parameters anew ----------------------------------------------------------------------


class Counted(nn.Linear):
    """Counts how often it was reset."""

    def __init__(self) -> None:
        self.resets = 0
        super().__init__(3, 3)

    def reset_parameters(self) -> None:
        self.resets += 1
        super().reset_parameters()


def test_every_module_inside_draws_its_parameters_anew_once(make: Any) -> None:
    shared = Counted()
    with make(lambda: nn.Sequential(Counted(), shared, nn.BatchNorm1d(3), shared)) as model:
        x = draw(6)
        model(x)
        counted = [m for m in model.modules() if isinstance(m, Counted)]
        resets = [each.resets for each in counted]
        weights = [each.weight.detach().clone() for each in counted]
        assert model.reset_parameters() is model
        assert [each.resets for each in counted] == [count + 1 for count in resets]
        for each, before in zip(counted, weights, strict=True):
            assert not torch.equal(each.weight, before)
        norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
        assert norm.running_mean.tolist() == [0.0] * 3
        model.eval()
        assert_close(model(x), plain(model, x))


# --- copies and the source ------------------------------------------------------------------------


@COPY
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


def test_a_clone_begins_its_threads_in_the_same_way(model: Any) -> None:
    seen: list[int] = []
    model.threads(lambda: seen.append(1))
    with model.clone() as other:
        other(draw())
    assert len(seen) == 3


def test_sync_parameters_needs_no_threads_and_takes_over_what_left_no_trace() -> None:
    with DataParallel(nn.BatchNorm1d(3).eval(), 3) as model:
        model.sync_parameters()
        assert worker_names() == []
        x = draw()
        model(x)
        model.module.running_mean.data.fill_(7.0)
        model.sync_parameters()
        assert_close(model(x), model.module(x))


def test_sync_parameters_follows_what_needs_new_workers(model: Any) -> None:
    x = draw()
    model(x)
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer.weight = nn.Parameter(torch.ones(4, 3))
    model.sync_parameters()
    assert_close(model(x), plain(model, x))

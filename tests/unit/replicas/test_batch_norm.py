"""Batch norm on replicas equals the unsplit one, and a replica that stays away is no hang."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from phalanx.errors import ConfigError, GroupAborted, PeerTimeout, StateError, UnsupportedError
from phalanx.execution import ThreadPool
from phalanx.replicas.batch_norm import batch_norm_names, synchronise_batch_norm
from phalanx.replicas.rendezvous import ReplicaRendezvous

DEADLINE_S = 30
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64; sums are taken in another order
SINGLE = {"rtol": 1e-5, "atol": 1e-5}

needs_bias = pytest.mark.skipif(
    "bias" not in inspect.signature(nn.BatchNorm1d).parameters,
    reason="this version of torch has no batch norm without a bias",
)


class Executor:
    """Copies of a module on threads, each with its slice, as a container runs them."""

    def __init__(
        self, source: nn.Module, size: int, *, names: list[str] | None = None, sync: bool = True
    ) -> None:
        self.rendezvous = ReplicaRendezvous(DEADLINE_S)
        self.pool = ThreadPool(size, intra_op=1)
        self.modules = [copy.deepcopy(source) for _ in range(size)]
        if sync:
            wanted = batch_norm_names(source) if names is None else names
            synchronise_batch_norm(self.modules, wanted, self.rendezvous)
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def each(self, members: Sequence[int], work: Callable[[int], object]) -> list[object]:
        """Run ``work`` in the members' threads; return what each returned or raised."""

        def task(index: int) -> object:
            if index not in members:
                return None
            try:
                with self.rendezvous.attending(index):
                    return work(index)
            except Exception as error:  # looked at by the test
                return error

        with self.rendezvous.open(members):
            return self.pool.each(task)

    def forward(self, x: Tensor, sizes: Sequence[int], *, input_grad: bool = True) -> Tensor:
        parts = [part.detach().clone() for part in x.split(list(sizes))]
        self.inputs = [part.requires_grad_(input_grad) for part in parts]
        self.sizes = list(sizes)
        self.used = [index for index, rows in enumerate(sizes) if rows]
        outputs = self.each(self.used, lambda i: self.modules[i](self.inputs[i]))
        _raise_first(outputs)
        self.outputs = [value for value in outputs if isinstance(value, Tensor)]
        return torch.cat([output.detach() for output in self.outputs])

    def backward(self, grad: Tensor, *, retain_graph: bool = False) -> list[object]:
        parts = grad.split([rows for rows in self.sizes if rows])

        def work(index: int) -> None:
            place = self.used.index(index)
            torch.autograd.backward(self.outputs[place], parts[place], retain_graph=retain_graph)

        results = self.each(self.used, work)
        _raise_first(results)
        return results

    def input_grad(self) -> Tensor:
        return torch.cat([part.grad for part in self.inputs if part.grad is not None])

    def parameter_grads(self) -> list[Tensor | None]:
        """Return the sums over the replicas, as an executor takes them."""
        sums: list[Tensor | None] = []
        for parameters in zip(*(module.parameters() for module in self.modules), strict=True):
            grads = [p.grad for p in parameters if p.grad is not None]
            sums.append(torch.stack(grads).sum(0) if grads else None)
        return sums


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result


@pytest.fixture
def make() -> Iterator[Callable[..., Executor]]:
    executors: list[Executor] = []

    def make(*args: object, **kwargs: object) -> Executor:
        executors.append(Executor(*args, **kwargs))  # type: ignore[arg-type]
        return executors[-1]

    yield make
    for executor in executors:
        executor.pool.close()


def assert_as_unsplit(
    executor: Executor,
    source: nn.Module,
    x: Tensor,
    sizes: Sequence[int],
    tolerance: dict[str, float],
    *,
    input_grad: bool = True,
) -> None:
    """Compare a step of ``executor`` with one of ``source``, which it changes."""
    whole = x.detach().clone().requires_grad_(input_grad)
    expected = source(whole)
    outputs = executor.forward(x, sizes, input_grad=input_grad)
    torch.testing.assert_close(outputs, expected, **tolerance)
    if expected.requires_grad:
        grad = torch.randn(expected.shape).to(expected.dtype)
        expected.backward(grad)
        executor.backward(grad)
    if input_grad:
        torch.testing.assert_close(executor.input_grad(), whole.grad, **tolerance)
    for own, theirs in zip(executor.parameter_grads(), source.parameters(), strict=True):
        assert (own is None) == (theirs.grad is None)
        if own is not None:
            torch.testing.assert_close(own, theirs.grad, **tolerance)
    assert_statistics_as_unsplit(executor, source, tolerance)


def assert_statistics_as_unsplit(
    executor: Executor, source: nn.Module, tolerance: dict[str, float]
) -> None:
    for index in executor.used:
        own, first = (
            dict(executor.modules[index].named_buffers()),
            executor.modules[executor.used[0]],
        )
        for name, buffer in source.named_buffers():
            torch.testing.assert_close(own[name], buffer, **tolerance)
            assert torch.equal(own[name], dict(first.named_buffers())[name])


SHAPES: list[tuple[type[nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (3,)),
    (nn.BatchNorm1d, (3, 5)),
    (nn.BatchNorm2d, (3, 5, 2)),
    (nn.BatchNorm3d, (3, 2, 1, 3)),
]


def rows(count: int, shape: tuple[int, ...] = (3,)) -> Tensor:
    """Return rows that lie far from zero and drift, so that slices have other statistics."""
    drift = torch.arange(count, dtype=torch.float64).view(-1, *[1] * len(shape))
    return torch.randn(count, *shape, dtype=torch.float64) * 3 + 7 + drift


@pytest.mark.parametrize(("kind", "shape"), SHAPES)
@pytest.mark.parametrize("sizes", [(1, 5, 9), (4, 3), (5, 0, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.5},
        pytest.param({"bias": False}, marks=needs_bias),
    ],
)
def test_everything_equals_the_unsplit_module(
    make: Callable[..., Executor],
    kind: Callable[..., nn.Module],
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    options: dict[str, float],
) -> None:
    source = kind(3, **options).double()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    executor = make(source, len(sizes))
    for _ in range(2):  # the running statistics' second step depends on the first
        executor.modules[1].load_state_dict(
            executor.modules[0].state_dict()
        )  # it may have taken no part
        assert_as_unsplit(executor, source, rows(sum(sizes), shape), sizes, EXACT)


def test_the_plain_batch_norm_of_a_slice_is_another(make: Callable[..., Executor]) -> None:
    """The control: without synchronising, the comparison above fails."""
    source = nn.BatchNorm1d(3).double()
    with pytest.raises(AssertionError, match="not close"):
        assert_as_unsplit(make(source, 3, sync=False), source, rows(15), (2, 4, 9), SINGLE)


class Deep(nn.Module):
    """Convolutions, a batch norm used twice, one in the user's own subclass, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, bias=False)
        self.twice = nn.BatchNorm2d(3)
        self.again = nn.Conv2d(3, 3, 1)
        self.act = Activated(3)
        self.frozen = nn.BatchNorm1d(3).requires_grad_(False)
        self.top = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.twice(self.conv(x)), inplace=True)
        x = self.act(self.twice(self.again(x)))
        return self.top(self.frozen(x.mean((2, 3))))


class Activated(nn.BatchNorm2d):
    """A batch norm with a forward of its own, as some libraries have them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


def test_a_deep_model_with_a_batch_norm_used_twice(make: Callable[..., Executor]) -> None:
    source = Deep().double()
    executor = make(source, 3)
    for _ in range(2):
        x = rows(13, (2, 5, 4))
        assert_as_unsplit(executor, source, x, (1, 5, 7), EXACT, input_grad=False)
    assert source.twice.num_batches_tracked is not None
    assert source.twice.num_batches_tracked.item() == 4


@needs_bias
def test_a_forward_of_its_own_that_calls_the_functional(make: Callable[..., Executor]) -> None:
    class Scaled(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            out = F.batch_norm(x, self.running_mean, self.running_var, training=self.training)
            return out * self.weight

    source = Scaled(3, bias=False).double()
    assert_as_unsplit(make(source, 3), source, rows(15), (1, 5, 9), EXACT)


def test_checkpointed_layers_meet_again_in_the_backward_pass(make: Callable[..., Executor]) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
            self.outer = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(checkpoint(self.inner, x, use_reentrant=False))

    source = Saving().double()
    assert_as_unsplit(make(source, 3), source, rows(15), (1, 5, 9), EXACT)


def test_a_graph_that_is_kept_meets_twice(make: Callable[..., Executor]) -> None:
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    executor, x, grad = make(source, 3), rows(15), torch.randn(15, 3, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    output = source(whole)
    executor.forward(x, (1, 5, 9))
    for keep in (True, False):
        output.backward(grad, retain_graph=keep)
        executor.backward(grad, retain_graph=keep)
    torch.testing.assert_close(executor.input_grad(), whole.grad, **EXACT)


def test_a_first_layer_needs_no_input_gradient(make: Callable[..., Executor]) -> None:
    source = nn.BatchNorm1d(3).double()
    executor = make(source, 3)
    assert_as_unsplit(executor, source, rows(15), (1, 5, 9), EXACT, input_grad=False)
    assert all(part.grad is None for part in executor.inputs)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_one_frozen_affine_parameter(make: Callable[..., Executor], frozen: str) -> None:
    source = nn.BatchNorm1d(3).double()
    getattr(source, frozen).requires_grad_(False)
    assert_as_unsplit(make(source, 3), source, rows(15), (1, 5, 9), EXACT)


def test_expanded_and_strided_gradients(make: Callable[..., Executor]) -> None:
    source = nn.BatchNorm2d(3).double()
    executor, x = make(source, 2), rows(6, (3, 4, 4)).to(memory_format=torch.channels_last)
    whole = x.clone().requires_grad_()
    output = source(whole)
    torch.testing.assert_close(executor.forward(x, (5, 1)), output, **EXACT)
    assert executor.outputs[0].is_contiguous(memory_format=torch.channels_last)
    grad = torch.randn(4, 4, dtype=torch.float64).T.expand(6, 3, 4, 4)
    output.backward(grad)
    executor.backward(grad)
    torch.testing.assert_close(executor.input_grad(), whole.grad, **EXACT)


def test_evaluation_is_plain_and_bitwise(make: Callable[..., Executor]) -> None:
    source = nn.BatchNorm1d(3)
    source(torch.randn(9, 3))
    source.eval()
    executor, x = make(source, 3), torch.randn(15, 3)
    assert torch.equal(executor.forward(x, (1, 5, 9)), source(x))
    assert executor.rendezvous.rounds == 0


def test_evaluation_without_running_statistics_looks_at_the_whole_batch(
    make: Callable[..., Executor],
) -> None:
    source = nn.BatchNorm1d(3, track_running_stats=False).double().eval()
    assert_as_unsplit(make(source, 3), source, rows(15), (1, 5, 9), EXACT)


def test_one_replica_alone_is_plain_and_bitwise(make: Callable[..., Executor]) -> None:
    torch.set_num_threads(1)  # as replicas work: how sums are shared out decides over bits
    source, x = nn.BatchNorm1d(3), torch.randn(7, 3)
    executor = make(source, 2)
    assert torch.equal(executor.forward(x, (0, 7)), source(x))
    assert torch.equal(executor.modules[1].running_var, source.running_var)


def test_one_value_per_channel_is_refused_as_torch_does(make: Callable[..., Executor]) -> None:
    source = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="more than 1 value per channel") as plain:
        source(torch.zeros(1, 3))
    with pytest.raises(ValueError) as ours:
        make(source, 3).forward(torch.zeros(1, 3), (0, 1, 0))
    assert str(ours.value) == str(plain.value)


class Picky(nn.Module):
    """Normalises the rows above zero alone: how many, the slice decides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.norm(x[x[:, 0] > 0])
        return F.pad(kept, (0, 0, 0, len(x) - len(kept)))


@pytest.mark.parametrize("above", [5, 0])
def test_replicas_that_keep_no_row_take_part(make: Callable[..., Executor], above: int) -> None:
    source = Picky().double()
    x = -rows(9)
    x[:above] *= -1
    executor = make(source, 3)
    executor.forward(x, (6, 2, 1))  # the last two keep none
    whole = x.clone().requires_grad_()
    expected = source(whole)
    torch.testing.assert_close(executor.outputs[0][:above], expected[:above], **EXACT)
    assert_statistics_as_unsplit(executor, source, EXACT)
    grad = torch.zeros(9, 3, dtype=torch.float64)
    grad[:above] = torch.randn(above, 3, dtype=torch.float64)
    expected.backward(grad)
    executor.backward(grad)
    torch.testing.assert_close(executor.input_grad(), whole.grad, **EXACT)


def test_one_value_among_replicas_that_keep_none_is_refused(make: Callable[..., Executor]) -> None:
    x = -rows(6)
    x[0] *= -1
    with pytest.raises(ValueError, match=r"more than 1 value .* size torch.Size\(\[1, 3\]\)"):
        make(Picky().double(), 3).forward(x, (2, 2, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("half_module", [False, True])
def test_half_inputs_are_accumulated_in_float(
    make: Callable[..., Executor], dtype: torch.dtype, half_module: bool
) -> None:
    source = nn.BatchNorm2d(3)
    source = source.to(dtype) if half_module else source
    step = torch.finfo(dtype).eps
    x = (rows(15, (3, 2, 2)) / 4).to(dtype)
    tolerance = {"rtol": 4 * step, "atol": 16 * step}
    assert_as_unsplit(make(source, 3), source, x, (1, 5, 9), tolerance)


def test_autocast_gives_the_dtypes_that_torch_gives(make: Callable[..., Executor]) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(15, 3)
    executor = make(source, 3)
    executor.inputs = list(x.split([1, 5, 9]))

    def work(index: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return executor.modules[index](executor.inputs[index])

    outputs = [part for part in executor.each([0, 1, 2], work) if isinstance(part, Tensor)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = source(x)
    assert outputs[0].dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=2e-2, atol=2e-2)


def test_inference_mode_updates_the_running_statistics(make: Callable[..., Executor]) -> None:
    source, x = nn.BatchNorm1d(3).double(), rows(15)
    executor, parts = make(source, 3), x.split([1, 5, 9])

    def work(index: int) -> Tensor:
        with torch.inference_mode():
            return executor.modules[index](parts[index])

    outputs = [part for part in executor.each([0, 1, 2], work) if isinstance(part, Tensor)]
    torch.testing.assert_close(torch.cat(outputs), source(x), **EXACT)
    torch.testing.assert_close(executor.modules[2].running_var, source.running_var, **EXACT)


def test_a_large_mean_does_not_eat_the_variance(make: Callable[..., Executor]) -> None:
    source = nn.BatchNorm1d(3)
    x = torch.randn(48, 3) + 1000.0
    executor = make(source, 3)
    executor.forward(x, (1, 30, 17))
    var = x.double().var(dim=0) * 0.1 + 0.9
    torch.testing.assert_close(executor.modules[0].running_var, var.float(), rtol=1e-4, atol=0)


def test_runs_are_repeatable_to_the_bit(make: Callable[..., Executor]) -> None:
    source, x, grad = nn.BatchNorm1d(64), torch.randn(50, 64), torch.randn(50, 64)
    seen = set()
    for _ in range(5):
        executor = make(source, 3)
        outputs = executor.forward(x, (11, 19, 20))
        executor.backward(grad)
        seen.add((outputs.numpy().tobytes(), executor.input_grad().numpy().tobytes()))
    assert len(seen) == 1


def test_only_the_named_ones_are_synchronised(make: Callable[..., Executor]) -> None:
    source = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double()
    x = rows(15)
    executor = make(source, 3, names=["0"])
    executor.forward(torch.cat([x, x]), (15, 2, 13))
    source(torch.cat([x, x]))
    first, second = executor.modules[0], source
    torch.testing.assert_close(first.get_buffer("0.running_var"), second[0].running_var, **EXACT)
    assert not torch.allclose(first.get_buffer("1.running_var"), second[1].running_var)
    assert executor.rendezvous.rounds == 1


def test_names_leave_torchs_own_alone() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3), Deep())
    assert batch_norm_names(module) == ["0", "3.twice", "3.act", "3.frozen"]
    assert batch_norm_names(nn.BatchNorm1d(3)) == [""]


def test_hooks_run_and_the_source_stays_as_it_is(make: Callable[..., Executor]) -> None:
    source = nn.Sequential(nn.BatchNorm1d(3))
    seen: list[int] = []
    source[0].register_forward_hook(lambda *_: seen.append(1))
    executor = make(source, 3)
    assert type(source[0]) is nn.BatchNorm1d
    norms = [module.get_submodule("0") for module in executor.modules]
    assert isinstance(norms[0], nn.BatchNorm1d)
    assert type(norms[0]) is type(norms[2])  # one class for all of a kind
    assert repr(executor.modules[0]) == repr(source)
    executor.forward(torch.randn(6, 3), (1, 2, 3))
    assert len(seen) == 3
    clone = copy.deepcopy(source)
    clone(torch.randn(6, 3))  # meets nobody
    assert executor.rendezvous.rounds == 1


def test_what_cannot_be_synchronised_is_refused_and_nothing_is_changed() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    module[1].forward = lambda x: x
    with pytest.raises(UnsupportedError, match="`1` must have its class's own `forward`"):
        synchronise_batch_norm([module], ["0", "1"], ReplicaRendezvous())
    assert type(module[0]) is nn.BatchNorm1d
    lazy = nn.Sequential(nn.LazyBatchNorm1d(affine=False, track_running_stats=False))
    with pytest.raises(ConfigError, match="`0` must know its channels"):
        synchronise_batch_norm([lazy], ["0"], ReplicaRendezvous())


def test_outside_a_run_it_does_not_silently_see_its_slice_alone(
    make: Callable[..., Executor],
) -> None:
    executor = make(nn.BatchNorm1d(3), 3)
    with pytest.raises(StateError, match="needs an open rendezvous"):
        executor.modules[0](torch.randn(4, 3))


class Fails(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


def test_a_replica_that_raises_in_forward_is_no_hang(make: Callable[..., Executor]) -> None:
    def refuse(_: nn.Module, args: tuple[Tensor]) -> None:
        if len(args[0]) == 5:
            raise ZeroDivisionError("five")

    source = nn.Sequential(nn.BatchNorm1d(3), nn.Identity(), nn.BatchNorm1d(3))
    source[1].register_forward_pre_hook(refuse)
    executor, parts = make(source, 3), torch.randn(15, 3).split([1, 5, 9])
    first, cause, last = executor.each([0, 1, 2], lambda i: executor.modules[i](parts[i]))
    assert isinstance(cause, ZeroDivisionError)
    for echo in (first, last):
        assert isinstance(echo, GroupAborted)
        assert "replica 1 at batch norm `2`, but cannot: ZeroDivisionError: five" in str(echo)
    executor.forward(torch.randn(15, 3), (4, 3, 8))  # the next run is a new one


def test_a_replica_that_raises_in_backward_is_no_hang(make: Callable[..., Executor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return Fails.apply(y) if len(x) == 5 else y

    executor = make(Net(), 3)
    executor.forward(torch.randn(15, 3), (1, 5, 9))
    results = executor.each([0, 1, 2], lambda i: executor.outputs[i].sum().backward())
    assert [type(result) for result in results] == [GroupAborted, ZeroDivisionError, GroupAborted]
    assert "the backward pass of batch norm `norm`" in str(results[0])


class Skips(nn.Module):
    """Takes one of two batch norms, or none, as its rows say."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.BatchNorm1d(3)
        self.right = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 5:
            return x
        return self.left(x) if len(x) == 4 else self.right(x)


def test_a_replica_that_skips_a_batch_norm_is_no_hang(make: Callable[..., Executor]) -> None:
    executor, parts = make(Skips(), 3), torch.randn(13, 3).split([4, 5, 4])
    first, second, last = executor.each([0, 1, 2], lambda i: executor.modules[i](parts[i]))
    assert isinstance(second, Tensor)
    for error in (first, last):
        assert isinstance(error, UnsupportedError)
        assert "Replica 1 must come to batch norm `left`" in str(error)


def test_replicas_in_different_batch_norms_do_not_mix(make: Callable[..., Executor]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"replica 0 came to batch norm `left` and replica 1 to .* `right`"
    ):
        make(Skips(), 2).forward(torch.randn(7, 3), (4, 3))


def test_a_backward_pass_that_misses_a_replica_is_no_hang(make: Callable[..., Executor]) -> None:
    executor = make(nn.BatchNorm1d(3), 3)
    executor.forward(torch.randn(15, 3), (1, 5, 9))
    results = executor.each(
        [0, 1, 2], lambda i: None if i == 1 else executor.outputs[i].sum().backward()
    )
    assert [type(result) for result in results] == [UnsupportedError, type(None), UnsupportedError]
    assert "ended its pass without it" in str(results[0])


def test_a_backward_pass_of_fewer_replicas_is_refused(make: Callable[..., Executor]) -> None:
    executor = make(nn.BatchNorm1d(3), 3)
    executor.forward(torch.randn(15, 3), (1, 5, 9))
    (error, *_) = executor.each([0, 2], lambda i: executor.outputs[i].sum().backward())
    assert isinstance(error, StateError)
    assert r"ran it forward (0, 1, 2), but these are (0, 2)" in str(error)


def test_backward_passes_of_different_calls_do_not_mix(make: Callable[..., Executor]) -> None:
    executor = make(nn.BatchNorm1d(3), 3)
    outputs = []
    for _ in range(2):
        executor.forward(torch.randn(15, 3), (1, 5, 9))
        outputs.append(executor.outputs)
    results = executor.each([0, 1, 2], lambda i: outputs[i % 2][i].sum().backward())
    for error in results:
        assert isinstance(error, UnsupportedError)
        assert "(exchange 1) and replica 1 to" in str(error)


def test_a_replica_that_does_not_come_in_time_is_named(make: Callable[..., Executor]) -> None:
    executor = make(nn.BatchNorm1d(3), 3)
    executor.rendezvous.timeout_s = 0.02
    over = threading.Event()

    def work(index: int) -> object:
        if index == 1:
            over.wait(DEADLINE_S)
        try:
            return executor.modules[index](torch.randn(5, 3))
        finally:
            over.set()

    results = executor.each([0, 1, 2], work)
    timeouts = [result for result in results if isinstance(result, PeerTimeout)]
    assert timeouts
    assert all(error.rank == 1 for error in timeouts)
    assert isinstance(results[1], GroupAborted)


@pytest.mark.gpu
def test_replicas_on_streams_of_one_gpu_and_on_the_cpu(
    make: Callable[..., Executor], gpu: torch.device
) -> None:
    """Backward of one GPU's replicas runs on one thread of torch's, unless told otherwise."""
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    executor, x, grad = make(source, 3), rows(15), torch.randn(15, 3, dtype=torch.float64)
    devices = [gpu, gpu, "cpu"]
    parts, grads = x.split([1, 5, 9]), grad.split([1, 5, 9])
    for module, device in zip(executor.modules, devices, strict=True):
        module.to(device)
    torch.accelerator.synchronize()

    def work(index: int) -> Tensor:
        with (
            torch.Stream(gpu),
            torch.autograd.set_multithreading_enabled(False),
        ):
            own = parts[index].to(devices[index]).requires_grad_()
            return executor.modules[index](own)

    outputs = executor.each([0, 1, 2], work)
    _raise_first(outputs)
    executor.outputs = [output for output in outputs if isinstance(output, Tensor)]

    def back(index: int) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            executor.outputs[index].backward(grads[index].to(devices[index]))

    _raise_first(executor.each([0, 1, 2], back))
    torch.accelerator.synchronize()
    expected = source(x)
    expected.backward(grad)
    together = torch.cat([output.detach().cpu() for output in executor.outputs])
    torch.testing.assert_close(together, expected, **EXACT)
    own = [module.get_parameter("0.weight").grad for module in executor.modules]
    total = sum(value.cpu() for value in own if value is not None)
    torch.testing.assert_close(total, source[0].weight.grad, **EXACT)

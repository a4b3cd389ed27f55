"""Every way to draw inside a model gives the microbatch's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_overridable_functions
from torch.utils.checkpoint import checkpoint

from phalanx.errors import UnsupportedError
from phalanx.replicas import (
    MicrobatchRng,
    RngMode,
    RngPlan,
    RngUse,
    derive_seed,
    preserve_rng,
    run_backward,
)
from phalanx.replicas.rng import is_drawing_operator, may_draw

X = torch.linspace(-1, 1, 60).view(6, 10)
WAYS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "feature dropout": lambda: F.dropout1d(X.unsqueeze(-1), 0.5),
    "rrelu": lambda: F.rrelu(X, training=True),
    "rand": lambda: torch.rand(6, 10),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(6, 10),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(9, (60,)),
    "randint from": lambda: torch.randint(3, 9, (60,)),
    "randint_like": lambda: torch.randint_like(X, 9),
    "randint_like from": lambda: torch.randint_like(X, 3, 9),
    "randperm": lambda: torch.randperm(60),
    "bernoulli": lambda: torch.bernoulli(X.abs()),
    "multinomial": lambda: torch.multinomial(X.abs() + 0.1, 4),
    "normal": lambda: torch.normal(X, X.abs()),
    "normal_": lambda: torch.empty(60).normal_(),
    "uniform_": lambda: torch.empty(60).uniform_(),
    "exponential_": lambda: torch.empty(60).exponential_(),
    "gumbel softmax": lambda: F.gumbel_softmax(X),
    "attention": lambda: F.scaled_dot_product_attention(
        X.view(1, 2, 3, 10), X.view(1, 2, 3, 10), X.view(1, 2, 3, 10), dropout_p=0.5
    ),
    "distribution": lambda: torch.distributions.Normal(X, X.abs() + 1).rsample(),
}


def test_attention_is_refused_where_others_use_the_default_generator() -> None:
    values = torch.ones(1, 2, 3, 10)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with RngMode(7, frozenset({values.device})) as draws:
        attend(values, values, values, 0.0)
        with pytest.raises(UnsupportedError, match=r"sdpa_kernel\(SDPBackend\.MATH\)"):
            attend(values, values, values, 0.5)
    assert draws.used


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_belong_to_the_seed(way: str) -> None:
    before = torch.get_rng_state()
    with RngMode(7) as draws:
        first = WAYS[way]()
    assert draws.used
    torch.rand(3)  # the process's own generator must not matter
    with RngMode(7):
        again = WAYS[way]()
    with RngMode(8):
        other = WAYS[way]()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.set_rng_state(before)
    with RngMode(7):
        WAYS[way]()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "plan",
    [RngPlan(), RngPlan(throughout=True), RngPlan(watched=True), RngPlan(own=True)],
    ids=["calls", "operators", "watched", "own"],
)
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_are_the_same_however_draws_are_found(way: str, plan: RngPlan) -> None:
    with RngMode(7):
        expected = WAYS[way]()
    before, use = torch.get_rng_state(), RngUse()
    with MicrobatchRng(7, plan, use):
        found = WAYS[way]()
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert use.drew or plan.own
    assert not use.hidden  # a call from Python shows each of them


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_draw_that_no_call_from_python_shows_is_told() -> None:
    scripted = torch.jit.script(dropout)
    use = RngUse()
    with MicrobatchRng(7, RngPlan(watched=True), use):
        found = scripted(X)
    assert use.hidden
    with RngMode(7):
        assert torch.equal(found, scripted(X))


def dropout(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_preserved_part_may_be_within_a_region_only(reentrant: bool) -> None:
    """A part that is preserved does not excuse one inside of it that is not."""
    x = X.clone().requires_grad_()

    def inner(v: Tensor) -> Tensor:
        return F.dropout(v, 0.5)

    def outer(v: Tensor) -> Any:
        return checkpoint(inner, v, use_reentrant=reentrant)

    with (
        pytest.raises(UnsupportedError, match="checkpoint"),
        MicrobatchRng(0, RngPlan(), RngUse()),
    ):
        checkpoint(outer, x, use_reentrant=False, context_fn=preserve_rng)


@pytest.mark.parametrize("own", [False, True])
def test_nested_preserved_parts_repeat_their_numbers(own: bool) -> None:
    def gradient(inside: bool) -> Tensor:
        x = X.clone().requires_grad_()

        def part(f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
            if not inside:
                return f(v)
            return checkpoint(  # type: ignore[no-any-return]
                f, v, use_reentrant=False, preserve_rng_state=False, context_fn=preserve_rng
            )

        def middle(v: Tensor) -> Tensor:
            return part(lambda u: torch.sin(F.dropout(u, 0.5)), v) * torch.rand(v.shape)

        with MicrobatchRng(0, RngPlan(own=own), RngUse()):
            value = part(middle, x).square().sum()
            run_backward([value], [torch.ones(())])
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


def test_dropout_keeps_its_law() -> None:
    with RngMode(0):
        out = F.dropout(torch.ones(100_000), 0.3)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert abs((out == 0).double().mean().item() - 0.3) < 0.01  # 7 standard deviations


def names_in(code: CodeType) -> set[str]:
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*inner)


def runs(func: Any) -> set[FunctionType]:
    """Return the functions of torch's own that ``func`` may call, and itself."""
    found, waiting = set(), [func]
    while waiting:
        each = waiting.pop()
        if isinstance(each, FunctionType) and each.__module__ in PLAIN and each not in found:
            found.add(each)
            waiting += map(each.__globals__.get, names_in(each.__code__))
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
    return found


PLAIN = {"torch.nn.functional", "torch.functional", "torch._tensor"}
WRITTEN_IN_PYTHON = [
    func
    for functions in get_overridable_functions().values()
    for func in functions
    if isinstance(func, FunctionType) and func.__module__ in PLAIN
]


def test_every_function_of_torchs_that_names_a_drawing_operator_is_known() -> None:
    """A newer torch may have other functions, written in Python, that draw."""
    assert len(WRITTEN_IN_PYTHON) > 100
    for func in WRITTEN_IN_PYTHON:
        names = set().union(*(names_in(each.__code__) for each in runs(func)))
        assert may_draw(func) or not any(map(is_drawing_operator, names)), func


def test_what_does_not_draw_is_not_noted() -> None:
    with RngMode(0) as draws:
        F.scaled_dot_product_attention(
            X.view(1, 2, 3, 10), X.view(1, 2, 3, 10), X.view(1, 2, 3, 10)
        )
        F.dropout(X, 0.5, training=False)
    assert not draws.used


def test_calls_that_are_told_not_to_draw_are_not_looked_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model in evaluation has many of them, and looking takes longer than they do."""
    entered: list[RngMode] = []
    enter = RngMode.__enter__

    def note(self: RngMode) -> RngMode:
        entered.append(self)
        return enter(self)  # type: ignore[no-any-return]

    monkeypatch.setattr(RngMode, "__enter__", note)
    heads, rows = X.view(1, 2, 3, 10), X.view(1, 6, 10)
    quiet, drawing = (nn.MultiheadAttention(10, 2, dropout=p) for p in (0.0, 0.5))
    with MicrobatchRng(7, RngPlan(), RngUse()):
        F.dropout(X, 0.5, training=False)
        F.dropout(X, 0.5, False)
        F.dropout1d(X, 0.5, False)
        F.alpha_dropout(X, 0.5)
        F.scaled_dot_product_attention(heads, heads, heads, None, 0.0, True)
        F.dropout(X, 0.0)
        F.dropout(X, p=0)
        quiet(rows, rows, rows)
        assert entered == []
        F.dropout(X)
        F.scaled_dot_product_attention(heads, heads, heads, None, 0.5)
        drawing(rows, rows, rows)
    assert len(entered) == 3


def test_a_generator_of_the_models_own_is_left_alone() -> None:
    own = torch.Generator().manual_seed(3)
    with RngMode(0) as draws:
        drawn = torch.rand(5, generator=own)
    assert not draws.used
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_drawing_under_activation_checkpointing_is_refused(reentrant: bool) -> None:
    x = X.clone().requires_grad_()
    with RngMode(0), pytest.raises(UnsupportedError, match="checkpoint"):
        checkpoint(lambda v: F.dropout(v, 0.5), x, use_reentrant=reentrant)


def test_seeds_differ_for_every_step_and_microbatch() -> None:
    seeds = {derive_seed(s, t, m) for s in range(5) for t in range(20) for m in range(20)}
    assert len(seeds) == 5 * 20 * 20
    assert derive_seed(1, 11) != derive_seed(11, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)

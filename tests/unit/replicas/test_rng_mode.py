"""Which functions and operators of torch's draw, and where numbers cannot be given to them."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils import _pytree as pytree

from phalanx.errors import UnsupportedError
from phalanx.replicas import derive_seed
from phalanx.replicas.rng import RECURRENT, is_drawing_operator, may_call_draw, run_layer_by_layer
from phalanx.replicas.rng_mode import RngMode


def test_attention_that_takes_no_generator_is_refused_on_the_cpu() -> None:
    values = torch.ones(1, 2, 3, 10)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with RngMode(7):
        attend(values, values, values, 0.0)
        with pytest.raises(UnsupportedError, match=r"sdpa_kernel\(SDPBackend\.MATH\)"):
            attend(values, values, values, 0.5)


class LayerByLayer(TorchFunctionMode):
    """Run recurrent functions as replicas on accelerators do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in RECURRENT:
            return run_layer_by_layer(func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packs", [False, True])
def test_a_recurrent_layer_is_computed_layer_by_layer(
    kind: type[nn.RNNBase], both: bool, packs: bool
) -> None:
    torch.manual_seed(0)
    layers = kind(7, 5, num_layers=3, dropout=0.5, bidirectional=both)
    x: Any = torch.randn(4, 3, 7)
    if packs:
        x = nn.utils.rnn.pack_padded_sequence(x, [4, 3, 1])
    with RngMode(7):
        whole = pytree.tree_leaves(layers(x))
    with RngMode(7), LayerByLayer():
        found = pytree.tree_leaves(layers(x))
    assert len(found) == len(whole)
    tensors = [(one, other) for one, other in zip(found, whole, strict=True) if one is not None]
    assert all(torch.equal(one, other) for one, other in tensors)


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
        assert may_call_draw(func) or not any(map(is_drawing_operator, names)), func


def test_seeds_differ_for_every_step_and_microbatch() -> None:
    seeds = {derive_seed(s, t, m) for s in range(5) for t in range(20) for m in range(20)}
    assert len(seeds) == 5 * 20 * 20
    assert derive_seed(1, 11) != derive_seed(11, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)

"""What is private to torch does what we use it for."""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.optim.optimizer import register_optimizer_step_pre_hook

from phalanx import torch_internals as internals


def test_this_version_of_torch_was_tried() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in internals.TRIED_ON


def test_lists_are_added_and_copied_in_one_call() -> None:
    own = [torch.ones(2), torch.ones(3)]
    internals.foreach_add(own, [torch.ones(2), torch.full((3,), 2.0)])
    assert [each.tolist() for each in own] == [[2.0, 2.0], [3.0, 3.0, 3.0]]
    internals.foreach_copy(own, [torch.zeros(2), torch.zeros(3)])
    assert [each.tolist() for each in own] == [[0.0, 0.0], [0.0, 0.0, 0.0]]


def test_the_engine_accumulates_as_backward_does() -> None:
    weight = torch.ones(2, requires_grad=True)
    internals.run_backward([(weight * 3).sum()], [torch.tensor(1.0)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_a_backward_pass_tells_of_itself() -> None:
    weight = torch.ones(2, requires_grad=True)
    told: list[object] = []

    def look(_: Tensor) -> None:
        assert internals.backward_id() >= 0
        told.extend((internals.in_backward(), internals.keeps_graph()))
        internals.call_after_backward(lambda: told.append("after"))

    assert not internals.in_backward()
    middle = weight * 2
    middle.register_hook(look)
    middle.sum().backward(retain_graph=True)
    assert told == [True, True, "after"]


def test_forward_mode_is_told() -> None:
    assert not internals.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert internals.in_forward_mode()


def test_the_profiler_is_told() -> None:
    assert not internals.is_profiled()
    with torch.profiler.profile():
        assert internals.is_profiled()


def test_a_subclass_lies_in_the_memory_of_the_tensor() -> None:
    tensor = torch.ones(3)
    parameter = internals.make_subclass(nn.Parameter, tensor, True)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert parameter.data_ptr() == tensor.data_ptr()


def test_transforms_are_told() -> None:
    told: list[bool] = []

    def function(x: Tensor) -> Tensor:
        told.append(internals.in_func_transform())
        return x * 2

    function(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2))
    assert told == [False, True]


def test_operators_made_of_others_are_told() -> None:
    assert internals.is_made_of_others("aten::dropout")
    assert not internals.is_made_of_others("aten::add.Tensor")


def test_switches_are_read_and_set() -> None:
    for read, write in internals.NUMERIC_SWITCHES:
        before = read()
        write(not before)
        assert read() is not before
        write(before)


def test_hooks_around_all_optimizers_are_told() -> None:
    assert not any(internals.GLOBAL_STEP_HOOKS)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert any(internals.GLOBAL_STEP_HOOKS)
    handle.remove()


def test_the_compiler_marks_what_it_compiles() -> None:
    compiled = torch.compile(copy.copy)
    assert hasattr(compiled, internals.COMPILED_FROM)
    assert internals.COMPILER in sys.modules


def test_dispatch_modes_see_operators() -> None:
    seen: list[str] = []

    class Sees(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Sees():
        nn.functional.relu(torch.ones(2))
    assert "aten::relu" in seen


def test_structures_come_apart_and_together() -> None:
    leaves, spec = internals.pytree.tree_flatten({"a": [1, (2,)]})
    again = internals.pytree.treespec_loads(internals.pytree.treespec_dumps(spec))
    assert internals.pytree.tree_unflatten(leaves, again) == {"a": [1, (2,)]}


def test_distributed_has_what_we_replace() -> None:
    assert "env" in internals.rendezvous_handlers
    assert hasattr(internals.gloo_options(ProcessGroupGloo), "_devices")

"""The user's optimizer, stepped in shards of whole parameters.

    parameters   w0 | w1 b1 | w2 b0 b2     the largest first, to the shard with the least so far
    shard        0    1       2            a shallow copy of the optimizer that has these only

A copy has the class of the user's optimizer, the options of now, and its `state` itself. So all
shards together are bitwise one step of that optimizer, and its `state_dict()` is torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from phalanx.execution.run import Gradients, PartialSum, add_gradients
from phalanx.memory import refuse_overlap

# Private: torch has no public way to ask whether hooks for all optimizers are registered.
from phalanx.torch_internals import GLOBAL_STEP_HOOKS, foreach_mul

_FUSED_ON_CPU = (SGD, Adam, AdamW, Adagrad)


class Shards:
    """An optimizer in shards, and the last addition to the gradients of each.

    A step calls :meth:`begin`, then for every shard, in that shard's thread, :meth:`add` and
    :meth:`step`, then :meth:`finish`. An optimizer that cannot be cut (see :func:`can_be_cut`) is
    stepped with the first shard.

    Args:
        optimizer: The user's.
        parameters: All parameters of the executor, in whose order it sums gradients.
        num_shards: Number of threads.

    Determinism: bitwise the same for any number of shards.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], num_shards: int
    ) -> None:
        self.optimizer = optimizer
        self._parameters = parameters
        place_of = {id(parameter): place for place, parameter in enumerate(parameters)}
        groups = [
            [p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups
        ]
        self._fusible = [_is_fusible(optimizer, group) for group in groups]
        self._group_of = {  # by place; parameters that are not trained have none
            place_of[id(parameter)]: number
            for number, group in enumerate(groups)
            for parameter in group
        }
        refuse_overlap([each for group in groups for each in group])
        places = sorted(self._group_of)
        shares = share_by_size([parameters[place] for place in places], num_shards)
        self._shares = [[places[index] for index in share] for share in shares]
        self._members: list[list[list[nn.Parameter]]] = []  # by shard and group
        for share in self._shares:
            self._members.append([[] for _ in groups])
            for place in share:
                self._members[-1][self._group_of[place]].append(parameters[place])
        # Of this step: an optimizer, and the places of its parameters.
        self._shards: list[tuple[Optimizer, list[int]]] = []
        self._left: Gradients = []
        self._right: Gradients = []

    def begin(self, operands: Sequence[PartialSum]) -> None:
        """Begin a step: with the last sums of a run, and the optimizer's options of now."""
        self._num_states = len(self.optimizer.state)
        self._is_cut = can_be_cut(self.optimizer)
        if self._is_cut:
            copies = map(self._copy_for, self._members)
            self._shards = list(zip(copies, self._shares, strict=True))
        else:  # the first shard is the whole
            self._shards = [(self.optimizer, []) for _ in self._shares]
            self._shards[0] = self.optimizer, list(self._group_of)
        nothing: Gradients = [None] * len(self._parameters)
        self._left, *right = [each.gradients for each in operands] or [nothing]
        self._right = right[0] if right else []

    def _copy_for(self, members: Sequence[list[nn.Parameter]]) -> Optimizer:
        """Return a shallow copy of the optimizer that has these parameters only, by group.

        Its groups are fused, unless the user has chosen another way or an option that forbids it.
        """
        copy: Optimizer = object.__new__(type(self.optimizer))
        copy.__dict__.update(vars(self.optimizer))
        copy.__dict__.pop("step", None)  # a scheduler's wrapper, which steps the user's
        copy.param_groups = []
        for group, params, fusible in zip(
            self.optimizer.param_groups, members, self._fusible, strict=True
        ):
            is_chosen = group.get("fused") is not None or group.get("foreach") is not None
            has_tensors = any(isinstance(option, Tensor) for option in group.values())
            forbids = has_tensors or group.get("differentiable")
            fused = {"fused": True} if fusible and not is_chosen and not forbids else {}
            divided = [params] if params else []
            if fused and type(self.optimizer) is SGD and group["momentum"]:
                divided = self._by_first_step(params)
            copy.param_groups += [{**group, "params": each, **fused} for each in divided]
        return copy

    def _by_first_step(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return those without momentum apart: torch's fused SGD wants it for all or for none."""
        found: dict[bool, list[nn.Parameter]] = {}
        for parameter in params:
            entry = self.optimizer.state.get(parameter, {})
            found.setdefault(entry.get("momentum_buffer") is None, []).append(parameter)
        return list(found.values())

    def add(self, shard: int) -> None:
        """Make the last addition for one shard, if there is one; a second time it does nothing."""
        if not self._right:
            return
        _, places = self._shards[shard]
        right = [self._right[place] for place in places]
        totals = add_gradients([self._left[place] for place in places], right)
        for place, total in zip(places, totals, strict=True):
            self._left[place], self._right[place] = total, None

    def squared_norms(self, shard: int) -> list[float]:
        """Return the square of the 2-norm of each gradient of a shard that was added."""
        gradients = [self._left[place] for place in self._shards[shard][1]]
        norms = [_norm_of(each) for each in gradients if each is not None]
        if not norms:
            return []
        found = torch.stack([each.to(norms[0].device) for each in norms])  # to wait once
        return [norm**2 for norm in found.tolist()]

    def step(self, shard: int, scale: float) -> None:
        """Step one shard that was added, with gradients times ``scale``; then drop those."""
        optimizer, places = self._shards[shard]
        gradients = [self._left[place] for place in places] if scale != 1.0 else []
        if present := [each for each in gradients if each is not None]:
            foreach_mul(present, scale)
        for place in places:
            self._parameters[place].grad = self._left[place]
        if places:
            optimizer.step()
        for place in places:
            self._parameters[place].grad = None

    def finish(self) -> None:
        """End the step once all shards are stepped: drop the sums, put the state in order."""
        self._left, self._right, self._shards = [], [], []
        if self._is_cut:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
            if len(self.optimizer.state) > self._num_states:
                self._sort_state()

    def _sort_state(self) -> None:
        """Put the state, to which threads have added entries, into the parameters' order."""
        state = self.optimizer.state
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        state.update([(p, state.pop(p)) for p in ordered if p in state])


def can_be_cut(optimizer: Optimizer) -> bool:
    """Tell whether ``optimizer`` may be stepped in shards: its `step` is torch's, without hooks.

    Whatever else was done to it is meant for the whole of it.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if any(GLOBAL_STEP_HOOKS):
        return False
    step = vars(optimizer).get("step", type(optimizer).step)
    function = getattr(step, "__func__", step)
    while function is not None:  # torch wraps it: for hooks, and in learning-rate schedulers
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.optim"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def share_by_size(parameters: Sequence[Tensor], num_shares: int) -> list[list[int]]:
    """Return the places of ``parameters`` in shares of nearly equal numbers of elements.

    Example:
        >>> share_by_size([torch.zeros(size) for size in (3, 9, 4, 1)], 2)
        [[1], [0, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    sizes = [0] * num_shares
    for index in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        least = sizes.index(min(sizes))
        shares[least].append(index)
        sizes[least] += parameters[index].numel()
    return [sorted(share) for share in shares]


def _is_fusible(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    """Tell whether a group can be stepped in one pass over memory instead of several.

    Of a whole group, so that shards do as one does.
    """
    if type(optimizer) not in _FUSED_ON_CPU:
        return False
    states = [(p, each) for p in parameters for each in optimizer.state.get(p, {}).values()]
    alike = [(p, x) for p, x in states if isinstance(x, Tensor) and x.shape == p.shape]
    if any(p.stride() != each.stride() for p, each in alike):
        return False  # the kernels take the elements as they lie
    # SGD: torch 2.13's kernel computes short floats wrongly.
    least = 4 if type(optimizer) is SGD else 1
    return all(
        p.device.type == "cpu" and p.is_floating_point() and p.itemsize >= least for p in parameters
    )


def _norm_of(gradient: Tensor) -> Tensor:
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    norm: Tensor = torch.linalg.vector_norm(real, dtype=torch.float64)
    return norm

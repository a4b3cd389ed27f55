"""Which optimizers may be stepped in parts: torch's elementwise ones, as long as they are torch's.

Whatever was done to an optimizer (a `step` of the user's, hooks, state that is not alike for all
parameters) is meant for the whole of it, so the whole is stepped then, as plain torch does.
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from phalanx.memory import FlatParameters

# Private: torch has no public way to ask whether hooks for all optimizers are registered.
from phalanx.torch_internals import has_global_step_hooks

__all__ = [
    "ELEMENTWISE",
    "MOMENTS",
    "STEP",
    "is_elementwise",
    "state_is_uniform",
    "steps_as_torch_does",
]

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad)
STEP = "step"  # the one state entry of these optimizers that has not the parameter's shape
# The others; what else is found there is the user's.
MOMENTS = frozenset(
    ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum"]
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Tell whether any part of the parameters may be stepped by an optimizer of its own."""
    if type(optimizer) not in ELEMENTWISE or not steps_as_torch_does(optimizer):
        return False
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("differentiable"):
            return False
        for value in group.values():
            if isinstance(value, Tensor):
                return False
    return True


def steps_as_torch_does(optimizer: Optimizer) -> bool:
    """Tell whether `step` is torch's own, and no hooks are to be called around it."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if has_global_step_hooks():
        return False
    step = vars(optimizer).get("step", type(optimizer).step)
    function = getattr(step, "__func__", step)
    while function is not None:  # torch wraps it: for hooks, and in learning-rate schedulers
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.optim"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def state_is_uniform(optimizer: Optimizer, flat: FlatParameters) -> bool:
    """Tell whether all parameters of a segment have the same kind of history, and no other."""
    for segment in flat.segments:
        states = [optimizer.state.get(flat.parameters[index], {}) for index in segment.members]
        kinds = [{key for key, value in state.items() if value is not None} for state in states]
        if any(kind != kinds[0] for kind in kinds):
            return False
        for key, value in (item for state in states for item in state.items()):
            if key == STEP:
                if not isinstance(value, Tensor):
                    return False
            elif value is not None:
                is_moment = key in MOMENTS and isinstance(value, Tensor)
                if not is_moment or value.dtype != segment.values.dtype:
                    return False
        if len({float(state[STEP]) for state in states if STEP in state}) > 1:
            return False
    return True

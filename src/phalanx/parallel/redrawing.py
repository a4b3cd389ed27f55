"""Drawing a model's parameters anew, by what each of its modules says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from phalanx.errors import ConfigError

__all__ = ["redraw_of", "refuse_unreached"]

# torch's MultiheadAttention and Transformer have the second name only.
_NAMES = ("reset_parameters", "_reset_parameters")


def redraw_of(module: nn.Module) -> Callable[[], object] | None:
    """Return what draws the parameters of ``module`` anew; None where it has nothing of the kind.

    Example:
        >>> redraw_of(nn.ReLU()) is None, redraw_of(nn.Linear(1, 1)) is None
        (True, False)
    """
    found = (getattr(module, name, None) for name in _NAMES)
    return next((each for each in found if callable(each)), None)


def refuse_unreached(
    root: nn.Module, modules: Iterable[nn.Module], drawn: Iterable[nn.Parameter] = ()
) -> None:
    """Refuse parameters of ``root`` that none of ``modules`` draws anew.

    Args:
        drawn: Those that are drawn in another way.

    Raises:
        ConfigError: There are some.
    """
    reached = set(map(id, drawn))
    for module in modules:
        if redraw_of(module) is not None:
            reached.update(map(id, module.parameters()))
    names = [name for name, each in root.named_parameters() if id(each) not in reached]
    if names:
        told = ", ".join(f"`{name}`" for name in names[:5]) + (", …" if len(names) > 5 else "")
        raise ConfigError(
            f"Every parameter must belong to a module with `reset_parameters()` to be drawn anew, "
            f"but {told} {'does' if len(names) == 1 else 'do'} not. Write that method in its "
            "module, or in one around it."
        )

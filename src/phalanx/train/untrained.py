"""Tell once of parameters that never get a gradient, though they are to be trained."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

__all__ = ["Untrained"]

_WARN_AFTER_STEPS = 100  # a model may use some of its parts now and then only
_NAMED = 5


class Untrained:
    """The parameters that no update so far had a gradient for.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> never = Untrained(module)
        >>> never.note([module.weight, module.bias])
        >>> never.note([module.bias])
        >>> never.names
        ('bias',)
    """

    def __init__(self, module: nn.Module) -> None:
        self._left = {id(parameter): name for name, parameter in module.named_parameters()}
        self._num_steps = 0  # with some left

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those parameters; none before the first update."""
        return tuple(self._left.values()) if self._num_steps else ()

    def note(self, missing: Sequence[nn.Parameter]) -> None:
        """Note an update in which these parameters got no gradient."""
        if not self._left:
            return
        now = {id(each) for each in missing}
        self._left = {key: name for key, name in self._left.items() if key in now}
        self._num_steps += 1
        if self._num_steps == _WARN_AFTER_STEPS:
            self.tell()

    def tell(self) -> None:
        """Warn of those that are left, the first time that there are any."""
        names = self.names
        if not names:
            return
        self._left = {}
        shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        warnings.warn(
            f"Parameters {shown}{more} got no gradient in any of {self._num_steps} updates, and "
            "were not trained. Use them in `forward()` or in the loss, or freeze them by "
            "`requires_grad_(False)`.",
            stacklevel=3,
        )

"""A module around another that shows the other's names: same keys, wrapped or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

_INNER = "module."


class Wrapper(nn.Module):
    """Wraps one module, under whose own names its parameters, buffers and state are known.

    Also in a model around this one, at any depth. Attributes of the wrapped module can be read
    here.
    """

    module: nn.Module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, then the wrapped one and all inside it as if it were not wrapped.

        The names of parameters and buffers follow, also in a model around it.
        """
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    # Any: torch's own signature, which has an older form with positions.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the wrapped module, under the keys that it has unwrapped."""
        state = self.module.state_dict(*args, **kwargs)
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        versions = getattr(state, "_metadata", {})
        own = [key for key in versions if prefix and f"{key}.".startswith(prefix)]
        for key in own:  # when loading, torch looks versions up by the wrapped names
            versions.setdefault(f"{prefix}{_INNER}{key[len(prefix) :]}".rstrip("."), versions[key])
        return state

    # Any: what torch's own method takes and returns.
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the module, wrapped or not: their keys are equal.

        Keys may also all begin with ``module.``, as torch's own wrappers write them.
        """
        if self._is_prefixed(state_dict, ""):
            versions = getattr(state_dict, "_metadata", {})
            state_dict = OrderedDict(state_dict)
            state_dict._metadata = dict(versions)  # type: ignore[attr-defined]  # as torch does
            consume_prefix_in_state_dict_if_present(state_dict, _INNER)
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _is_prefixed(self, keys: Collection[str], prefix: str) -> bool:
        inner = prefix + _INNER
        named_so = "module" in self.module._modules
        return bool(keys) and not named_so and all(key.startswith(inner) for key in keys)

    # Any: torch's own signature.
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load as a part of the model around it: torch finds ``module`` by its real name."""
        own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        inner = prefix if self._is_prefixed(own, prefix) else prefix + _INNER
        state_dict.update({inner + key[len(prefix) :]: own[key] for key in own})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register it in the wrapped module, as all parameters are."""
        self.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register it in the wrapped module, as all buffers are."""
        self.module.register_buffer(name, tensor, persistent)

    # Any: an attribute of the user's own module.
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # Any: an attribute of the user's own module.
    def __setattr__(self, name: str, value: Any) -> None:
        """Set it here, but what holds tensors in the wrapped module: they would be lost here."""
        inner = self.__dict__.get("_modules", {}).get("module")
        held = (Tensor, nn.Module)
        if (
            inner is None
            or name == "module"
            or isinstance(getattr(type(self), name, None), property)
            or not (isinstance(value, held) or isinstance(getattr(inner, name, None), held))
        ):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

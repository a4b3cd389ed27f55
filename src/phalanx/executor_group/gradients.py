"""Which parameters get gradients, and whether a backward pass replaces or adds to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from phalanx.errors import ConfigError
from phalanx.executor_group.group_arguments import check_mapping, read_names

__all__ = ["GradientRequests"]

_REQUESTS = ("write", "add", "null")


class GradientRequests:
    """One request for each parameter.

    Args:
        module: Whose parameters.
        request: "write", "add" or "null" for all, or these by name or shell pattern: a name counts
            before patterns, and the first pattern that matches; "write" for the rest.
        fixed: Names or patterns of parameters that get "null"; None for none.

    Raises:
        ConfigError: A request is unknown, or a name is none or fits no parameter.
    """

    def __init__(
        self, module: nn.Module, request: str | Mapping[str, str], fixed: Sequence[str] | None
    ) -> None:
        fixed = read_names("fixed_param_names", () if fixed is None else fixed)
        if isinstance(request, Mapping):
            check_mapping("grad_req", request, "'write', 'add' or 'null'")
        rules = dict(request) if isinstance(request, Mapping) else {"*": request}
        for pattern, word in rules.items():
            if word not in _REQUESTS:
                raise ConfigError(
                    f"`grad_req` must be 'write', 'add' or 'null', but is {word!r} for {pattern!r}."
                )
        names = [name for name, _ in module.named_parameters()]
        written = list(rules) if isinstance(request, Mapping) else []
        for noun, patterns in (("grad_req", written), ("fixed_param_names", fixed)):
            for pattern in patterns:
                if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"`{noun}` must name parameters of the module, but {pattern!r} fits none. "
                        f"It has {', '.join(names) or 'none'}."
                    )
        self._module = module
        self._request_by_name = {
            name: "null" if _first(name, fixed) is not None else _request_of(name, rules)
            for name in names
        }

    @contextlib.contextmanager
    def without_null(self) -> Iterator[None]:
        """Let parameters of "null" need no gradient in the body, which is a forward pass."""
        frozen = [each for each in self._parameters_of("null") if each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def write(self, compute: Callable[[], object]) -> None:
        """Forget gradients of "write" and ``compute`` new ones; the old are back if that fails.

        A function, and no context: Ctrl-C between a context's begin and its body would lose them.
        """
        written = self._parameters_of("write")
        before = [parameter.grad for parameter in written]
        try:
            for parameter in written:
                parameter.grad = None
            compute()
        except BaseException:
            for parameter, gradient in zip(written, before, strict=True):
                parameter.grad = gradient
            raise

    def _parameters_of(self, request: str) -> list[nn.Parameter]:
        return [
            parameter
            for name, parameter in self._module.named_parameters()
            if self._request_by_name.get(name) == request
        ]


def _request_of(name: str, rules: Mapping[str, str]) -> str:
    pattern = name if name in rules else _first(name, rules)
    return "write" if pattern is None else rules[pattern]


def _first(name: str, patterns: Sequence[str] | Mapping[str, str]) -> str | None:
    return next((each for each in patterns if fnmatchcase(name, each)), None)

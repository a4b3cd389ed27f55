"""Which parameters get gradients, and whether a backward pass replaces or adds to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from phalanx.errors import ConfigError

__all__ = ["GradientRequests"]

_REQUESTS = ("write", "add", "null")


class GradientRequests:
    """One request per parameter; those of "null" need no gradient until :meth:`close`.

    Args:
        module: Whose parameters.
        request: "write", "add" or "null" for all, or these by name or shell pattern: a name counts
            before patterns, and the first pattern that matches; "write" for the rest.
        fixed: Names or patterns of parameters that get "null".

    Raises:
        ConfigError: A request is unknown, or a name fits no parameter.
    """

    def __init__(
        self, module: nn.Module, request: str | Mapping[str, str], fixed: Sequence[str]
    ) -> None:
        fixed = [fixed] if isinstance(fixed, str) else list(fixed)
        rules = dict(request) if isinstance(request, Mapping) else {"*": request}
        for pattern, word in rules.items():
            if word not in _REQUESTS:
                raise ConfigError(
                    f"`grad_req` must be 'write', 'add' or 'null', but is {word!r} for {pattern!r}."
                )
        names = [name for name, _ in module.named_parameters()]
        written = list(rules) if isinstance(request, Mapping) else []
        for noun, patterns in (("grad_req", written), ("fixed_parameters", fixed)):
            for pattern in patterns:
                if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"`{noun}` must name parameters of the module, but {pattern!r} fits none. "
                        f"It has {', '.join(names) or 'none'}."
                    )
        self._written: list[nn.Parameter] = []
        self._silenced: list[nn.Parameter] = []
        self._applied = False
        for name, parameter in module.named_parameters():
            word = "null" if _first(name, fixed) is not None else _request_of(name, rules)
            if word == "write":
                self._written.append(parameter)
            elif word == "null" and parameter.requires_grad:
                self._silenced.append(parameter)

    def apply(self) -> None:
        """Let parameters of "null" need no gradient."""
        for parameter in self._silenced:
            parameter.requires_grad_(False)
        self._applied = True

    def close(self) -> None:
        """Let them need gradients again; idempotent."""
        for parameter in self._silenced if self._applied else ():
            parameter.requires_grad_(True)
        self._silenced = []

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Forget gradients of "write" before the body; they are back if it fails."""
        before = [parameter.grad for parameter in self._written]
        for parameter in self._written:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(self._written, before, strict=True):
                parameter.grad = gradient
            raise


def _request_of(name: str, rules: Mapping[str, str]) -> str:
    pattern = name if name in rules else _first(name, rules)
    return "write" if pattern is None else rules[pattern]


def _first(name: str, patterns: Sequence[str] | Mapping[str, str]) -> str | None:
    return next((each for each in patterns if fnmatchcase(name, each)), None)

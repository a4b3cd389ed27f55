"""Which parameters get gradients, and whether a backward pass replaces or adds to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from phalanx.errors import ConfigError
from phalanx.executor_group.group_arguments import check_mapping, read_names

__all__ = ["GradientRequests"]

_REQUESTS = ("write", "add", "null")


class _Silence:
    """Who wants parameters to need no gradient: `requires_grad` is theirs, and groups may share it.

    A parameter needs gradients again when the last one has gone, not the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_wishes = WeakIdKeyDictionary()  # by parameter, which `==` does not compare

    def begin(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those that must be ended: all but those that the user has frozen."""
        with self._lock:
            own = [each for each in parameters if each.requires_grad or each in self._num_wishes]
            for parameter in own:
                self._num_wishes[parameter] = self._num_wishes.get(parameter, 0) + 1
                parameter.requires_grad_(False)
            return own

    def end(self, parameters: Sequence[nn.Parameter]) -> None:
        with self._lock:
            for parameter in parameters:
                self._num_wishes[parameter] -= 1
                if not self._num_wishes[parameter]:
                    del self._num_wishes[parameter]
                    parameter.requires_grad_(True)


_SILENCE = _Silence()


class GradientRequests:
    """One request per parameter; those of "null" need no gradient until :meth:`close`.

    Args:
        module: Whose parameters.
        request: "write", "add" or "null" for all, or these by name or shell pattern: a name counts
            before patterns, and the first pattern that matches; "write" for the rest.
        fixed: Names or patterns of parameters that get "null".

    Raises:
        ConfigError: A request is unknown, or a name is none or fits no parameter.
    """

    def __init__(
        self, module: nn.Module, request: str | Mapping[str, str], fixed: Sequence[str]
    ) -> None:
        fixed = read_names("fixed_parameters", fixed, "Give [] for none.")
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
        for noun, patterns in (("grad_req", written), ("fixed_parameters", fixed)):
            for pattern in patterns:
                if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"`{noun}` must name parameters of the module, but {pattern!r} fits none. "
                        f"It has {', '.join(names) or 'none'}."
                    )
        self._written: list[nn.Parameter] = []
        self._null: list[nn.Parameter] = []
        self._silenced: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            word = "null" if _first(name, fixed) is not None else _request_of(name, rules)
            if word == "write":
                self._written.append(parameter)
            elif word == "null":
                self._null.append(parameter)

    def apply(self) -> None:
        """Let parameters of "null" need no gradient."""
        self._silenced += _SILENCE.begin(self._null)

    def close(self) -> None:
        """Let them need gradients again, as far as nobody else wants none; idempotent."""
        silenced, self._silenced = self._silenced, []
        _SILENCE.end(silenced)

    def write(self, compute: Callable[[], object]) -> None:
        """Forget gradients of "write" and ``compute`` new ones; the old are back if that fails.

        A function, and no context: Ctrl-C between a context's begin and its body would lose them.
        """
        before = [parameter.grad for parameter in self._written]
        try:
            for parameter in self._written:
                parameter.grad = None
            compute()
        except BaseException:
            for parameter, gradient in zip(self._written, before, strict=True):
                parameter.grad = gradient
            raise


def _request_of(name: str, rules: Mapping[str, str]) -> str:
    pattern = name if name in rules else _first(name, rules)
    return "write" if pattern is None else rules[pattern]


def _first(name: str, patterns: Sequence[str] | Mapping[str, str]) -> str | None:
    return next((each for each in patterns if fnmatchcase(name, each)), None)

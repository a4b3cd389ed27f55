"""Rules that merge the buffers that replicas write, such as batch norm's statistics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from phalanx.errors import ConfigError

_RULES = ("first", "mean", "sum")


class BufferRules:
    """One rule per buffer.

    ``mean`` averages, weighted by rows; ``first`` takes the first replica's; ``sum`` adds up what
    each replica has added. Integers (counters) are never averaged: under ``mean`` they are the
    first's.

    Args:
        policy: A rule for all buffers, or rules by shell pattern of the buffer's name, where the
            first that matches counts and ``mean`` stands for the rest.

    Example:
        >>> rules = BufferRules({"*.running_*": "first", "seen": "sum"})
        >>> rules.of("norm.running_mean"), rules.of("seen"), rules.of("other")
        ('first', 'sum', 'mean')

    Raises:
        ConfigError: A rule is unknown.
    """

    def __init__(self, policy: str | Mapping[str, str] = "mean") -> None:
        self.patterns = dict(policy) if isinstance(policy, Mapping) else {"*": policy}
        for pattern, rule in self.patterns.items():
            if rule not in _RULES:
                raise ConfigError(
                    f"`buffers` must hold rules out of {', '.join(map(repr, _RULES))}, but holds "
                    f"{rule!r} for {pattern!r}."
                )

    def check(self, names: Collection[str]) -> None:
        """Refuse a pattern, other than "*", that no buffer's name matches.

        Raises:
            ConfigError: There is one.
        """
        for pattern in self.patterns:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                told = ", ".join(map(repr, names)) or "none"
                raise ConfigError(
                    f"`buffers` must name buffers that the module has, but names {pattern!r}. It "
                    f"has {told:.200}."
                )

    def of(self, name: str) -> str:
        """Return the rule for the buffer ``name``."""
        for pattern, rule in self.patterns.items():
            if fnmatchcase(name, pattern):
                return rule
        return "mean"

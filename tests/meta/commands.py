"""The command line as data: every command of ``phalanx`` with its arguments and options.

Typer builds the tree of commands; only attributes that typer and click share are looked at.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import typer


def root_command(app: typer.Typer | None = None) -> Any:
    """Return the command tree of an app, by default of ``phalanx`` itself."""
    if app is None:
        app = importlib.import_module("phalanx.cli.app").app
    return typer.main.get_command(app)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that does something, with the words that call it."""
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name in sorted(children):
        yield from walk(children[name], (*path, name))


def flags(command: Any) -> tuple[str, ...]:
    """Return a command's options and, in capitals, its arguments; sorted, without help."""
    found = set()
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            found.add(parameter.name.upper())
        else:
            found.update((*parameter.opts, *parameter.secondary_opts))
    return tuple(sorted(found - {"--help", "-h"}))


def flags_by_command(root: Any) -> dict[str, tuple[str, ...]]:
    """Return the flags of every command, by the words that call it; the root's own under ""."""
    table = {" ".join(path): flags(command) for path, command in walk(root)}
    table[""] = flags(root)
    return table

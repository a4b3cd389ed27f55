"""An object of the user's own code, found by ``module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
from typing import Any

from phalanx.errors import ConfigError


# Any: the object is the user's and may be of every type; the caller checks what it needs.
def import_attribute(spec: str) -> Any:
    """Import a module, from the current folder too, and return the named attribute.

    The current folder is put first on ``sys.path`` and stays there, as ``python -m`` does, so that
    what the module imports later is found as well.

    Args:
        spec: ``"package.module:name"``; the name may have dots.

    Raises:
        ConfigError: The spec has not this form, or there is no such module or attribute.
        Exception: Whatever the module itself raises while it is imported.
    """
    module_name, _, attribute = spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise ConfigError(f"`{spec}` must be of the form `module:attribute`, but is not.")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A module written a moment ago is otherwise overlooked by a finder that has listed the folder.
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        # The module itself is there where it is another one that it lacks.
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise
        raise ConfigError(
            f"Module `{module_name}` of `{spec}` must be importable, but was not found in "
            f"{folder!r} or among the installed packages."
        ) from exc
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as exc:
        raise ConfigError(
            f"Module `{module_name}` must have the attribute `{attribute}` that `{spec}` names, "
            "but does not."
        ) from exc


# Any: see above.
def make(found: Any, spec: str, values: Any) -> Any:
    """Return what ``spec`` named; a function or a class is called for it, without arguments.

    Args:
        values: Types whose objects are taken as they are, callable or not.

    Raises:
        ConfigError: It cannot be called without arguments.
        Exception: Whatever the function itself raises, with a note.
    """
    if isinstance(found, values) or not callable(found):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as exc:
        raise ConfigError(
            f"`{spec}` must be callable without arguments, but is not: {exc}. "
            "Name a function that fills them in."
        ) from exc
    except ValueError:
        pass  # some built-in callables have no signature to look at
    try:
        return found()
    except Exception as exc:
        exc.add_note(f"raised by `{spec}`")
        raise

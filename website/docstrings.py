"""Docstrings on their way to the site: roles become plain code, an example one that is shown so."""

from __future__ import annotations

import re

import griffe

EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)  # griffe knows it in the plural
ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod|obj):`~?([^`]+)`")


class HouseStyle(griffe.Extension):
    """Writes what our docstrings have of reStructuredText, and in words of our own, as griffe's."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of what was just read."""
        if obj.docstring is not None:
            plain = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", plain)

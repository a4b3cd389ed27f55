"""The page of the command line, generated from its help texts."""

from __future__ import annotations

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from phalanx.cli.app import app


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to those of docs/."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="phalanx")
    files.append(File.generated(config, "reference/command.md", content=text))
    return files

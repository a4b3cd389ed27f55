"""The page of the command, made from its help texts; code that tables do not break in a word."""

from __future__ import annotations

import re

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from phalanx.cli.app import app

CODE = re.compile(r"<code>([^<]*)</code>")  # in a line; blocks have tags inside
LIST = re.compile(r"\*\*Commands\*\*:\n.*?(?=\n## )", re.DOTALL)  # its lines are cut short


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to those of docs/."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="phalanx")
    text = LIST.sub("", text)
    files.append(File.generated(config, "reference/command.md", content=text))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Keep `--max-restarts` in one line where a cell of a table is narrow."""
    return CODE.sub(_keep_words, html)


def _keep_words(code: re.Match[str]) -> str:
    words = re.sub(r"\S+", r'<span class="word">\g<0></span>', code[1])
    return f"<code>{words}</code>"

"""``make bench``: all benchmarks, one after the other, on one page.

benchmark ──► NAME.json, NAME.png ──► index.html, which needs nothing beside itself
"""

from __future__ import annotations

import base64
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from xml.etree.ElementTree import Element, SubElement, tostring

import typer
from rich.console import Console

from benchmarks.command import begin, read_names
from benchmarks.machine import Machine
from benchmarks.report import number
from phalanx.errors import ConfigError, UnsupportedError

# As `phalanx report` has it: light and dark, narrow and wide.
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 75rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 1rem 0.25rem 0; text-align: left; border-bottom: 1px solid #dde2e9; }
.wide { overflow-x: auto; }
img { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class Section:
    """What came of one benchmark.

    Attributes:
        note: Why it was skipped, or what has failed.
        record: Its JSON file. Any: JSON.
        figure: Its PNG file.
    """

    name: str
    note: str = ""
    record: Mapping[str, Any] | None = None
    figure: bytes = b""


def measure_all(benchmarks: Mapping[str, Callable[..., None]]) -> Callable[..., None]:
    """Return the command that runs these benchmarks, by name; each is called with ``out=``."""

    def run_all(
        only: Annotated[
            str, typer.Option(help="Which benchmarks, separated by commas.", show_default="all")
        ] = "",
        out: Annotated[
            Path, typer.Option(help="Folder for index.html, and a folder of each benchmark.")
        ] = Path("out/bench"),
    ) -> None:
        """Run all benchmarks, one after the other, and make one page of them: index.html.

        One that cannot run here is skipped, with its reason. One that fails does not stop the
        others; the exit code is then 1.
        """
        names = read_names("only", only, benchmarks) if only else list(benchmarks)
        console, machine = begin()
        sections: list[Section] = []
        failed = []
        page = out / "index.html"
        out.mkdir(parents=True, exist_ok=True)
        for place, name in enumerate(names, 1):
            console.rule(f"{name}, {place} of {len(names)}")
            section, is_well = _run(name, benchmarks[name], out / name, console)
            sections.append(section)
            failed += [] if is_well else [name]
            # After each, so that what was measured is there if the next is interrupted.
            page.write_text(make_page(sections, machine), encoding="utf-8")
        console.print(f"Wrote {page}: open it in a browser.")
        if failed:
            console.print(f"Failed: {', '.join(failed)}.", style="red")
            raise typer.Exit(1)

    return run_all


def _run(
    name: str, benchmark: Callable[..., None], out: Path, console: Console
) -> tuple[Section, bool]:
    """Run one, and say whether nothing has failed."""
    files = [out / f"{name}.json", out / f"{name}.png"]
    for file in files:
        file.unlink(missing_ok=True)  # of an earlier run
    note, is_well = "", True
    try:
        benchmark(out=out)
    except (ConfigError, UnsupportedError) as error:
        note = f"Skipped: {error}"
        console.print(note)
    except typer.Exit:  # a contestant, which the record names
        is_well = False
    except Exception as error:  # the others are to run
        note, is_well = f"Failed: {type(error).__name__}: {error}", False
        console.print(traceback.format_exc(), style="red")
    if not all(file.exists() for file in files):
        return Section(name, note), is_well
    record = json.loads(files[0].read_text(encoding="utf-8"))
    return Section(name, note, record, files[1].read_bytes()), is_well


def make_page(sections: list[Section], machine: Machine) -> str:
    """Return the page, as HTML."""
    html = Element("html", {"lang": "en"})
    head = add(html, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "meta", name="color-scheme", content="light dark")
    add(head, "title", "Phalanx: benchmarks")
    add(head, "style", _STYLE)
    body = add(html, "body")
    add(body, "h1", "Benchmarks")
    add(body, "p", machine.in_words())
    for section in sections:
        _add_section(body, section)
    return "<!doctype html>\n" + tostring(html, encoding="unicode", method="html") + "\n"


def _add_section(body: Element, section: Section) -> None:
    record = section.record
    add(body, "h2", section.name if record is None else str(record["title"]))
    if section.note:
        add(body, "p", section.note)
    if record is None:
        return
    add(add(body, "p"), "code", str(record["command"]))
    for name, cause in record["failures"].items():
        add(body, "p", f"{name} failed: {cause}")
    encoded = base64.b64encode(section.figure).decode()
    add(body, "img", src=f"data:image/png;base64,{encoded}", alt=str(record["title"]))
    for table in record["tables"]:
        add(body, "h3", str(table["title"]).strip())
        _add_table(body, table)


# Any: JSON
def _add_table(body: Element, table: Mapping[str, Any]) -> None:
    grid = add(add(body, "div", class_="wide"), "table")
    heads = add(grid, "tr")
    add(heads, "th")
    for column in table["columns"]:
        add(heads, "th", " ".join(filter(None, (column["heading"], column["unit"]))))
    for row in table["rows"]:
        line = add(grid, "tr")
        add(line, "th", row["label"].strip())
        for cell in row["cells"]:
            add(
                line, "td", cell if isinstance(cell, str) else "–" if cell is None else number(cell)
            )


def add(parent: Element, tag: str, text: str | None = None, /, **attributes: str) -> Element:
    """Add an element; `class_` stands for `class`."""
    words = {key.rstrip("_"): value for key, value in attributes.items()}
    element = SubElement(parent, tag, words)
    element.text = text
    return element

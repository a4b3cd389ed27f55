"""Which test holds which promise: `make promises` writes docs/promises.md from what stands here.

The promises are in promises.toml. A test, or by `pytestmark` all tests of a file, names those that
it holds with ``@pytest.mark.promise("id", …)``; the markers are read, not run.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "promises.md"
HEAD = """# Promises

Phalanx promises these sentences, and a test fails if one is broken. `make promises` writes this
page from `tests/promises.toml` and from the tests marked `@pytest.mark.promise("id")`.
"""
SHOWN = 6  # tests of one file that are named; more of them are counted


@dataclass(frozen=True)
class Promise:
    """A sentence that users may rely on, and the page that explains it."""

    id: str
    sentence: str
    page: str
    section: str = ""


@dataclass(frozen=True)
class Holder:
    """A test that holds promises, or a whole file of tests if ``test`` is empty."""

    path: str
    test: str
    ids: tuple[str, ...]


def read_promises() -> list[Promise]:
    text = (ROOT / "tests" / "promises.toml").read_text(encoding="utf-8")
    return [Promise(**entry) for entry in tomllib.loads(text)["promise"]]


def markers(nodes: Iterable[ast.AST]) -> tuple[str, ...]:
    """Return the ids in calls of ``pytest.mark.promise`` anywhere within ``nodes``."""
    calls = [node for top in nodes for node in ast.walk(top) if isinstance(node, ast.Call)]
    return tuple(
        ast.literal_eval(argument)
        for call in calls
        if ast.unparse(call.func) == "pytest.mark.promise"
        for argument in call.args
    )


def holders_in(path: str, text: str) -> Iterator[Holder]:
    if "mark.promise" not in text:
        return
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            test, ids = node.name, markers(node.decorator_list)
        else:
            test, ids = "", markers([node])
        if ids:
            yield Holder(path, test, ids)


def find_holders() -> list[Holder]:
    return [
        holder
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for holder in holders_in(
            file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        )
    ]


def mistakes(promises: list[Promise], holders: list[Holder]) -> list[str]:
    """List promises without a test, and markers without a promise."""
    held = {id: holder for holder in holders for id in holder.ids}
    known = {promise.id: promise for promise in promises}
    found = [f"{each.id}: no test" for each in promises if each.id not in held]
    for id, holder in held.items():
        if id not in known:
            found.append(f"{id}: unknown, in {holder.path}")
    if len(known) < len(promises):
        found.append("an id stands twice")
    return found


def write_page(promises: list[Promise], holders: list[Holder]) -> str:
    tests: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for holder in holders:
        for id in holder.ids:
            tests[id][holder.path].append(holder.test)
    lines = [HEAD]
    for promise in promises:
        if promise.section:
            lines += [f"## {promise.section}", "", "| promise | tests |", "|---|---|"]
        cells = " ".join(_cell(path, names) for path, names in tests[promise.id].items())
        lines.append(f"| {promise.sentence} [More]({promise.page}) | {cells} |")
    page = "\n".join(lines) + "\n"
    return page.replace("|\n## ", "|\n\n## ")


def _cell(path: str, names: list[str]) -> str:
    if "" in names:
        return f"`{path}`"
    if len(names) > SHOWN:
        return f"`{path}` ({len(names)} tests)"
    return " ".join(f"`{path}::{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(write_page(read_promises(), find_holders()), encoding="utf-8")
    print(PAGE.relative_to(ROOT))

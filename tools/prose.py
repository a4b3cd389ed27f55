"""Count phrases of a private dialect in pages, docstrings, help texts and errors.

python tools/prose.py           compare with prose.json: the count of each file may only fall
python tools/prose.py --keep    write prose.json
python tools/prose.py --list    print each hit with its line
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_name("prose.json")
LONGEST = 30  # words in a sentence

# A pattern, and the words to write.
WORDS = {
    r"\bformations?\b": "parallel configuration",
    r"\bsame bits\b|\bbit for bit\b": "bitwise reproducible, bitwise identical",
    r"\bby night\b": "nightly",
    r"\bstand-ins?\b": "mock",
    r"\bplanted bugs?\b": "mutation test",
    r"\bof (?:one's|your|its|their) own\b": "own, separate",
    r"\bin the place of\b": "instead of",
    r"\bcomes? (?:of|to) it\b": "results",
    r"\bway out\b": "fix",
    r"\bplay(?:s|ed)\b": "simulate",
    r"\b(?:is|are|was|were) told\b": "receives, is notified",
    r"\bno other than\b": "only",
    r"\bas it is\b": "unchanged",
    r"\bnobody\b|\bwhoever\b": "no process, any process",
    r"\banew\b": "again",
    r"\bgo(?:es)? on\b": "continue",
    r"\bbeside\b": "compared with, next to",
    r"\bhanded? on\b": "pass",
    r"\btakes? no notice\b": "ignore",
    r"\bat hand\b": "available",
    r"\bthe books\b": "ledger",
    r"\bsays? so\b": "report it",
    r"\bwhat there is\b|\bthere is none\b": "name the noun",
    r"\bthat is another story\b": "cut",
}
HEAD = re.compile(r"^(What|Who|Whose|Where|How|Whether|Those|That|As|Such)\b")
TEXTS = ("Option", "Argument", "warn", "warn_user", "_option")  # calls whose texts users read


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without code, examples, diagrams, tables and lists."""
    text = re.sub(r"```.*?```|``[^`]*``|`[^`]*`", "x", text, flags=re.S)
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        starts = re.match(r"([-*|#>]|\d+\.|\.\.\.|:::|[\w*, ]+:( |$)|\S.*  )", bare)
        if not bare or starts:
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph))
            paragraph = []
        if bare and not bare.startswith(("|", ">>>", "...", "#")):
            paragraph.append(bare)


def texts_of_code(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield docstrings, and texts of errors, warnings and options: (line, text, is a docstring)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            found = ast.get_docstring(node)
            if found:
                # Examples, and blocks that are indented: diagrams and code.
                prose = re.sub(r"^ *(>>>|\.\.\.).*(\n(?! *\n| *>>>).+)*", "", found, flags=re.M)
                if isinstance(node, ast.Module):
                    prose = re.sub(r"^ {4,}.*$", "", prose, flags=re.M)
                yield getattr(node, "lineno", 1), prose, True
        called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Raise) or called in TEXTS:
            for inner in ast.walk(node):
                value = inner.value if isinstance(inner, ast.Constant) else None
                if isinstance(value, str) and " " in value:
                    yield inner.lineno, value, False


def hits_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the complaint of each hit in a page or a module."""
    is_page = path.suffix == ".md"
    texts = [(1, path.read_text(encoding="utf-8"), False)] if is_page else list(texts_of_code(path))
    for number, text, is_docstring in texts:
        prose = re.sub(r"```.*?```|`[^`]*`", "x", text, flags=re.S) if is_page else text
        for pattern, better in WORDS.items():
            for match in re.finditer(pattern, prose, re.I):
                before = text[: text.find(match[0])].count("\n") if is_page else 0
                yield number + before, f"{match[0]!r}: write {better}"
        if is_docstring and HEAD.match(text):
            yield number, f"begins with {text.split()[0]!r}: begin with a noun or a verb"
        for sentence in sentences(text):
            count = len(sentence.split())
            if count > LONGEST:
                yield number, f"{count} words in a sentence: {' '.join(sentence.split()[:8])} …"


def main() -> int:
    """Count, and compare or write."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md"]
    paths = [*pages, *sorted((ROOT / "src").rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): list(hits_in(path)) for path in paths}
    counts = {name: len(hits) for name, hits in found.items() if hits}
    if "--list" in sys.argv:
        for name, hits in found.items():
            for number, complaint in hits:
                print(f"{name}:{number}: {complaint}")
        words = Counter(each.partition(":")[0] for hits in found.values() for _, each in hits)
        print(sum(counts.values()), words.most_common(12))
        return 0
    if "--keep" in sys.argv:
        KEPT.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
        print(sum(counts.values()), "hits")
        return 0
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    worse = [name for name, count in counts.items() if count > kept.get(name, 0)]
    for name in worse:
        print(f"{name} has {counts[name]} phrases of the dialect, {kept.get(name, 0)} are kept:")
        for number, complaint in found[name]:
            print(f"  {number}: {complaint}")
    print(f"prose: {sum(counts.values())} hits ({sum(kept.values())} kept)")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

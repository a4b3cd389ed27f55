"""Pages of the site that lie outside of docs/, and links that lead there.

The README is the site's first page, as it is the repository's. Links are written for the
repository; here they are turned to where the page lies on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGE_BY_SOURCE = {  # of the repository
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
SOURCE_BY_PAGE = {page: source for source, page in PAGE_BY_SOURCE.items()}
LINK = re.compile(  # or `code`, which is left alone
    r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
    r"|`[^`\n]+`"
)
BLOCK = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    for source, page in PAGE_BY_SOURCE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links of the repository to where they lead on the site."""
    return turn_links(markdown, page.file.src_uri)


def turn_links(markdown: str, page: str) -> str:
    """Return the page ``page`` of the site with its links turned, code left alone."""
    pieces = BLOCK.split(markdown)
    pieces[::2] = [LINK.sub(lambda found: _turned(found, page), each) for each in pieces[::2]]
    return "".join(pieces)


def _turned(found: re.Match[str], page: str) -> str:
    target = found["target"]
    if target is None or ":" in target:
        return found[0]
    source = SOURCE_BY_PAGE.get(page, f"docs/{page}")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    place = PAGE_BY_SOURCE.get(file, file.removeprefix("docs/"))
    if place == file:  # a file of the repository, which the site does not have
        return found["text"]
    there = posixpath.relpath(place, posixpath.dirname(page) or ".")
    return f"{found['picture']}[{found['text']}]({there}{found['anchor'] or ''})"

"""The code of the pages runs, and prints what they say.

Most run in forks, those marked `night` as users run them. All Python blocks of a page are one
script, in order. One that begins with its name (``# train.py``) is a script of its own, started by
the line of the page that names it (``$ phalanx launch -n 2 train.py``). What a block of ``output``
shows must have been printed.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.examples.test_examples import ROOT, as_users, forked

pytestmark = pytest.mark.promise("pages-and-examples-run")

PAGES = {
    "README.md": "",
    "docs/callbacks.md": r"18 \[6, 12, 18\]\n24\n(.*\n)*stopped: True best: step-\d{8}",
    "docs/collectives.md": r"(?s)rank 1 \[2\.0, 2\.0, 2\.0\].*fsdp over phalanx",
    "docs/coming_from.md": r"steps: 6\n\['loss'\]\nsteps: 8\n(.*\n)*.*steps: 6",
    "docs/containers.md": r"torch.Size\(\[5, 7, 6\]\)",
    "docs/ddp.md": r"(?s)weights: \w+.*accelerate: -?0\.\d+.*fabric: -?0\.\d+.*transformers: \d",
    "docs/fault_tolerance.md": r"(?s)worker 0 was ended by SIGKILL.*done: 12.*done: 20",
    "docs/huggingface.md": r"is exp\(loss\): True\n.*\[3, 8, .*\nerror.*: (0\.0e|\d\.\de-0[678])",
    "docs/reproducibility.md": "",
    "docs/script.md": "",
    "docs/start.md": "",
    "docs/tables.md": r"tensor\(\[1\.0000, 0\.8000, 0\.9000\]\)\n8 syncs",
    "docs/train_command.md": "",
    "docs/training.md": "",
}
NEEDS = {
    "docs/coming_from.md": ("transformers",),
    "docs/ddp.md": ("accelerate", "lightning_fabric", "transformers"),
    "docs/huggingface.md": ("transformers",),
}
BY_NIGHT = {
    "docs/ddp.md",  # test_ddp_same_bits.py
    "docs/containers.md",  # test_containers.py and those beside it
}
ELSEWHERE = {  # the test that runs the page's blocks
    "docs/migrating.md": "tests/contracts/test_torch7.py",
    "docs/migrating_multiverso.md": "tests/contracts/test_multiverso.py",
    "docs/migrating_mxnet.md": "tests/contracts/test_mxnet.py",
    "docs/migrating_oxirs.md": "tests/contracts/test_oxirs.py",
}
LANGUAGES = {"python", "diff", "output", "text", "console", "bash", ""}
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def blocks(page: str, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page) if found == language]


def new_side(diff: str) -> str:
    """Return the script that a diff ends with."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(True) if line[0] != "-")


def scripts(page: str) -> dict[str, str]:
    """Return the scripts of a page by name; what has none of its own is ``page.py``."""
    found: dict[str, str] = {}
    for block in [*blocks(page, "python"), *map(new_side, blocks(page, "diff"))]:
        name = re.match(r"# (\w+\.py)\n", block)
        key = name[1] if name else "page.py"
        found[key] = found.get(key, "") + block + "\n"
    return found


def command(page: str, script: str) -> list[str]:
    """Return the words by which a page starts a script of its own."""
    found = re.search(rf"^(?:\$ )?((?:phalanx|python) [^#\n]*\b{script})\b", page, re.MULTILINE)
    return shlex.split(found[1] if found else f"python {script}")


def run_page(name: str, folder: Path) -> str:
    """Run the scripts of a page, in one folder; return what they printed."""
    page = (ROOT / name).read_text(encoding="utf-8")
    said = ""
    found = scripts(page)
    for script, text in found.items():
        (folder / script).write_text(text)
    for script in found:
        words = ["python", script] if script == "page.py" else command(page, script)
        said += as_users(words, folder) if name in BY_NIGHT else forked(*words, folder=folder)
    return said


def is_line(wanted: str, said: str) -> bool:
    """Tell whether a line is as the page has it, its numbers within a tenth: processors differ."""
    numbers = [[float(each) for each in NUMBER.findall(line)] for line in (wanted, said)]
    return NUMBER.sub("#", wanted) == NUMBER.sub("#", said) and numbers[1] == pytest.approx(
        numbers[0], rel=0.1, abs=0.05
    )


def missing_output(page: str, said: str) -> str:
    """Return the first line of the page's output that was not printed when its turn came."""
    lines = iter(said.splitlines())
    for wanted in "".join(blocks(page, "output")).splitlines():
        if not any(is_line(wanted, line) for line in lines):
            return wanted
    return ""


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        pytest.param(name, promise, marks=[pytest.mark.night] * (name in BY_NIGHT), id=name)
        for name, promise in PAGES.items()
    ],
)
def test_the_code_of_a_page_runs(name: str, promise: str, tmp_path: Path) -> None:
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module, reason=f"needs {module}")
    said = run_page(name, tmp_path)
    assert re.search(promise, said), said
    missing = missing_output((ROOT / name).read_text(encoding="utf-8"), said)
    assert not missing, f"{missing}\nwas not printed, but\n{said}"


@pytest.mark.night
@pytest.mark.promise("loops-of-your-own-on-ranks")
@pytest.mark.parametrize("way", ["", "accelerate", "fabric", "transformers"])
def test_the_scripts_of_ddp_end_with_the_same_weights_on_one_rank_and_two(
    way: str, tmp_path: Path
) -> None:
    for module in NEEDS["docs/ddp.md"] if way else ():
        pytest.importorskip(module, reason=f"needs {module}")
    script = f"with_{way}.py" if way else "train.py"
    found = scripts((ROOT / "docs/ddp.md").read_text(encoding="utf-8"))
    (tmp_path / script).write_text(found[script])
    told = re.compile(rf"{way or 'weights'}: .*")
    one, two = (
        told.findall(as_users(["phalanx", "launch", "-n", n, script], tmp_path)) for n in "12"
    )
    assert one
    assert one == two


def test_every_page_with_code_is_run() -> None:
    with_code = {name for name in pages() if scripts((ROOT / name).read_text())}
    assert with_code == PAGES.keys() | ELSEWHERE.keys()
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(), (page, test)


def test_code_of_another_language_is_not_mistaken_for_code_that_runs() -> None:
    languages = {
        (name, language)
        for name in pages()
        for language, _ in BLOCK.findall((ROOT / name).read_text())
    }
    assert {each for each in languages if each[1] not in LANGUAGES} == set()


def test_a_page_is_read_as_it_is_meant() -> None:
    page = (
        "```python\na = 1\n```\nand\n```python\n# train.py\nb = 2\n```\n```python\nc = 3\n```\n"
        "```console\n$ phalanx launch -n 2 train.py  # on each host\n```\n"
        "```output\nloss 0.50\ndone\n```\n"
        "```diff\n # new.py\n-a = 4\n+a = 5\n\n print(a)\n```\n"
    )
    assert scripts(page) == {
        "page.py": "a = 1\n\nc = 3\n\n",
        "train.py": "# train.py\nb = 2\n\n",
        "new.py": "# new.py\na = 5\n\nprint(a)\n\n",
    }
    assert command(page, "train.py") == ["phalanx", "launch", "-n", "2", "train.py"]
    assert command(page, "other.py") == ["python", "other.py"]
    assert missing_output(page, "x\nloss 0.51\nmore\ndone\ny\n") == ""
    assert missing_output(page, "loss 0.7\ndone\n") == "loss 0.50"
    assert missing_output(page, "done\nloss 0.5\n") == "done"

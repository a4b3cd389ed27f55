"""Every example runs, and says what it promises.

Most run in forks of a process that has imported torch, those marked `night` as users run them. The
code of the pages: test_pages.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.forked_scripts import run_forked

pytestmark = pytest.mark.promise("pages-and-examples-run")

ROOT = Path(__file__).parents[2]
PROMISES = {
    "01_two_replicas.py": r"the same bits: True",
    "02_your_own_container.py": r"equal within rounding: True",
    "03_executor_group.py": r"equal to one device: True",
    "04_model_parallel.py": r"the same weights: True",
    "05_kill_a_worker.py": r"(?s)step \d+: worker 0 .*step \d+: worker 1 .*the same bits: True",
    "06_word_vectors.py": (  # asynchronous, on little text: which of them come differs
        r"(?s)1 worker: +\d+ words/s.*2 workers: +\d+ words/s.* month +[^\n]*"
        r"\b(day|weekday|year|date|datetime|locale)\b"
    ),
    "07_diloco.py": r"20x fewer syncs, within 1 %: True",
    "08_on_ray.py": r"2 workers: .*\nthe same line in all: True\nnear 3 x -1: True",
    "09_callbacks.py": r"stopped after \d+ epochs: True\n(.*\n)*.*the same bits: True",
    "10_hugging_face.py": r"the same bits: True\nit goes on: Shall I compare thee",
}
ARGUMENTS = {
    "05_kill_a_worker.py": ["--steps", "60"],
    "06_word_vectors.py": ["--small"],
    "08_on_ray.py": ["--workers", "2"],
}
NEEDS = {"08_on_ray.py": "ray", "10_hugging_face.py": "transformers"}
BY_NIGHT = {
    "06_word_vectors.py",  # test_table_embedding.py trains one by day
    "09_callbacks.py",  # docs/callbacks.md runs by day
    "10_hugging_face.py",  # docs/huggingface.md
    "05_kill_a_worker.py",  # docs/fault_tolerance.md kills one by day
    "07_diloco.py",  # its figures want 600 steps; test_shared_module.py holds what it shows
    "08_on_ray.py",  # test_ray.py starts a Ray by day
}
DEADLINE_S = 240  # some start worker processes, which takes long on a busy machine


def as_users(words: list[str], folder: Path) -> str:
    """Run ``python script …``, or a command of the environment; return what it printed."""
    program, *rest = words
    started = sys.executable if program == "python" else Path(sys.executable).with_name(program)
    done = subprocess.run(
        [started, *rest],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr  # by what ends with the interpreter
    return done.stdout


def forked(*words: str, folder: Path) -> str:
    """Run ``python script …`` or another command in a fork; return what it printed."""
    code, said = run_forked(*words, folder=folder, deadline_s=DEADLINE_S)
    assert code == 0, said
    return said


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted(PROMISES)


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        pytest.param(name, promise, marks=[pytest.mark.night] * (name in BY_NIGHT), id=name)
        for name, promise in PROMISES.items()
    ],
)
def test_example(name: str, promise: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / name
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs {NEEDS[name]}")
    words = ["python", str(script), *ARGUMENTS.get(name, [])]
    said = as_users(words, tmp_path) if name in BY_NIGHT else forked(*words, folder=tmp_path)
    assert re.search(promise, said), said


@pytest.mark.night  # test_rank_executor.py trains on ranks by day
def test_the_page_on_ranks_runs_under_torchrun(tmp_path: Path) -> None:
    page = (ROOT / "docs/fault_tolerance.md").read_text()
    (script,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    words = ("torchrun", "--standalone", "--nproc-per-node", "2", "train.py")
    said = forked(*words, folder=tmp_path)
    assert said.count("steps done: 20") == 1, said
    assert (tmp_path / "checkpoint").is_dir()

"""How many seconds of a core the tests take, by folder: minutes depend on who else is at work.

`make test` sets ``CORE_SECONDS`` to a file, each of its runs of pytest adds its cases there, and
``python -m tests.core_seconds FILE`` prints the sums beside those of `tests/core_seconds.json`,
which `make core-seconds` writes. A case has the time of the process that runs it and of all that
descend from it; a process that has left its parent, as a server of tables may, is not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

KNOWN = Path(__file__).with_name("core_seconds.json")
OUTSIDE = "start, collection, fixtures of files"
NUM_DEAREST = 10
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def used_s(pid: int) -> float:
    """Return the seconds that a process, its children and theirs have used of a core so far."""
    seconds = 0.0
    with suppress(OSError):  # it has ended meanwhile
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        seconds = sum(map(int, times)) * TICK_S
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # of a thread that has
                seconds += sum(map(used_s, map(int, (task / "children").read_text().split())))
    return seconds


class CoreSeconds:
    """A plugin of pytest, for the process that runs tests and, with xdist, the one above."""

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._device = device
        self._seconds_by_case: Counter[str] = Counter()
        self._counted_s = 0.0

    def _count(self, case: str) -> None:
        """Let what was used since the last call be a case's; what left its parent may be missed."""
        now_s = used_s(os.getpid())
        if now_s < self._counted_s:  # a child may be missed while another one ends: look again
            now_s = used_s(os.getpid())
        self._seconds_by_case[case] += max(0.0, now_s - self._counted_s)
        self._counted_s = now_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self._seconds_by_case:
            self._count(OUTSIDE)
        result = yield
        self._count(item.nodeid)
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.pluginmanager.hasplugin("dsession"):  # its workers have told theirs
            self._seconds_by_case[OUTSIDE] += time.process_time()
        else:
            self._count(OUTSIDE)
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # one of several: the process above asks for this
            output["core_seconds"] = dict(self._seconds_by_case)
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"device": self._device, "cases": self._seconds_by_case}) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds_by_case.update(getattr(node, "workeroutput", {}).get("core_seconds", {}))


def folder_of(case: str, device: str) -> str:
    """Name the folder whose sum a case belongs to; all that runs on a test device is one."""
    if device != "cpu":
        return f"on {device}"
    parts = case.partition("::")[0].split("/")
    return "/".join(parts[: 2 if parts[0] == "tests" else 1]) if len(parts) > 1 else case


def read(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Return the seconds by folder and by case."""
    by_folder: Counter[str] = Counter()
    by_case: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        for case, seconds in run["cases"].items():
            by_folder[folder_of(case, run["device"])] += seconds
            by_case[case] += seconds
    return by_folder, by_case


def table(now: Mapping[str, float], known: Mapping[str, float]) -> Iterator[str]:
    """Yield lines of the seconds by folder beside the known ones, the sums last."""
    yield f"{'core-seconds':38}{'now':>8}{'main':>8}"
    for folder in sorted(now.keys() | known.keys()):
        yield f"{folder:38}{now.get(folder, 0):8.1f}{known.get(folder, 0):8.1f}"
    yield f"{'all':38}{sum(now.values()):8.1f}{sum(known.values()):8.1f}"


def main(path: Path, *, keep: bool) -> None:
    """Print a run's table and its dearest cases; ``keep``: they are those of main from now on."""
    if not path.exists():
        sys.exit(f"No run of tests has come to its end and left {path}: `make test` does.")
    by_folder, by_case = read(path)
    if keep:
        kept = {folder: round(seconds, 1) for folder, seconds in sorted(by_folder.items())}
        KNOWN.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    print(*table(by_folder, json.loads(KNOWN.read_text(encoding="utf-8"))), sep="\n")
    by_case.pop(OUTSIDE, None)
    for case, seconds in by_case.most_common(NUM_DEAREST):
        print(f"{seconds:8.1f}  {case}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), keep="--keep" in sys.argv)

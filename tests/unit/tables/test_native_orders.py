"""The order of stores in native/part.c and keys.c: each that is broken makes a check fail.

A copy of the source is changed and built, and killed at every store, or read meanwhile. On x86 a
processor keeps the order of stores, so what is changed here is the order in the source. That other
processors keep it, too, is the fences' part, which x86 cannot show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phalanx import tables
from phalanx.native import FUNCTIONS
from tests.chaos.native_bugs import broken_functions, can_be_planted
from tests.chaos.test_table_controls import adds_of_new_keys_by_two
from tests.unit.tables.test_part import (
    test_an_add_of_one_block_is_whole_or_absent_wherever_its_process_dies as kill_at_every_store,
)

pytestmark = [
    pytest.mark.night,  # it is about the tests
    pytest.mark.skipif(not can_be_planted(), reason="there is no C compiler"),
]

NUMBER = 1 << 41
SAVED = "        phalanx_put(&p->header[AT], first + some);\n"
RECORDS = "        phalanx_clamp("
BEGUN = "    phalanx_put(&header[WORD], before + 1);\n"
CHANGED = "    phalanx_put(&header[AT], ALL);\n"
IN = "    if (number) phalanx_put(&p->done[worker], number);\n"
ENDED = "    phalanx_put(&header[WORD], before + 2);\n"
SPOIL = "        memset(record + first * row_bytes, 7, (size_t)(some * row_bytes)); step();\n"
CHANGES = "    if (!(rows ? change_rows("
SWAPPED = "    phalanx_put(&header[SIDE], next_side);\n"


def kill() -> None:
    for rows in (None, [3, 1, 3]):
        kill_at_every_store(rows, NUMBER)


def read_beside_adds() -> None:
    with tables.join(num_workers=2) as one, one.thread_worker() as other:
        table, others = (w.matrix(512, 512, torch.int64, name="t") for w in (one, other))
        ones, rows = torch.ones(512, 512, dtype=torch.int64), torch.arange(512)

        def add() -> None:
            for _ in range(5000):
                others.add(ones, rows)

        thread = threading.Thread(target=add)
        thread.start()
        try:
            while thread.is_alive():
                seen = table.get()
                assert bool((seen == seen[0, 0]).all())  # quick, so that many are read
        finally:
            thread.join()


def find_what_others_bring() -> None:
    adds_of_new_keys_by_two("orders", None, Path())


ORDERS: dict[str, tuple[Callable[[], None], str, dict[str, str]]] = {
    "the record counts before it is written": (kill, "part.c", {RECORDS: SAVED + SPOIL + RECORDS}),
    "rows change before the record counts": (kill, "part.c", {SAVED: ""}),
    "rows change before the add has begun": (kill, "part.c", {BEGUN: "", CHANGED: CHANGED + BEGUN}),
    "the number counts before the rows": (kill, "part.c", {IN: "", CHANGES: IN + CHANGES}),
    "the other side counts before it is written": (
        kill,
        "part.c",
        {SWAPPED: "", CHANGES: SWAPPED + CHANGES},
    ),
    "the other side counts before the add is made": (
        kill,
        "part.c",
        {SWAPPED: "", CHANGED: SWAPPED + CHANGED},
    ),
    "the add ends before its number counts": (kill, "part.c", {IN: "", ENDED: ENDED + IN}),
    "a reader does not look again": (
        read_beside_adds,
        "part.c",
        {"memory_order_relaxed) == before) return DONE": "memory_order_relaxed)) return DONE"},
    ),
    "a reader does not see that an add is under way": (
        read_beside_adds,
        "part.c",
        {"if (before & 1) return UNSETTLED;": ""},
    ),
    "an index is used that is behind": (
        find_what_others_bring,
        "keys.c",
        {" || index->stop < stop": ""},
    ),
}


@pytest.mark.parametrize("check", [kill, read_beside_adds, find_what_others_bring])
def test_each_check_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("order", ORDERS)
def test_a_broken_order_is_noticed(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, file, changes = ORDERS[order]
    for name, function in broken_functions(f"native/{file}", changes).items():
        monkeypatch.setitem(FUNCTIONS, name, function)
    with pytest.raises(AssertionError):
        check()

"""What `make bench-step` makes of its times: standings, tables, JSON, the figure."""

from __future__ import annotations

import json

import pytest

from benchmarks.arena import Outcome, Pace
from benchmarks.contestants import CONTESTANTS, select
from benchmarks.machine import describe_machine
from benchmarks.standings import (
    IDEALS,
    TARGETS,
    Target,
    ideals,
    overheads,
    rank,
    same_bits_costs,
)
from benchmarks.step_report import Result, main_rows, report_step

PACE = Pace(rounds=3, kept=2, dropped=1, warmup=1)


# --- standings ----------------------------------------------------------------------------------


def test_a_standing_is_the_median_of_all_rounds_over_that_of_each_baseline():
    ddp, trainer = rank({"ddp": [[4.0, 8.0], [6.0]], "trainer": [[1.0, 9.0], [3.0]]})
    assert (ddp.median_s, ddp.min_s, ddp.num_steps) == (6.0, 4.0, 3)
    assert (trainer.median_s, trainer.min_s) == (3.0, 1.0)
    assert trainer.ratio_by_baseline == {"ddp": 0.5, "trainer": 1.0}
    assert ddp.ratio_by_baseline == {"ddp": 1.0, "trainer": 2.0}


@pytest.mark.parametrize(("at_most", "met"), [(0.49, False), (0.5, True), (0.6, True)])
def test_a_target_is_met_up_to_its_bound(at_most, met):
    target = Target(model="mlp", contestant="trainer", baseline="ddp", at_most=at_most)
    ddp, trainer = rank({"ddp": [[2.0]], "trainer": [[1.0]]}, [target])
    assert ddp.judged == {}
    assert [judged.met for judged in trainer.judged.values()] == [met]


def test_a_target_without_its_baseline_is_not_judged():
    target = Target(model="mlp", contestant="trainer", baseline="ddp", at_most=0.5)
    (trainer,) = rank({"trainer": [[1.0]]}, [target])
    assert trainer.judged == {}


def test_the_same_bits_cost_what_they_take_over_the_fast_mode_only():
    assert same_bits_costs(rank({"trainer-m4": [[3.0]], "ddp": [[1.0]]})) == {}
    standings = rank({"trainer": [[2.0]], "trainer-m4": [[3.0]], "trainer-m16": [[8.0]]})
    assert same_bits_costs(standings) == {4: 1.5, 16: 4.0}


@pytest.mark.parametrize(
    ("workers", "ideal_s", "ratio", "extra_s"),
    [(1, 12.0, 0.5, -6.0), (2, 6.0, 1.0, 0.0), (3, 4.0, 1.5, 2.0), (4, 3.0, 2.0, 3.0)],
)
def test_the_ideal_is_one_threads_median_shared_out(workers, ideal_s, ratio, extra_s):
    standings = rank({"single": [[4.0, 12.0], [13.0]], "dataparallel": [[6.0, 9.0], [5.0]]})
    assert ideals(standings, workers) == {"single": ideal_s}
    overhead = overheads(standings, workers)["single"]["dataparallel"]
    assert (overhead.ideal_s, overhead.median_s) == (ideal_s, 6.0)
    assert (overhead.ratio, overhead.extra_s) == (ratio, extra_s)


def test_everybody_but_the_ideals_has_an_overhead_over_each_of_them():
    seconds = {"single": 8.0, "single-cl": 4.0, "ddp": 6.0, "trainer": 3.0}
    over_ideal = overheads(rank({name: [[s]] for name, s in seconds.items()}), 2)
    ratios = {
        ideal: {name: overhead.ratio for name, overhead in by_name.items()}
        for ideal, by_name in over_ideal.items()
    }
    assert ratios == {
        "single": {"ddp": 1.5, "trainer": 0.75},
        "single-cl": {"ddp": 3.0, "trainer": 1.5},
    }


def test_where_no_ideal_ran_there_is_no_overhead():
    assert overheads(rank({"threads": [[1.0]], "trainer": [[1.0]]}), 2) == {}


def test_ideals_name_contestants_that_exist_and_are_one_of_them_for_every_model():
    assert set(IDEALS) <= set(CONTESTANTS)
    assert all(select(list(IDEALS), model)[0] == "single" for model in ("mlp", "cnn", "gpt"))


def test_targets_name_contestants_that_exist():
    for target in TARGETS:
        assert {target.contestant, target.baseline} <= set(CONTESTANTS)
        assert select([target.contestant], target.model)


# --- report -------------------------------------------------------------------------------------


def made_up_result(model="mlp", **medians_ms):
    seconds = {
        name.replace("_", "-"): [[ms / 1e3, ms / 1e3], [ms / 0.8e3]]
        for name, ms in medians_ms.items()
    }
    targets = [target for target in TARGETS if target.model == model]
    return Result(
        model=model,
        workers=2,
        outcome=Outcome(seconds=seconds, failures={"dataparallel": "It fell."}),
        standings=rank(seconds, targets),
    )


FULL = {
    "threads": 15,
    "ddp": 30,
    "trainer": 12,
    "trainer_m2": 13,
    "trainer_m4": 18,
    "trainer_m16": 30,
}


def report(*results):
    return report_step(results, describe_machine(), PACE, "")


def rows_of(sheet):
    return {row.label: row.cells for row in sheet.rows}


def test_ratios_are_judged_and_failures_named():
    found = report(made_up_result(**FULL))
    rows = rows_of(found.sheets[0])
    _, _, over_ddp, over_threads, over_trainer = rows["Trainer, 2 replicas"]
    assert (over_ddp.value, over_ddp.limit, over_ddp.met) == (pytest.approx(0.4), 0.45, True)
    assert (over_threads.met, over_trainer) == (True, 1.0)
    assert rows["Trainer, 4 microbatches"][-1].met is False
    assert not any("16 microbatches" in label for label in rows)
    assert found.failures == {"DataParallel, 2 replicas on mlp": "It fell."}


def test_the_curve_has_a_row_per_model_and_a_column_per_number_of_microbatches():
    curve = report(made_up_result(**FULL)).sheets[-1]
    assert [column.heading for column in curve.columns] == ["2", "4", "16"]
    assert rows_of(curve) == {"mlp": pytest.approx((13 / 12, 1.5, 2.5))}
    assert len(report(made_up_result(ddp=30)).sheets) == 1


def test_the_overheads_have_a_column_per_ideal_and_a_row_per_contestant_of_ours():
    mlp = made_up_result(single=20, dataparallel=18, trainer=12.5, trainer_m16=40, ddp=30)
    cnn = made_up_result("cnn", single=80, single_cl=36, trainer=20)
    ratios, extras = report(mlp, cnn).sheets[2:4]
    assert [column.heading for column in ratios.columns] == ["mlp", "cnn", "cnn\nchannels_last"]
    assert rows_of(ratios) == {
        "DataParallel, 2 replicas": (pytest.approx(1.8), None, None),
        "Trainer, 2 replicas": pytest.approx((1.25, 0.5, 10 / 9)),
    }
    assert rows_of(extras)["ideal: 1 thread's time ÷ 2"] == pytest.approx((10, 40, 18))
    assert rows_of(extras)["Trainer, 2 replicas"] == pytest.approx((2.5, -20, 2))


def test_without_the_fast_mode_all_contestants_are_rows():
    assert len(main_rows(made_up_result(trainer_m2=1, trainer_m16=2).standings)) == 2


def test_the_record_holds_every_step_and_the_pace():
    measured = json.loads(report(made_up_result(**FULL)).as_json())["measured"]
    assert measured["pace"]["dropped"] == 1
    seconds = measured["models"]["mlp"]["seconds_by_round"]
    assert set(seconds) == {name.replace("_", "-") for name in FULL}
    assert seconds["trainer"] == [[0.012, 0.012], [0.015]]


@pytest.mark.parametrize(
    "results",
    [
        [made_up_result(**FULL)],
        [made_up_result(model, **FULL) for model in ("mlp", "cnn", "gpt")],
        [made_up_result(ddp=30)],
        [made_up_result("cnn", single=30, single_cl=20, trainer=12)],
        [made_up_result()],
    ],
    ids=["one model", "all models", "no curve", "ideals", "everybody failed"],
)
def test_the_figure_is_written(results, tmp_path):
    report(*results).draw(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG\r\n")

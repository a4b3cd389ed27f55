"""What `make bench-step` makes of its times: medians, targets, tables, JSON, the figure."""

from __future__ import annotations

import json

import pytest

from benchmarks.contestants import CONTESTANTS, select
from benchmarks.machine import describe_machine
from benchmarks.report import Judged
from benchmarks.step_report import IDEALS, TARGETS, Result, report_step
from benchmarks.turns import Outcome, Pace

PACE = Pace(rounds=3, kept=2, dropped=1, warmup=1)


def result(workers=2, model="mlp", **seconds):
    named = {name.replace("_", "-"): turns for name, turns in seconds.items()}
    return Result(model=model, workers=workers, outcome=Outcome(seconds=named, failures={}))


def test_a_ratio_is_the_median_of_all_rounds_over_that_of_the_baseline():
    found = result(ddp=[[4.0, 8.0], [6.0]], trainer=[[1.0, 9.0], [3.0]])
    assert found.medians_s == {"ddp": 6.0, "trainer": 3.0}
    assert found.min_s("trainer") == 1.0
    assert (found.ratio("trainer", "ddp"), found.ratio("trainer", "threads")) == (0.5, None)


@pytest.mark.parametrize(("trainer_s", "met"), [(0.46, False), (0.45, True), (0.4, True)])
def test_a_target_is_met_up_to_its_bound_with_as_many_workers_as_it_was_set_for(trainer_s, met):
    seconds = {"ddp": [[1.0]], "trainer": [[trainer_s]]}
    judged = result(**seconds).judged("trainer", "ddp")
    assert (judged, judged.met) == (Judged(trainer_s, 0.45), met)
    assert result(workers=3, **seconds).judged("trainer", "ddp") == trainer_s
    assert result(**seconds).judged("ddp", "trainer") == 1 / trainer_s


def test_the_same_bits_cost_what_they_take_over_the_fast_mode_only():
    assert result(trainer_m4=[[3.0]], ddp=[[1.0]]).same_bits_costs == {}
    found = result(trainer=[[2.0]], trainer_m4=[[3.0]], trainer_m16=[[8.0]])
    assert found.same_bits_costs == {4: 1.5, 16: 4.0}
    assert found.main_rows == ["trainer", "trainer-m4"]
    assert len(result(trainer_m2=[[1.0]], trainer_m16=[[2.0]]).main_rows) == 2


def test_an_ideal_is_one_threads_time_shared_out_among_the_workers():
    found = result(workers=3, single=[[12.0]], single_cl=[[6.0]], ddp=[[6.0]])
    assert found.ideals_s == {"single": 4.0, "single-cl": 2.0}
    assert result(threads=[[1.0]]).ideals_s == {}


def test_ideals_and_targets_name_contestants_that_exist():
    assert set(IDEALS) <= set(CONTESTANTS)
    for (contestant, baseline), limit_by_model in TARGETS.items():
        assert {contestant, baseline} <= set(CONTESTANTS)
        assert all(select([contestant], model) for model in limit_by_model)


# --- report -------------------------------------------------------------------------------------


def made_up_result(model="mlp", **medians_ms):
    seconds = {
        name.replace("_", "-"): [[ms / 1e3, ms / 1e3], [ms / 0.8e3]]
        for name, ms in medians_ms.items()
    }
    failures = {"dataparallel": "It fell."}
    return Result(model=model, workers=2, outcome=Outcome(seconds=seconds, failures=failures))


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

"""`predict`: without stragglers and failures it is a formula, which is written out here."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from phalanx.errors import ConfigError
from phalanx.forecast import (
    Cluster,
    Faults,
    FormationCosts,
    StepCosts,
    predict,
    predict_all,
    read_costs,
)

MB = 1_000_000
OWN = FormationCosts(
    workers=(1, 2),
    empty_s=(0.001, 0.003),
    hollow_s=(0.006, 0.007),
    whole_s=(0.106, 0.117),
    restart_s=4.0,
)
COSTS = StepCosts(
    model="cnn on digits",
    rows=32,
    cores=4,
    gradient_bytes=8 * MB,
    optimizer_s=0.004,
    add_s=0.0005,
    jitter=0.0,
    formations={
        "threads": OWN,
        "processes": replace(OWN, recovery_s=0.1),
        "ranks": replace(
            OWN,
            workers=(1, 2, 3),
            empty_s=(0.001, 0.003, 0.0035),
            hollow_s=(0.006, 0.007, 0.0035 + 0.001 + 0.004 / 3 + 0.001),
            whole_s=(0.106, 0.117, 0.0035 + 0.001 + 0.004 / 3 + 0.001 + 0.11),
        ),
        "ddp": replace(OWN, hollow_s=(0.006, 0.009), whole_s=(0.106, 0.119)),
    },
)
HOST = Cluster(cores=4, workers_per_host=64)


def parts(formation, workers, cluster=HOST, **given):
    return predict(COSTS, formation, workers, cluster=cluster, **given).parts_s


def approx(*numbers):
    return pytest.approx(
        dict(zip(("compute", "latency", "bytes", "network"), numbers, strict=True))
    )


@pytest.mark.parametrize("formation", COSTS.formations)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_measured_is_what_is_predicted(formation, workers):
    found = predict(COSTS, formation, workers, cluster=HOST)
    assert found.step_s == pytest.approx(COSTS.formations[formation].whole_s[workers - 1])
    assert found.rows_per_s == pytest.approx(32 * workers / found.step_s)
    assert found.efficiency == pytest.approx(COSTS.alone_s / found.step_s)


def test_threads_add_along_the_tree_and_share_the_optimizer():
    # With two workers, 4 ms are bytes: gradients (1 ms), half of the optimizer, half an addition,
    # and a rest. Each worker costs 2 ms more.
    rest = 0.004 - 0.001 - 0.002 - 0.00025
    tree = 0.0005 + 0.0005 / 4  # one of four waits for one addition; the last is made by all
    assert parts("threads", 4) == approx(0.11, 0.001 + 3 * 0.002, 0.001 + 0.001 + tree + rest, 0.0)


def test_workers_that_share_cores_take_turns():
    rest = 0.004 - 0.001 - 0.002 - 0.00025
    tree = max(2 * 0.0005, 6 * 0.0005 / 4) + 0.0005 / 4
    assert parts("processes", 8) == approx(
        2 * 0.11, 0.001 + 7 * 0.002, 2 * 0.001 + 2 * 0.004 / 8 + tree + 2 * rest, 0.0
    )
    # DDP's workers step all parameters each.
    assert parts("ddp", 8) == approx(2 * 0.11, 2 * (0.001 + 7 * 0.002), 2 * 0.006, 0.0)


def test_each_rank_of_a_trainer_meets_all_others():
    # The third has cost 0.5 ms, and so does each one more, on whichever host.
    far = Cluster(cores=4, workers_per_host=2, bytes_per_s=1e9, latency_s=1e-4, message_s=1e-5)
    assert parts("ranks", 6)["latency"] == pytest.approx(1.5 * (0.0035 + 3 * 0.0005))
    found = parts("ranks", 6, far)
    assert found["latency"] == pytest.approx(0.0035 + 3 * 0.0005)
    sent = 8 * MB * (2 * 4 / 6 + 4 / 6)
    assert found["network"] == pytest.approx(sent / 1e9 + (4 + 2 * 2) * 1e-5 + 2 * 1e-4)


def test_ddp_crosses_the_network_once_per_host():
    far = Cluster(cores=4, workers_per_host=2, bytes_per_s=1e9, latency_s=1e-4, message_s=1e-5)
    here, there = predict(COSTS, "ddp", 2, cluster=far), predict(COSTS, "ddp", 10, cluster=far)
    assert (here.hosts, there.hosts) == (1, 5)
    assert here.parts_s["network"] == 0.0
    network = 2 * 8 * MB * 4 / 5 / 1e9 + 2 * 2 * 4 * 1e-5 + 2 * 2 * 1e-4  # in two pieces
    assert there.parts_s == pytest.approx({**here.parts_s, "network": network})


def test_microbatches_of_a_fixed_number_are_shared_out():
    # 12 microbatches of five workers: three for the busiest, and two additions of its own.
    assert parts("ranks", 3, microbatches=12)["compute"] == pytest.approx(4 * 0.11 + 3 * 0.0005)
    many = Cluster(cores=64, workers_per_host=64)
    computed = {n: parts("processes", n, many, microbatches=12)["compute"] for n in (5, 12, 40)}
    assert computed[5] == pytest.approx(3 * 0.11 + 2 * 0.0005)
    assert computed[12] == computed[40] == pytest.approx(0.11)
    found = predict(COSTS, "processes", 40, cluster=many, microbatches=12)
    assert found.rows_per_s == pytest.approx(12 * 32 / found.step_s)


def test_all_wait_for_the_slowest_of_those_who_vary():
    wide = Cluster(cores=1000, workers_per_host=1000)
    mean_s = [parts("ddp", n, wide, faults=Faults(jitter=0.2))["compute"] for n in (1, 1000)]
    assert mean_s[0] == pytest.approx(0.1 * math.exp(0.02), rel=0.05)
    # Of 1000 normal numbers the largest is 3.24 on average.
    assert mean_s[1] == pytest.approx(0.11 * math.exp(0.2 * 3.24), rel=0.03)


def test_what_one_host_cannot_hold_is_not_predicted():
    assert predict(COSTS, "threads", 65, cluster=HOST) is None
    assert predict(COSTS, "processes", 64, cluster=HOST) is not None
    found = predict_all(COSTS, ["threads", "ddp"], [1, 10_000], cluster=HOST)
    assert [(each.formation, each.workers) for each in found] == [
        ("threads", 1), ("ddp", 1), ("ddp", 10_000),
    ]  # fmt: skip


def test_failures_end_a_job_of_ranks_and_hold_up_worker_processes():
    often = Faults(failures_per_hour=3600 / 400, checkpoint_s=50.0)  # one in 100 s, of four
    rate = 1 / 100
    found = {name: predict(COSTS, name, 4, cluster=HOST, faults=often) for name in COSTS.formations}
    job = rate * 50 * math.exp(-rate * 4) / math.expm1(rate * 50)
    assert found["ranks"].share_left == pytest.approx(job, rel=0.03)
    assert found["ddp"].share_left == found["ranks"].share_left
    alone = rate / 4 * 50 * math.exp(-rate) / math.expm1(rate / 4 * 50)  # one process
    assert found["threads"].share_left == pytest.approx(alone, rel=0.03)
    # Four microbatches take three workers two rounds.
    without = predict(COSTS, "processes", 3, cluster=HOST, microbatches=4)
    speed = found["processes"].step_s / without.step_s
    substituted = (1 - (1 - speed) * -math.expm1(-4 * rate)) / (1 + 0.1 * rate)
    assert found["processes"].share_left == pytest.approx(substituted, rel=0.01)
    assert found["ddp"].efficiency == pytest.approx(
        found["ddp"].share_left * COSTS.alone_s / found["ddp"].step_s
    )


def test_the_same_arguments_give_the_same_numbers_whatever_else_is_predicted():
    faults = Faults(jitter=0.3, failures_per_hour=0.5)
    every = predict_all(COSTS, list(COSTS.formations), [3, 50], cluster=HOST, faults=faults)
    again = [
        predict(COSTS, each.formation, each.workers, cluster=HOST, faults=faults)
        for each in reversed(every)
    ]
    assert again == every[::-1]
    other = predict(COSTS, "ddp", 50, cluster=HOST, faults=faults, seed=1)
    assert other.step_s != every[-1].step_s


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: Cluster(cores=0, workers_per_host=1), "`cores` must be 1 or more, but is 0"),
        (lambda: Cluster(cores=1, workers_per_host=0), "`workers_per_host` must be 1 or more"),
        (lambda: replace(HOST, bytes_per_s=0.0), "`bytes_per_s` must be above 0 bytes per second"),
        (lambda: replace(HOST, latency_s=-1.0), "`latency_s` must be a number from 0 on"),
        (lambda: replace(HOST, message_s=math.nan), "`message_s` must be a number from 0 on"),
        (lambda: Faults(jitter=-0.1), "`jitter` must be a number from 0 on, but is -0.1"),
        (lambda: Faults(failures_per_hour=math.inf), "`failures_per_hour` must be a number"),
        (lambda: Faults(checkpoint_s=0.0), "`checkpoint_s` must be above 0 seconds, but is 0.0"),
        (lambda: predict(COSTS, "ray", 1, cluster=HOST), "`formation` must be one that was meas"),
        (lambda: predict(COSTS, "ddp", 0, cluster=HOST), "`workers` must be from 1 to 100000"),
        (lambda: parts("ddp", 1, microbatches=0), "`microbatches` must be from 1 to 100000"),
    ],
)
def test_what_makes_no_sense_is_refused(act, sentence):
    with pytest.raises(ConfigError, match=sentence):
        act()


def test_what_was_measured_survives_json():
    assert read_costs(json.loads(json.dumps(COSTS.as_json()))) == COSTS


def changed(told, path, value):
    told = json.loads(json.dumps(told))
    *outer, last = path
    place = told
    for each in outer:
        place = place[each]
    place[last] = value
    return told


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["cores"], 0, "`cores` must be 1 or more, but is 0"),
        (["cores"], 1.5, "`measured.cores` must be a whole number from 0 to 1e12, but is 1.5"),
        (["add_s"], -1, "`measured.add_s` must be a number from 0"),
        (["add_s"], math.nan, "`measured.add_s` must be a number from 0"),
        (["add_s"], True, "`measured.add_s` must be a number from 0"),
        (["model"], 3, "`measured.model` must be text, but is 3"),
        (["more"], 3, "`measured` must be an object of model, rows, .*, but has model, "),
        (["formations"], {}, "`formations` must name some of threads, .* but names none"),
        (["formations"], [], r"`formations` must be an object, but is \[\]"),
        (["formations", "ray"], COSTS.as_json()["formations"]["ddp"], "but names ray"),
        (["formations", "ddp"], 3, "`formations.ddp` must be an object of workers, .* but is 3"),
        (["formations", "ddp", "empty_s"], 3, "`formations.ddp.empty_s` must be a list of numb"),
        (["formations", "ddp", "empty_s"], [1], "`empty_s` must hold one number for each of"),
        (["formations", "ddp", "workers"], [2, 1], "`workers` must hold 1 and at least one larg"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(path, value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read_costs(changed(COSTS.as_json(), path, value))

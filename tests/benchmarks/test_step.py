"""`make bench-step`, its arena and contestants: nothing here depends on how fast anything is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks import arena as arena_module
from benchmarks import step as step_module
from benchmarks.__main__ import app as bench_app
from benchmarks.arena import Arena, Entrant, Pace, compete
from benchmarks.contestants import (
    CODECS,
    CONTESTANTS,
    StepJob,
    build,
    by_default,
    entrant,
    loss_of,
    select,
)
from phalanx import DataParallel, ModelParallel, unsplit
from phalanx.clock import now_s
from phalanx.errors import ConfigError, PeerLost
from phalanx.ipc import ProcessIdentity

# --- stand-ins for contestants: the arena's protocol in a few lines, without torch --------------

# Asked for n steps, its times are 0, 1, …, n-1 seconds.
STEADY = """
import json, sys
print([], flush=True)
for line in sys.stdin:
    print(json.dumps(list(range(int(line)))), flush=True)
"""
DEAF = "import sys\nprint([], flush=True)\nsys.stdin.read()\n"
DIES_AT_SETUP = "import sys\nprint('no such layout', file=sys.stderr)\nsys.exit(3)\n"
DIES_AT_WORK = (
    "import os, sys\nprint([], flush=True)\nsys.stdin.readline()\n"
    "print('out of cheese', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)\n"
)
STAYS = "import signal\nprint([], flush=True)\nwhile True: signal.pause()\n"

PACE = Pace(rounds=3, kept=2, dropped=1, warmup=1)


def stub(name, *programs):
    return Entrant(name=name, commands=tuple((sys.executable, "-c", text) for text in programs))


def is_alive(pid):
    """Say whether a process runs; one that has ended and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")


# --- the arena ----------------------------------------------------------------------------------


def test_each_turn_keeps_its_last_steps():
    outcome = compete([stub("a", STEADY), stub("b", STEADY, STEADY)], PACE)
    assert outcome.failures == {}
    assert outcome.seconds == {"a": [[1.0, 2.0]] * 3, "b": [[1.0, 2.0]] * 3}


@pytest.mark.parametrize(("num_steps", "rounds"), [(1, 1), (3, 1), (4, 2), (30, 10), (31, 11)])
def test_a_pace_keeps_at_least_the_steps_asked_for(num_steps, rounds):
    pace = Pace.for_steps(num_steps)
    assert pace.rounds == rounds
    assert pace.rounds * pace.kept >= num_steps


@pytest.mark.parametrize(
    ("warm", "dropped"),
    [([], 2), ([0.0], 2), ([9.0, 0.01, 0.011], 14), ([0.2], 2), ([1e-6], 100)],
)
def test_steps_are_dropped_until_the_cores_have_settled(warm, dropped):
    assert Pace(rounds=1, settle_s=0.15).num_dropped(warm) == dropped


def test_every_round_has_everybody_once_and_rounds_differ_in_order():
    turns = []
    compete([stub(name, STEADY) for name in "abcde"], PACE, lambda *turn: turns.append(turn))
    stages = [turns[i : i + 5] for i in range(0, len(turns), 5)]
    assert [stage[0][1] for stage in stages] == [
        "setting up",
        "warming up",
        "round 1 of 3",
        "round 2 of 3",
        "round 3 of 3",
    ]
    orders = {tuple(name for name, _ in stage) for stage in stages}
    assert {tuple(sorted(order)) for order in orders} == {tuple("abcde")}
    assert len(orders) > 1


def test_only_one_contestant_is_at_work_at_a_time(tmp_path):
    log = tmp_path / "log"
    working = f"""
import json, os, sys
log = os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print([], flush=True)
for line in sys.stdin:
    os.write(log, b"NAME begins\\n")
    times = [float(sum(range(20000))) for _ in range(int(line))]
    os.write(log, b"NAME ends\\n")
    print(json.dumps(times), flush=True)
"""
    programs = {name: working.replace("NAME", name) for name in "abc"}
    compete([stub(name, text, text) for name, text in programs.items()], PACE)
    lines = log.read_text().splitlines()
    turns = [lines[i : i + 4] for i in range(0, len(lines), 4)]  # two processes, two lines each
    assert len(turns) == 3 * (PACE.rounds + 1)
    assert all(len({line.split()[0] for line in turn}) == 1 for turn in turns)


@pytest.mark.parametrize(
    ("program", "end", "words"),
    [(DIES_AT_SETUP, "exit code 3", "no such layout"), (DIES_AT_WORK, "signal 9", "out of cheese")],
)
def test_a_dead_contestant_is_out_with_its_last_words_and_the_others_go_on(program, end, words):
    outcome = compete([stub("a", STEADY), stub("dying", program), stub("z", STEADY)], PACE)
    assert outcome.seconds == {"a": [[1.0, 2.0]] * 3, "z": [[1.0, 2.0]] * 3}
    assert set(outcome.failures) == {"dying"}
    assert end in outcome.failures["dying"]
    assert words in outcome.failures["dying"]


def test_the_process_that_died_is_named_and_not_the_one_that_waits_for_it():
    with Arena([stub("pair", DEAF, DIES_AT_WORK)]) as arena:
        arena.greet("pair")
        with pytest.raises(PeerLost, match="process 1 of 2 ended") as caught:
            arena.run("pair", 1)
    assert caught.value.rank == 1


def test_a_silent_contestant_is_out_when_patience_ends():
    outcome = compete([stub("deaf", STEADY, DEAF)], Pace(rounds=1, patience_s=2.0))
    assert outcome.seconds == {}
    assert "must answer within 2 s, but process 1 of 2 did not" in outcome.failures["deaf"]


@needs_proc
def test_no_child_is_left_when_all_is_done():
    with Arena([stub("a", STEADY), stub("b", STEADY, STEADY)]) as arena:
        pids = arena.pids
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)
    arena.close()  # again


@needs_proc
def test_no_child_is_left_after_an_interrupt(monkeypatch):
    opened = []
    monkeypatch.setattr(
        arena_module,
        "Arena",
        lambda *args, **words: opened.append(Arena(*args, **words)) or opened[0],
    )
    pids = []

    def interrupt(name, doing):
        if doing.startswith("round"):
            pids.extend(opened[0].pids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compete([stub("a", STEADY), stub("b", STEADY)], PACE, interrupt)
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


@needs_proc
def test_a_child_that_does_not_heed_the_end_of_its_input_is_killed(monkeypatch):
    monkeypatch.setattr(arena_module, "_GRACE_S", 0.1)
    with Arena([stub("stays", STAYS)]) as arena:
        arena.greet("stays")
        pids = arena.pids
    assert not any(is_alive(pid) for pid in pids)


@needs_proc
def test_who_is_not_at_work_is_stopped():
    """A contestant whose threads go on by themselves takes nothing from the others."""
    with Arena([stub("pair", STEADY, STEADY), stub("other", STEADY)]) as arena:
        for name in ("pair", "other"):
            arena.greet(name)
        for name in ("other", "pair", "other"):
            assert arena.run(name, 2) == [0.0, 1.0]
            until_s = now_s() + 30
            while not all(ProcessIdentity.of(pid).stopped() for pid in arena.pids):
                assert now_s() < until_s


@needs_proc
def test_children_end_with_a_controller_that_is_killed():
    attends = """
from contextlib import nullcontext
from benchmarks.arena import attend
attend(nullcontext(lambda number: [1.0] * number))
"""
    controller = f"""
from benchmarks.arena import Arena, Entrant
import sys
entrant = Entrant(name="a", commands=((sys.executable, "-c", {attends!r}),) * 2)
with Arena([entrant]) as arena:
    arena.greet("a")
    print(*arena.pids, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", controller],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        watched = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(signal.SIGKILL)
        process.wait()
    ended = [arena_module.selectors.DefaultSelector() for _ in pids]
    for selector, file in zip(ended, watched, strict=True):
        selector.register(file, arena_module.selectors.EVENT_READ)
        assert selector.select(timeout=30), "a child outlived its controller"
        selector.close()
        os.close(file)


def test_children_do_not_inherit_the_callers_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    asks = "import os\nprint([float('OMP_NUM_THREADS' in os.environ)], flush=True)\ninput()\n"
    with Arena([stub("asks", asks)]) as arena:
        assert arena.greet("asks") == [0.0]


def test_what_a_contestant_prints_is_not_taken_for_an_answer():
    chatty = """
import contextlib, os
from benchmarks.arena import serve
@contextlib.contextmanager
def open_step():
    print("hello")
    yield lambda: os.write(1, b"step\\n")
serve(open_step())
"""
    outcome = compete([stub("chatty", chatty)], PACE)
    assert outcome.failures == {}
    assert [len(turn) for turn in outcome.seconds["chatty"]] == [2, 2, 2]
    assert all(second >= 0 for turn in outcome.seconds["chatty"] for second in turn)


# --- contestants --------------------------------------------------------------------------------


def test_contestants_come_in_one_order_and_only_where_they_belong():
    assert select(["trainer", "ddp-cl", "ddp"], "cnn") == ["ddp", "ddp-cl", "trainer"]
    assert select(["trainer", "ddp-cl", "ddp"], "mlp") == ["ddp", "trainer"]


@pytest.mark.parametrize(
    ("names", "model", "message"),
    [
        (["horovod"], "mlp", r"`--contestants` must be of single, .*, but has 'horovod'"),
        (["ddp"], "bert", r"`--models` must be of mlp, cnn, gpt, but has 'bert'"),
        (["ddp-cl"], "mlp", r"must name at least one that competes on 'mlp'"),
    ],
)
def test_unknown_names_are_refused(names, model, message):
    with pytest.raises(ConfigError, match=message):
        select(names, model)


def test_a_contestant_over_processes_has_one_command_per_worker():
    command = entrant("ddp", "tiny", workers=3, folder="meet").commands
    jobs = [StepJob(**json.loads(words[-1])) for words in command]
    assert [job.rank for job in jobs] == [0, 1, 2]
    assert len({job.meeting_point for job in jobs}) == 1
    assert len(entrant("trainer", "tiny", workers=3, folder="meet").commands) == 1


def test_all_run_by_default_but_those_that_do_other_work():
    others = {"dataparallel-fp16", "dataparallel-one-bit", "dataparallel-top-k", "ddp-meet"}
    assert set(CONTESTANTS) - set(by_default()) == others
    assert set(select(sorted(others), "gpt")) == others


@pytest.mark.parametrize("name", [*by_default(), "ddp-meet"])
def test_every_contestant_does_the_same_job(name, tmp_path):
    """All sum the same gradient, in another order: three float32 steps agree within 1e-6."""
    model = "tiny" if "tiny" in (CONTESTANTS[name].models or {"tiny"}) else "cnn"
    module, (inputs, targets) = build(model)
    if model == "cnn":  # without its normalization: its statistics are those of each rank's slice
        module.eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(module(inputs), targets).backward()
        optimizer.step()

    if CONTESTANTS[name].process_per_worker:
        trained = trained_in_a_process(name, model, tmp_path, training=module.training)
    else:
        trained = trained_by(
            name, model, str(tmp_path / "meet"), workers=2, training=module.training
        )
    for (key, theirs), ours in zip(module.named_parameters(), trained, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=key)


def trained_by(name, model, meeting_point, *, workers, training, done=lambda trained: trained):
    job = StepJob(contestant=name, model=model, workers=workers, meeting_point=meeting_point)
    module, batch = build(model)
    module.train(training)
    with CONTESTANTS[name].open(job, module, batch) as step:
        for _ in range(3):
            step()
        return done([parameter.detach().clone() for parameter in parameters_of(module)])


def parameters_of(module):
    """Return the parameters as before layers were cut into columns."""
    for name, child in list(module.named_children()):
        if isinstance(child, ModelParallel):
            module.register_module(name, unsplit(child))
    return module.parameters()


@pytest.mark.parametrize("codec", CODECS)
def test_a_contestant_with_a_codec_is_data_parallel_with_that_codec(codec, tmp_path):
    name = "dataparallel-" + codec.replace("_", "-")
    module, (inputs, targets) = build("tiny")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with DataParallel(module, devices=["cpu"] * 3, codec=codec) as parallel:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(parallel(inputs), targets).backward()
            optimizer.step()
    trained = trained_by(name, "tiny", "", workers=3, training=True)
    plain = trained_by("dataparallel", "tiny", "", workers=3, training=True)
    assert all(map(torch.equal, trained, module.parameters()))
    assert not all(map(torch.equal, trained, plain))


def test_columns_are_put_in_the_place_of_all_linear_layers_but_the_last():
    module, batch = build("mlp")
    linear = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    job = StepJob(contestant="modelparallel", model="mlp", workers=3)
    with CONTESTANTS["modelparallel"].open(job, module, batch):
        kinds = [type(module.get_submodule(name)) for name in linear]
        columns = module.get_submodule(linear[0])
        assert kinds == [ModelParallel, ModelParallel, nn.Linear]
        assert [columns.get(index).out_features for index in range(3)] == [342, 341, 341]


def trained_in_a_process(name, model, folder, *, training):
    """Train apart: at their end gloo's threads and DDP's reducer may lock each other out."""
    out = folder / "weights.pt"
    code = (
        "import os, torch\n"
        "from tests.benchmarks.test_step import trained_by\n"
        "def done(trained):\n"
        f"    torch.save(trained, {str(out)!r})\n"
        "    os._exit(0)\n"
        f"trained_by({name!r}, {model!r}, {str(folder / 'meet')!r}, workers=1, "
        f"training={training}, done=done)\n"
    )
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), str(root / "src")])
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
        check=True,
    )
    return torch.load(out, weights_only=True)


# --- the command --------------------------------------------------------------------------------


def run_step(*words):
    return CliRunner().invoke(bench_app, ["step", *words])


def test_the_command_measures_real_processes_and_writes_its_files(tmp_path):
    result = run_step(
        "--models=tiny", "--steps=4", "--contestants=single,ddp", f"--out={tmp_path / 'a' / 'b'}"
    )
    assert result.exit_code == 0, result.output
    assert f"torch {torch.__version__}" in result.output
    report = json.loads((tmp_path / "a" / "b" / "step.json").read_text())
    seconds = report["measured"]["models"]["tiny"]["seconds_by_round"]
    assert list(seconds) == ["single", "ddp"]
    assert all(len(turns) == 2 and sum(map(len, turns)) >= 4 for turns in seconds.values())
    assert (tmp_path / "a" / "b" / "step.png").exists()


def test_a_failed_contestant_is_shown_and_the_command_says_so_at_the_end(tmp_path, monkeypatch):
    program = {"single": STEADY, "trainer": DIES_AT_SETUP}
    monkeypatch.setattr(step_module, "entrant", lambda name, *_, **__: stub(name, program[name]))
    result = run_step(
        "--models=mlp", "--steps=1", "--contestants=trainer,single", f"--out={tmp_path}"
    )
    assert result.exit_code == 1
    assert "Trainer, 2 replicas on mlp failed." in result.output
    assert "no such layout" in result.output
    report = json.loads((tmp_path / "step.json").read_text())
    assert list(report["measured"]["models"]["mlp"]["seconds_by_round"]) == ["single"]


def test_the_command_runs_all_without_a_codec(tmp_path, monkeypatch):
    monkeypatch.setattr(step_module, "entrant", lambda name, *_, **__: stub(name, STEADY))
    result = run_step("--models=cnn", "--steps=1", f"--out={tmp_path}")
    assert result.exit_code == 0, result.output
    models = json.loads((tmp_path / "step.json").read_text())["measured"]["models"]
    assert list(models["cnn"]["seconds_by_round"]) == select(by_default(), "cnn")


@pytest.mark.parametrize("word", ["--models=bert", "--models=,", "--contestants=horovod"])
def test_what_cannot_be_measured_is_refused_before_anything_runs(word, tmp_path):
    result = run_step(word, f"--out={tmp_path / 'out'}")
    assert isinstance(result.exception, ConfigError)
    assert word.partition("=")[0] in str(result.exception)
    assert not (tmp_path / "out").exists()

"""`phalanx train` from the command line to the run folder, with what can go wrong in between."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.cli import session
from phalanx.cli.app import main
from phalanx.cli.data import open_data
from phalanx.cli.models import build_model
from phalanx.cli.train import stopped_by_signals
from phalanx.train import Trainer
from tests.multiprocess.fork_server import context

pytestmark = pytest.mark.promise("command-line")

PATIENCE_S = 60.0  # for another process, on a busy machine
FAST = ("--model", "mlp", "--replicas", "1", "--batch-size", "256")

OWN_CODE = """
import os
import pathlib
import random
import signal
import threading
import numpy
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, 10)
        )

class Broken(Net):
    def forward(self, x):
        raise ArithmeticError("my own mistake")

class Stuck(Net):
    def forward(self, x):
        print("in forward", flush=True)
        threading.Event().wait()

class Interrupted(Net):
    num_calls = 0

    def forward(self, x):
        Interrupted.num_calls += 1
        signals = pathlib.Path("signal")
        if Interrupted.num_calls == 28 and signals.exists():
            os.kill(os.getpid(), int(signals.read_text()))
        return super().forward(x)

class Failing(Net):
    num_calls = 0

    def forward(self, x):
        Failing.num_calls += 1
        fault = pathlib.Path("fault")
        outputs = super().forward(x)
        if Failing.num_calls == 28 and fault.exists():
            if fault.read_text() == "full":
                pathlib.Path("failed/checkpoint").write_text("where a folder should be")
            outputs = outputs * {"nan": float("nan")}[fault.read_text()]
        return outputs

class Noisy(torch.utils.data.Dataset):
    num_classes = 3

    def __len__(self):
        return 24

    def __getitem__(self, place):
        noise = random.random() + float(numpy.random.rand())
        return noise + torch.randn(1, 8, 8), torch.tensor(place % 3)

class Stream:
    def __iter__(self):
        yield from [(torch.ones(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2]))] * 3

class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from [(torch.ones(1, 8, 8), torch.tensor(1))] * 18
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Work in a folder of the test's own, with a user's module in it."""
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("own_code", None)


def draw_nothing(history: object, *, title: str, path: Path) -> None:
    path.write_bytes(b"")


@pytest.fixture
def pictures() -> None:
    """Let a test's runs draw theirs, which takes longer than to train."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(session, "draw_training", draw_nothing)


@pytest.fixture
def phalanx(monkeypatch, capsys):
    """Return a function that runs a command line in this process: (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["phalanx", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory) -> Path:
    """Train for an epoch, once for all tests that begin with a run that has finished."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    words = ["phalanx", "train", *FAST, "--epochs", "1", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", words)
        patch.setattr(session, "draw_training", draw_nothing)
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return folder


@pytest.fixture
def finished(own_folder, finished_once) -> None:
    """Put a run that has finished its one epoch into the folder ``run``."""
    shutil.copytree(finished_once, "run")


def be_the_command(folder: str, words: tuple[str, ...], output: Connection) -> None:
    sys.stdout = sys.stderr = os.fdopen(os.dup(output.fileno()), "w", encoding="utf-8")
    output.close()
    os.chdir(folder)
    session.draw_training = draw_nothing
    sys.argv = ["phalanx", *words]
    main()


class Command:
    """The command in a process of its own: a fork, as what Python does before `main` is no test."""

    def __init__(self, *words: str) -> None:
        ours, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=be_the_command, args=(os.getcwd(), words, theirs))
        self.process.start()
        theirs.close()
        self.output = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()
        self.late = threading.Timer(PATIENCE_S, self.process.kill)
        self.late.start()

    def until(self, words: str) -> str:
        """Return what it prints, up to the line that has ``words``."""
        said = ""
        for line in self.output:
            said += line
            if words in line:
                return said
        pytest.fail(f"ended with {self.ended()} before it said {words!r}: {said}")

    def ended(self, within_s: float | None = None) -> int | None:
        """Return its exit code when it has ended, or None if it has not ``within_s``."""
        self.process.join(within_s)
        return self.process.exitcode

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        self.late.cancel()
        self.process.kill()  # in vain if all is well
        self.process.join()
        self.output.close()


def run_to_its_end(*words: str) -> tuple[int | None, str]:
    """Run the command in a process of its own: (exit code, what it printed)."""
    with Command(*words) as command:
        said = command.output.read()
        return command.ended(), said


def metrics_of(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def files_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


# --- training -------------------------------------------------------------------------------------


def test_the_seed_decides_what_a_data_set_draws(phalanx):
    losses = []
    for replicas, seed in ((1, 5), (2, 5), (1, 6)):
        words = ["--data", "own_code:Noisy", "--batch-size", 6, "--microbatches", 2]
        words += ["--model", "mlp"]
        folder = f"run-{replicas}-{seed}"
        more = ["--replicas", replicas, "--seed", seed, "--epochs", 1, "--out", folder]
        code, _, err = phalanx("train", *words, *more)
        assert (code, err) == (0, "")
        losses.append([each["loss"] for each in metrics_of(folder) if "loss" in each])
    assert losses[0] == losses[1] != losses[2]


def test_a_training_leaves_everything_in_its_folder(phalanx, pictures):
    code, out, err = phalanx("train", *FAST, "--epochs", 2, "--microbatches", 2)
    assert (code, err) == (0, "")
    folder = Path("runs/digits-mlp-001")
    assert files_in(folder) == {
        "checkpoint", "config.json", "metrics.jsonl", "model.safetensors", "training.png"
    }  # fmt: skip
    records = metrics_of(folder)
    assert [record["step"] for record in records if record["kind"] == "step"] == [*range(1, 13)]
    assert [record["last_step"] for record in records if record["kind"] == "epoch"] == [6, 12]
    rates = [record["learning_rates"] for record in records if record["kind"] == "step"]
    assert rates == [[pytest.approx(rates[0][0] * (1 - step / 12))] for step in range(12)]
    assert {*records[-1]["train"]} == {*records[-1]["validation"]} == {"loss", "accuracy"}
    config = json.loads((folder / "config.json").read_text())
    assert config["options"]["microbatches"] == 2
    assert config["configuration"] == {"devices": ["cpu"], "intra_op": 1}
    assert config["versions"]["torch"] == torch.__version__
    for words in ("1442 training", "epoch 1/2: loss", "epoch 2/2: loss", "samples/s", "replica 0"):
        assert words in out
    assert str(folder) in out


def test_a_trace_holds_the_steps_of_all_epochs(phalanx):
    code, out, err = phalanx("train", *FAST, "--epochs", 2, "--trace", "--out", "run")
    assert (code, err) == (0, "")
    assert "Open run/trace.json in https://ui.perfetto.dev" in out
    events = json.loads(Path("run/trace.json").read_text())["traceEvents"]
    names = {each["name"] for each in events if each["ph"] in "Xi"}
    assert {f"step {step}" for step in range(1, 13)} <= names
    Path("run/trace.json").write_text("my own")
    code, _, err = phalanx("train", "--resume", "run", "--epochs", 3, "--trace")
    assert code == 2
    assert "must be a new file or an earlier trace" in err
    assert Path("run/trace.json").read_text() == "my own"


@pytest.mark.parametrize("umask", [0o027, pytest.param(0o002, marks=pytest.mark.night)], ids=oct)
def test_every_file_has_the_mode_that_the_user_wants(phalanx, umask, pictures):
    before = os.umask(umask)
    try:
        assert phalanx("train", *FAST, "--epochs", 1)[0] == 0
    finally:
        os.umask(before)
    files = [path for path in Path("runs").rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "training.png"} <= {path.name for path in files}
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(0o666 & ~umask)}


def test_the_weights_fit_the_plain_model_and_classify_as_it_was_said(phalanx):
    code, _, _ = phalanx("train", *FAST, "--epochs", 4, "--out", "run")
    assert code == 0
    data = open_data("digits", batch_size=1000, seed=0)
    module = build_model("mlp", data, seed=1)
    module.load_state_dict(load_file("run/model.safetensors"))
    ((inputs, targets),) = data.test
    accuracy = (module(inputs).argmax(1) == targets).float().mean().item()
    assert accuracy == pytest.approx(metrics_of("run")[-1]["validation"]["accuracy"], abs=1e-6)
    assert accuracy > 0.5


def test_workloads_and_devices_are_passed_on(phalanx):
    words = ("--replicas", "cpu,cpu", "--workloads", "3,1", "--batch-size", "64")
    words += ("--microbatches", "0")
    words += ("--model", "own_code:Net")
    code, _, _ = phalanx("train", "--epochs", 1, "--out", "run", *words)
    assert code == 0
    assert metrics_of("run")[0]["shares"] == [48, 16]


def test_automatic_replicas_are_printed_and_kept(phalanx):
    own = ("--model", "own_code:Net")
    words = (*own, "--batch-size", 256, "--replicas", "auto")
    code, out, _ = phalanx("train", *words, "--epochs", 1, "--out", "run")
    assert code == 0
    assert out.count("× 1 thread") == 1
    chosen = json.loads(Path("run/config.json").read_text())["configuration"]
    code, out, _ = phalanx("train", "--resume", "run", *own, "--epochs", 2)
    assert code == 0
    assert json.loads(Path("run/config.json").read_text())["configuration"] == chosen


def test_text_is_trained_with_a_perplexity_and_without_an_accuracy(phalanx):
    Path("text").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 60)
    code, out, _ = phalanx("train", "--data", "text:text", "--replicas", 1, "--batch-size", 16)
    assert code == 0
    assert "perplexity" in out
    assert "accuracy" not in out
    assert "accuracy" not in metrics_of("runs/text-text-gpt-001")[-1]["train"]


@pytest.mark.parametrize("name", ["Stream", "Rows"])
def test_a_loader_of_ones_own_may_have_no_length_and_no_test(phalanx, name):
    words = ("--data", f"own_code:{name}", "--model", "own_code:Net", "--replicas", 2)
    words += ("--microbatches", 2, "--batch-size", 6)
    code, out, err = phalanx("train", *words, "--epochs", 2)
    assert (code, err) == (0, "")
    records = metrics_of(f"runs/own_code-{name}-own_code-Net-001")
    assert [record["kind"] for record in records] == (["step"] * 3 + ["epoch"]) * 2
    assert records[-1]["validation"] is None
    assert "epoch 2/2: loss" in out


# --- stopping and going on ------------------------------------------------------------------------


BY_NIGHT = [pytest.param(each, marks=pytest.mark.night) for each in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("number", [signal.SIGINT, *BY_NIGHT])
def test_a_stopped_training_goes_on_to_the_same_bits_on_other_replicas(phalanx, number):
    words = ("--model", "own_code:Interrupted", "--microbatches", "3", "--batch-size", "64")
    words += ("--seed", "5", "--epochs", "2")
    # The model sends the signal itself, in the middle of step 10: no race with the test.
    Path("signal").write_text(str(int(number)))
    code, said, err = phalanx("train", *words, "--replicas", 1, "--out", "stopped")
    assert (code, err) == (130, "")
    assert "Stopped after step 10, in epoch 1 of 2" in said
    assert "phalanx train --resume stopped --model own_code:Interrupted\n" in said
    assert files_in("stopped") == {"checkpoint", "config.json", "metrics.jsonl", "training.png"}
    Path("signal").unlink()

    code, _, err = phalanx("train", "--resume", "stopped", *words[:2], "--replicas", 3)
    assert (code, err) == (0, "")
    phalanx("train", *words, "--replicas", 2, "--out", "twin")
    stopped, twin = load_file("stopped/model.safetensors"), load_file("twin/model.safetensors")
    assert all(torch.equal(stopped[name], twin[name]) for name in twin)
    ours, theirs = metrics_of("stopped"), metrics_of("twin")
    assert [record["kind"] for record in ours] == [record["kind"] for record in theirs]
    for one, other in zip(ours, theirs, strict=True):
        if one["kind"] == "step":
            assert one["loss"] == other["loss"]
        else:
            assert one["train"]["loss"] == other["train"]["loss"]
            assert one["validation"] == other["validation"]


@pytest.mark.parametrize(
    ("fault", "returned"), [("nan", 2), pytest.param("another", 1, marks=pytest.mark.night)]
)
def test_what_was_done_before_a_step_that_failed_is_saved(phalanx, fault, returned):
    words = ("--model", "own_code:Failing", "--microbatches", "3", "--batch-size", "64")
    words += ("--seed", "5", "--epochs", "1")
    Path("fault").write_text(fault)  # the model's, in the middle of step 10
    code, said = run_to_its_end("train", *words, "--replicas", "1", "--out", "failed")
    assert code == returned, said
    assert "Saved after step 9. Continue with:" in said
    assert "phalanx train --resume failed --model own_code:Failing\n" in said
    assert ("KeyError: 'another'" in said) == (returned == 1)
    assert "In step 10: batch 10 of epoch 1." in said
    Path("fault").unlink()

    code, _, err = phalanx("train", "--resume", "failed", *words[:2], "--replicas", 2)
    assert (code, err) == (0, "")
    phalanx("train", *words, "--replicas", 2, "--out", "twin")
    failed, twin = load_file("failed/model.safetensors"), load_file("twin/model.safetensors")
    assert all(torch.equal(failed[name], twin[name]) for name in twin)


def test_what_cannot_be_saved_before_a_step_that_failed_is_told(phalanx):
    Path("fault").write_text("full")
    words = ("--model", "own_code:Failing", "--microbatches", "3", "--batch-size", "64")
    code, said = run_to_its_end("train", *words, "--replicas", "1", "--out", "failed")
    assert code == 1, said
    assert "KeyError: 'full'\n" in said
    assert "What came after step 0 is not saved: " in said


def test_an_error_is_told_though_saving_raises_another(phalanx, monkeypatch):
    def save(trainer: Trainer, folder: Path) -> None:
        raise MemoryError(f"no room for step {trainer.steps} in {folder}")

    monkeypatch.setattr(Trainer, "save", save)
    Path("fault").write_text("nan")
    words = ("--model", "own_code:Failing", "--microbatches", "3", "--batch-size", "64")
    code, _, err = phalanx("train", *words, "--replicas", 1, "--out", "failed")
    assert code == 2
    assert "What came after step 0 is not saved: MemoryError: no room for step 9 in " in err


def test_a_hanging_step_can_be_left_by_another_signal():
    words = ("--replicas", "1", "--model", "own_code:Stuck", "--out", "run")
    with Command("train", *words) as command:
        said = command.until("in forward")
        # Python notices a signal that comes just before it begins to wait only with the next one,
        # so two are enough most of the time and three always.
        for _ in range(3):
            os.kill(command.process.pid, signal.SIGINT)
            if command.ended(within_s=1.0) is not None:
                break
        command.process.kill()  # in vain if all is well
        said += command.output.read()
        assert command.ended() == -signal.SIGINT
    assert "Finishing the step, then saving. Ctrl-C again stops at once." in said


def test_a_run_goes_on_behind_its_end_though_its_picture_cannot_be_written(
    phalanx, finished, pictures
):
    before = load_file("run/model.safetensors")
    Path("run/training.png").unlink()
    Path("run/training.png").mkdir()  # where nobody can write a file
    code, out, _ = phalanx("train", "--resume", "run", "--epochs", 2)
    assert code == 0
    assert "continuing after step 6" in out
    assert "training.png is not written: " in out
    after = load_file("run/model.safetensors")
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert sum(record["kind"] == "step" for record in metrics_of("run")) == 12


def test_a_finished_run_says_how_to_go_on(phalanx, finished):
    code, _, err = phalanx("train", "--resume", "run")
    assert code == 2
    assert "`--epochs` must be more than the 1 that the run in run has finished" in err


def test_a_run_cannot_end_before_an_epoch_that_it_is_in(phalanx):
    Path("signal").write_text(str(int(signal.SIGINT)))  # in the middle of epoch 2
    words = ("--model", "own_code:Interrupted", "--microbatches", 3, "--batch-size", 256)
    code, out, _ = phalanx("train", *words, "--epochs", 3, "--replicas", 1, "--out", "run")
    assert (code, "in epoch 2 of 3" in out) == (130, True)
    before = files_in("run")
    code, _, err = phalanx("train", "--resume", "run", *words[:2], "--epochs", 1)
    assert code == 2
    assert "`--epochs` must be at least the 2 that the run in run has begun, but is 1" in err
    assert files_in("run") == before  # no weights of an epoch's middle as those of a finished run


def test_a_run_that_shall_outlive_its_terminal_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stopped_by_signals(lambda: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_as_they_were_afterwards():
    def mine(number, frame):
        pytest.fail("the handler of before was called")

    before = signal.signal(signal.SIGINT, mine)
    try:
        stops = []
        with stopped_by_signals(lambda: stops.append(1)):
            signal.raise_signal(signal.SIGINT)
            assert stops == [1]
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--epochs", "0"), "`--epochs` must be 1 or more"),
        (("--replicas", "none"), "must hold names such as 'cpu'"),
        (("--replicas", "2", "--workloads", "1"), "must hold one share per replica (2)"),
        (("--data", "mnist"), "Data must be `digits`"),
        (("--model", "lstm"), "Model must be `mlp`"),
        (("--model", "gpt"), "Model `gpt` must be given tokens"),
        (("--resume", "nowhere"), "`--resume` must name the folder of a run"),
        (("--resume", "nowhere", "--out", "there"), "`--out` must be left out with `--resume`"),
    ],
)
def test_what_cannot_work_is_one_message_and_leaves_nothing(phalanx, words, message):
    code, out, err = phalanx("train", *words)
    assert code == 2
    assert err.startswith("Error: ")
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert files_in(".") <= {"own_code.py", "__pycache__"}


def test_a_folder_with_something_in_it_is_refused_before_anything_is_done(phalanx):
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("mine")
    code, out, err = phalanx("train", "--data", "text:/nowhere", "--out", "run")
    assert (code, out) == (2, "")
    assert "`--out` must be a new or empty folder, but run holds files already" in err
    assert files_in("run") == {"thesis.txt"}


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--seed", "1"), "--seed"),
        (("--model", "cnn"), "--model"),
        (("--data", "text:x"), "--data"),
        (("--batch-size", "3"), "--batch-size"),
    ],
)
def test_what_a_run_began_with_cannot_be_changed(phalanx, words, flag, finished):
    before = Path("run/metrics.jsonl").read_bytes()
    code, _, err = phalanx("train", "--resume", "run", "--epochs", 2, *words)
    assert code == 2
    assert f"`{flag}` must be what the run in run began with" in err
    assert Path("run/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["data", "model", "loss", "forward"])
def test_code_that_a_run_folder_names_is_not_run(phalanx, monkeypatch, name, finished):
    config = json.loads(Path("run/config.json").read_text())
    config["options"][name] = "evil:Net"
    Path("run/config.json").write_text(json.dumps(config))
    Path("run/evil.py").write_text("from pathlib import Path\nPath('evil was here').touch()")
    before = files_in("run")
    monkeypatch.chdir("run")
    code, out, err = phalanx("train", "--resume", ".", "--epochs", 2)
    assert (code, out) == (2, "")
    assert f"`--{name}` must be given again with `--resume`" in err
    assert f"add --{name} evil:Net" in err
    assert files_in(".") == before


def test_a_failing_model_arrives_with_its_own_traceback_and_leaves_no_folder():
    words = ("--model", "own_code:Broken", "--replicas", "1", "--out", "run")
    code, said = run_to_its_end("train", *words)
    assert code == 1, said
    assert "Traceback" in said
    assert "ArithmeticError: my own mistake" in said
    assert "replica 0" in said.split("ArithmeticError: my own mistake")[1]
    assert not Path("run").exists()


# --- the rest of the command ----------------------------------------------------------------------


def test_the_version_is_shown(phalanx):
    code, out, _ = phalanx("--version")
    assert code == 0
    assert out.startswith("phalanx ")
    assert torch.__version__ in out


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("-h",)])
def test_help_is_there(phalanx, words):
    code, out, _ = phalanx(*words)
    assert code == 0
    assert "Usage: phalanx" in out


def test_help_is_wrapped_for_the_terminal_and_not_as_in_the_source(phalanx, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = phalanx("launch", "--help")
    lines = [line.strip() for line in out.splitlines()]
    assert "has the cores divided by the ranks as threads, unless OMP_NUM_THREADS says" in lines

"""`phalanx train`, `resume`, `evaluate` and `predict`, and how a training may end."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from phalanx.cli.app import main
from phalanx.cli.console import stopped_by_signals
from phalanx.cli.data import open_data
from phalanx.cli.models import build_model
from tests.multiprocess.fork_server import context

pytestmark = pytest.mark.promise("command-line")

PATIENCE_S = 60.0  # for another process, on a busy machine
FAST = ("digits", "--model", "mlp", "--replicas", "1", "--batch-size", "256")

OWN_CODE = """
import os
import pathlib
import random
import signal
import sys
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
        if self.training:
            # A signal in the middle of a `print` could not print its message.
            os.write(sys.stdout.fileno(), b"in forward\\n")
            threading.Event().wait()
        return super().forward(x)

class Ended(Net):
    # SIGTERM comes in the validation of epoch 2, SIGKILL when its weights are written.
    def forward(self, x):
        self.send("15", 5 if not self.training else 99)
        return super().forward(x)

    def state_dict(self, *args, **settings):
        self.send("9", 10)
        return super().state_dict(*args, **settings)

    def send(self, number, step):
        wanted, saved = map(pathlib.Path, ("signal", f"ended/checkpoints/step-{step:08d}"))
        if saved.is_dir() and wanted.exists() and wanted.read_text() == number:
            wanted.unlink()
            os.kill(os.getpid(), int(number))

class Failing(Net):
    num_calls = 0

    def forward(self, x):
        Failing.num_calls += self.training
        outputs = super().forward(x)
        return self.fail(outputs) if self.training and Failing.num_calls == 28 else outputs

    def fail(self, outputs):
        raise OSError("the picture is gone")

class Interrupted(Failing):
    def fail(self, outputs):
        os.kill(os.getpid(), int(pathlib.Path("signal").read_text()))
        return outputs

class Diverging(Failing):
    def fail(self, outputs):
        return outputs * float("nan")

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, place):
        noise = random.random() + float(numpy.random.rand())
        return noise + torch.randn(1, 8, 8), torch.tensor(place % 3)

class Birds(torch.utils.data.Dataset):
    classes = ["owl", "tit", "jay"]

    def __len__(self):
        return 12

    def __getitem__(self, place):
        return torch.full((4,), float(place % 3)), place % 3

class BirdsWithGaps(Birds):
    def __getitem__(self, place):
        inputs, target = super().__getitem__(place)
        return inputs / (place not in (2, 5)), target

birds_net = nn.Linear(4, 3)
pair = nn.LSTM(4, 3)
dicts = [{"x": 1, "y": 2}] * 4
nine = nn.Sequential(Net(), nn.Linear(10, 9))

class Stream:
    def __iter__(self):
        yield from [(torch.ones(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2]))] * 3

class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from [(torch.ones(1, 8, 8), torch.tensor(1))] * 18

def far(outputs, targets):
    return (outputs[:, 0] - targets.float()).abs().mean()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Work in a folder of the test's own, with a user's module in it."""
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("own_code", None)


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


def metrics_of(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def files_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


# --- training -------------------------------------------------------------------------------------


def test_a_training_leaves_everything_in_its_folder(phalanx):
    code, out, err = phalanx("train", *FAST, "--epochs", 2, "--microbatches", 2, "--trace")
    assert (code, err) == (0, "")
    folder = Path("runs/digits-mlp-001")
    assert files_in(folder) == {
        "checkpoints", "config.json", "metrics.jsonl", "model.safetensors", "trace.json"
    }  # fmt: skip
    records = metrics_of(folder)
    assert [record["step"] for record in records if record["kind"] == "step"] == [*range(1, 11)]
    assert [record["steps"] for record in records if record["kind"] == "epoch"] == [5, 10]
    rates = [record["learning_rates"] for record in records if record["kind"] == "step"]
    assert rates == [[pytest.approx(2e-3 * (1 - step / 10))] for step in range(10)]
    assert {*records[-1]["train"]} == {*records[-1]["validation"]} == {"loss", "accuracy"}
    config = json.loads((folder / "config.json").read_text())
    assert config["options"]["microbatches"] == 2
    assert config["versions"]["torch"] == torch.__version__
    for words in ("digits", "epoch 1/2: loss", "epoch 2/2: loss", "samples/s", str(folder)):
        assert words in out


def test_the_weights_fit_the_plain_model_and_classify_as_printed(phalanx, finished):
    data = open_data("digits")
    model = build_model("mlp", data.schema, seed=1)
    model.load_state_dict(load_file("run/model.safetensors"))
    model.eval()
    inputs, targets = data.validation.tensors
    with torch.no_grad():
        right = (model(inputs).argmax(1) == targets).float().mean().item()
    assert metrics_of("run")[-1]["validation"]["accuracy"] == pytest.approx(right)
    assert f"accuracy {right:.4f}" in phalanx("evaluate", "run", "digits")[1]  # the held-out part


def test_a_table_is_trained_evaluated_and_predicted(phalanx):
    kinds = [("rose", 1.0), ("tulip", 3.0), ("daisy", 5.0)]
    lines = [f"{size + 0.01 * turn},red,{kind}" for turn in range(30) for kind, size in kinds]
    Path("flowers.csv").write_text("size,colour,kind\n" + "\n".join(lines) + "\n")
    words = ("--epochs", 30, "--batch-size", 16, "--lr", 0.01, "--out", "run")
    assert phalanx("train", "flowers.csv", *words)[0] == 0
    code, out, _ = phalanx("evaluate", "run", "flowers.csv")
    assert code == 0
    assert out.endswith("accuracy 1.0000\n")
    Path("new.csv").write_text("colour,size\nred,5.1\nred,\nred,0.9\n")
    code, out, _ = phalanx("predict", "run", "new.csv", "-o", "found.csv")
    assert (code, out) == (0, "3 rows in found.csv\n")
    with Path("found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prediction"] for row in rows] == ["daisy", "tulip", "rose"]
    assert list(rows[0]) == ["prediction", "p(daisy)", "p(rose)", "p(tulip)"]
    assert sum(float(rows[0][f"p({kind})"]) for kind, _ in kinds) == pytest.approx(1)
    code, _, err = phalanx("evaluate", "run", "new.csv")
    assert (code, "`DATA` must have targets" in err) == (2, True)
    Path("none.csv").write_text("size,colour\n")
    assert phalanx("predict", "run", "none.csv")[1:] == ("0 rows in predictions.csv\n", "")
    assert Path("predictions.csv").read_text() == "prediction,p(daisy),p(rose),p(tulip)\n"
    assert "`DATA` must have rows, but has none" in phalanx("evaluate", "run", "none.csv")[2]
    words = ("flowers.csv", "--validation", "new.csv")
    assert "The validation set must have targets" in phalanx("train", *words)[2]


def test_pictures_of_another_size_are_named(phalanx, finished):
    numpy.savez("large.npz", x=numpy.zeros((4, 10, 10)), y=[0, 1, 2, 3])
    train = ("train", *FAST, "--validation", "large.npz")
    for words in (("predict", "run", "large.npz"), ("evaluate", "run", "large.npz"), train):
        err = phalanx(*words)[2]
        assert "of shape (1, 8, 8), as in training, but have rows of (1, 10," in err


def test_classes_of_a_data_set_of_ones_own_are_predicted_by_their_names(phalanx):
    words = ("own_code:Birds", "--model", "own_code:birds_net", "--batch-size", 4, "--epochs", 1)
    assert phalanx("train", *words, "--out", "run")[0] == 0
    assert phalanx("predict", "run", "own_code:Birds")[::2] == (0, "")
    header, *rows = csv.reader(Path("predictions.csv").read_text().splitlines())
    assert header == ["prediction", "p(owl)", "p(tit)", "p(jay)"]
    assert len(rows) == 12
    assert {row[0] for row in rows} <= {"owl", "tit", "jay"}
    _, out, err = phalanx("predict", "run", "own_code:BirdsWithGaps")
    assert out == "12 rows in predictions.csv\n"
    assert "nan or inf in 2 of 12 rows, first in row 3: an input of these rows may be" in err
    broken = {"weight": torch.full((3, 4), torch.nan), "bias": torch.ones(3)}
    save_file(broken, "run/model.safetensors")
    err = phalanx("predict", "run", "own_code:Birds")[2]
    assert "in 12 of 12 rows, first in row 1: the model's weights hold nan" in err


def test_numbers_are_regressed_with_validation_data_and_early_stopping(phalanx):
    lines = [f"{x / 10},{3 * x / 10 + 0.5}" for x in range(60)]
    Path("line.csv").write_text("x,y\n" + "\n".join(lines) + "\n")
    Path("other.csv").write_text("x,y\n" + "\n".join(lines[::7]) + "\n")
    words = ("--validation", "other.csv", "--early-stopping", 2, "--epochs", 200, "--clip-norm", 1)
    code, said, _ = phalanx("train", "line.csv", *words, "--lr", 0.01, "--out", "run")
    assert code == 0
    epochs = [record for record in metrics_of("run") if record["kind"] == "epoch"]
    losses = [record["validation"]["loss"] for record in epochs]
    assert len(epochs) < 200
    assert min(losses) == losses[-3]
    assert "The weights are those of the best epoch." in said
    shown = phalanx("evaluate", "run", "other.csv")[1]
    assert f"{min(losses):.4f}" in shown
    assert phalanx("predict", "run", "other.csv")[0] == 0
    assert Path("predictions.csv").read_text().splitlines()[0] == "prediction"


def test_large_numbers_are_regressed_as_well_as_small_ones(phalanx):
    rooms = [(place * 7 % 50) / 5 for place in range(200)]
    wanted = [10_000 * each + 25_000.5 for each in rooms]
    rows = [f"{each},{price}" for each, price in zip(rooms, wanted, strict=True)]
    Path("price.csv").write_text("rooms,price\n" + "\n".join(rows) + "\n")
    assert phalanx("train", "price.csv", "--epochs", 30, "--out", "run")[0] == 0
    assert phalanx("predict", "run", "price.csv")[0] == 0
    found = [float(line) for line in Path("predictions.csv").read_text().split()[1:]]
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 10_000


def test_text_is_trained_by_its_bytes(phalanx):
    Path("book.txt").write_text("The same words again and again. " * 40)
    code, out, _ = phalanx("train", "book.txt", "--epochs", 1, "--batch-size", 8, "--out", "run")
    assert (code, "gpt on " in out) == (0, True)
    assert {*metrics_of("run")[-1]["train"]} == {"loss", "accuracy"}
    assert "must be trained on rows" in phalanx("predict", "run", "book.txt")[2]


def test_the_seed_decides_what_a_data_set_draws(phalanx):
    losses = []
    for replicas, seed in ((1, 5), (2, 5), (1, 6)):
        words = ("own_code:Noisy", "--model", "own_code:Net", "--batch-size", 6)
        more = ("--microbatches", 2, "--replicas", replicas, "--seed", seed, "--epochs", 1)
        code, _, err = phalanx("train", *words, *more, "--out", f"run-{replicas}-{seed}")
        assert (code, err) == (0, "")
        found = metrics_of(f"run-{replicas}-{seed}")
        losses.append([each["loss"] for each in found if "loss" in each])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(("name", "steps"), [("Stream", 3), ("Rows", 3)])
def test_a_loader_of_ones_own_may_have_no_length(phalanx, name, steps):
    words = (f"own_code:{name}", "--model", "own_code:Net", "--batch-size", 6, "--epochs", 2)
    code, _, err = phalanx("train", *words, "--microbatches", 2, "--loss", "own_code:far")
    assert (code, err) == (0, "")
    found = metrics_of(f"runs/own_code-{name}-own_code-Net-001")
    assert [each["step"] for each in found if each["kind"] == "step"] == [*range(1, 2 * steps + 1)]


def test_every_file_has_the_mode_that_the_user_wants(phalanx):
    before = os.umask(0o027)
    try:
        assert phalanx("train", *FAST, "--epochs", 1, "--out", "run")[0] == 0
    finally:
        os.umask(before)
    for path in Path("run").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


# --- stopping and continuing ----------------------------------------------------------------------


BY_NIGHT = [pytest.param(each, marks=pytest.mark.night) for each in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("number", [signal.SIGINT, *BY_NIGHT])
def test_a_stopped_training_continues_to_the_same_bits_on_other_replicas(phalanx, number):
    words = ("digits", "--model", "own_code:Interrupted", "--microbatches", "3", "--seed", "5")
    words += ("--epochs", "2")
    # The model sends the signal itself, in the middle of step 10: no race with the test.
    Path("signal").write_text(str(int(number)))
    code, said, err = phalanx("train", *words, "--replicas", 1, "--out", "stopped")
    assert (code, err) == (130, "")
    told = "Stopped after step 10; 0 of 2 epochs are finished. Continue with:\n  phalanx resume"
    assert told in said
    assert files_in("stopped") == {"checkpoints", "config.json", "metrics.jsonl"}
    assert "must be finished" in phalanx("evaluate", "stopped", "digits")[2]
    Path("signal").unlink()

    code, _, err = phalanx("resume", "stopped", "--replicas", 3)
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


def test_a_run_whose_epochs_are_done_gets_its_weights(phalanx):
    words = ("digits", "--model", "own_code:Ended", "--batch-size", "256", "--epochs", "2")
    phalanx("train", *words, "--out", "whole")
    whole = load_file("whole/model.safetensors")
    for number, code_before in (("15", 0), ("9", -9)):
        Path("signal").write_text(number)
        with Command("train", *words, "--replicas", "1", "--out", "ended") as command:
            said = command.output.read()
            assert command.ended() == code_before, said
        if code_before:
            assert "model.safetensors" not in files_in("ended")
            assert "Finish it: phalanx resume" in phalanx("evaluate", "ended", "digits")[2]
            code, said, err = phalanx("resume", "ended")
            assert (code, "All 2 epochs are finished" in said, err) == (0, True, "")
        found = load_file("ended/model.safetensors")
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        shutil.rmtree("ended")


def test_a_run_that_failed_is_continued_but_not_one_that_diverged(phalanx):
    words = ("digits", "--microbatches", "3", "--every-steps", 4, "--replicas", 1)
    with pytest.raises(OSError, match="gone") as raised:
        phalanx("train", *words, "--model", "own_code:Failing", "--out", "failed")
    assert raised.value.__notes__[-1].endswith("checkpoint: phalanx resume failed")
    assert phalanx("resume", "failed", "--epochs", 1)[0] == 0
    assert metrics_of("failed")[-1]["kind"] == "epoch"
    sys.modules["own_code"].Failing.num_calls = 0
    code, _, err = phalanx("train", *words, "--model", "own_code:Diverging", "--out", "diverged")
    assert code == 2
    assert "`loss` must be finite" in err
    assert "phalanx resume" not in err


def test_a_hanging_step_can_be_left_by_another_signal():
    words = ("digits", "--replicas", "1", "--model", "own_code:Stuck", "--out", "run")
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


def test_a_finished_run_is_continued_with_more_epochs(phalanx, finished):
    Path("run/model.safetensors").write_bytes(b"")
    assert "Write it again: phalanx resume run" in phalanx("predict", "run", "digits")[2]
    code, said, _ = phalanx("resume", "run")
    assert (code, "To train longer, give --epochs 2." in said) == (0, True)
    before = load_file("run/model.safetensors")
    assert phalanx("resume", "run", "--epochs", 2)[0] == 0
    after = load_file("run/model.safetensors")
    assert not all(torch.equal(before[name], after[name]) for name in before)
    rates = [each["learning_rates"] for each in metrics_of("run") if each["kind"] == "step"]
    assert rates[5:] == [[pytest.approx(2e-3 * (1 - step / 10))] for step in range(5, 10)]
    assert sum(record["kind"] == "step" for record in metrics_of("run")) == 10
    config = Path("run/config.json")
    config.write_text(config.read_text().replace('step": 10', 'step": 5'))  # as a kill leaves it
    with pytest.warns(UserWarning, match="those after step 5, .* to step 10 and has not"):
        assert phalanx("evaluate", "run", "digits")[0] == 0
    code, _, err = phalanx("resume", "run", "--epochs", 1)
    assert code == 2
    assert "`--epochs` must be more than the 2 that the run has finished" in err
    last = next(Path("run/checkpoints").iterdir())
    (last / "state.pt").write_bytes(b"")
    assert f"Or remove {last} and begin again: ph" in phalanx("resume", "run", "--epochs", 3)[2]


def test_a_run_that_shall_outlive_its_terminal_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stopped_by_signals(lambda: None, Console()):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_as_they_were_afterwards():
    def mine(number, frame):
        pytest.fail("the handler of before was called")

    before = signal.signal(signal.SIGINT, mine)
    try:
        stops = []
        with stopped_by_signals(lambda: stops.append(1), Console(file=io.StringIO())) as told:
            signal.raise_signal(signal.SIGINT)
            assert (stops, told.is_set()) == ([1], True)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("digits", "--replicas", "none"), "must hold names such as 'cpu'"),
        (("digits", "--replicas", "5"), "fewer replicas, or begin a run with --microbatches 5 "),
        (("digits", "--clip-norm", "0"), "`--clip-norm` must be above 0"),
        (("digits", "--replicas", "2", "--executor", "inline"), "must be 1 for --executor inline"),
        (("mnist",), "`DATA` must be a file, a folder or module:attribute"),
        (("digits", "--model", "own_code:nine"), "an output for each of 10 classes, but has 9"),
        (("own_code:Birds", "--model", "own_code:pair"), "must be a tensor, but are of type tuple"),
        (("own_code:dicts", "--model", "own_code:Net"), "(inputs, target), not dicts ['x', 'y']"),
        (("digits", "--model", "gpt"), "`--model` must fit rows of shape [1, 8, 8], but is gpt"),
        (("digits", "--loss", "mse"), "Targets must have the shape"),
        (("digits", "--loss", "hinge"), "`--loss` must be cross_entropy, mse, l1, bce"),
        (("digits", "--validation", "2"), "`--validation` must be a share of the rows"),
    ],
)
def test_what_cannot_work_is_one_message_and_leaves_nothing(phalanx, words, message):
    code, out, err = phalanx("train", *words)
    assert code == 2
    assert err.startswith("Error: ")
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert files_in(".") <= {"own_code.py", "__pycache__", "runs"}
    assert not any(Path("runs").glob("*"))


def test_moved_data_is_named_at_the_resume(phalanx):
    rows = "".join(f"{x},{x % 2}\n" for x in range(40))
    Path("first.csv").write_text("x,y\n" + rows)
    assert phalanx("train", "first.csv", "--epochs", 1, "--out", "run")[0] == 0
    Path("first.csv").rename("moved.csv")
    code, _, err = phalanx("resume", "run", "--epochs", 2)
    assert (code, "does not exist. Say where it is now: --data DATA" in err) == (2, True)
    code, said, _ = phalanx("resume", "run", "--epochs", 2, "--data", "moved.csv")
    assert (code, "The data has changed" in said) == (0, False)
    Path("moved.csv").write_text("x,y\n" + rows + "9,1\n")
    code, said, _ = phalanx("resume", "run", "--epochs", 3)
    assert (code, "The data has changed" in said) == (0, True)


def test_validation_data_is_found_from_another_folder(phalanx, monkeypatch, tmp_path):
    Path("rows.csv").write_text("x,y\n" + "".join(f"{x},{x % 2}\n" for x in range(40)))
    shutil.copy("rows.csv", "others.csv")
    words = ("rows.csv", "--validation", "others.csv", "--epochs", 1, "--out", "run")
    assert phalanx("train", *words)[0] == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert phalanx("resume", tmp_path / "run", "--epochs", 2)[0] == 0


def test_one_column_of_classes_is_refused(phalanx):
    Path("same.csv").write_text("x,y\n" + "1,a\n" * 9)
    code, _, err = phalanx("train", "same.csv")
    assert (code, "The target must have 2 or more classes" in err) == (2, True)
    Path("same.csv").write_text("x,y\n1,a\n")
    assert phalanx("train", "same.csv")[2].endswith("must have 2 rows or more, but has 1.\n")


@pytest.mark.parametrize("name", ["data", "model", "loss"])
def test_code_that_a_folder_of_others_names_is_not_run(phalanx, finished, name):
    config = json.loads(Path("run/config.json").read_text())
    config["options"][name] = "evil:Net"
    Path("run/config.json").write_text(json.dumps(config))
    Path("evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    Path("run").chmod(0o777)
    for words in (("resume", "run"), ("evaluate", "run", "digits"), ("predict", "run", "digits")):
        code, _, err = phalanx(*words)
        assert (code, "give --trust if you trust it" in err) == (2, True)
    assert not Path("ran").exists()
    phalanx("resume", "run", "--trust", "--epochs", 2)
    assert Path("ran").exists()
    sys.modules.pop("evil", None)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\x00", '{"format": 1}', '{"format": 2, "options": {}}']
)
def test_a_damaged_config_is_named(phalanx, finished, text):
    Path("run/config.json").write_text(text)
    code, _, err = phalanx("resume", "run")
    assert (code, "config.json" in err) == (2, True)


def test_a_failing_model_arrives_with_its_own_traceback_and_leaves_no_folder(phalanx, capsys):
    with pytest.raises(ArithmeticError) as raised:
        phalanx("train", "digits", "--model", "own_code:Broken", "--out", "run")
    sys.excepthook(raised.type, raised.value, raised.tb)  # as Python does at the end
    said = capsys.readouterr().err
    assert (said.count('  File "'), "own_code.py" in said) == (1, True)
    assert "ArithmeticError: my own mistake" in said
    assert not Path("run").exists()


# --- the rest of the command ----------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--help", "train -h", "resume", "--version"])
def test_help_and_version_are_there(phalanx, words):
    code, out, _ = phalanx(*words.split())
    assert (code == 0) is (words != "resume")  # which lacks its run folder
    assert (f"(torch {torch.__version__}, " if words == "--version" else "Usage: phalanx") in out


def test_help_is_wrapped_for_the_terminal_and_not_as_in_the_source(phalanx, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = phalanx("launch", "--help")
    lines = [line.strip() for line in out.splitlines()]
    assert "has the cores divided by the ranks as threads, unless OMP_NUM_THREADS says" in lines

"""Orders to a training that is under way, by a file and by signals."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.callbacks import History
from phalanx.callbacks.meter import Meter
from phalanx.cli.control import Control
from phalanx.cli.train import resized_by_signals
from phalanx.errors import ConfigError
from tests.unit.callbacks.events import epoch_done, step_done

LARGE = f"replicas {'9' * 4000}"


@dataclass
class Told:
    """A session that only writes down what it is told."""

    devices: tuple[str, ...] = ("cpu", "cpu")
    orders: list[Any] = field(default_factory=list)

    @property
    def trainer(self) -> Any:
        return SimpleNamespace(devices=self.devices)

    def resize(self, replicas: object) -> None:
        self.orders.append(replicas)

    def refuse(self, reason: str) -> None:
        self.orders.append(("refused", reason))

    def stop(self) -> None:
        self.orders.append("stop")


def test_a_file_is_followed_when_it_comes_and_when_it_changes(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "orders"
    control = Control(path, told)
    control(step_done())
    assert told.orders == []
    path.write_text("replicas 3  # while the others sleep\n")
    for step in range(3):
        control(step_done(step + 1))
    assert told.orders == [3]
    path.write_text("\nreplicas cpu,cpu,cuda:0\nstop\n")
    control(step_done())
    assert told.orders == [3, ("cpu", "cpu", "cuda:0"), "stop"]
    path.unlink()
    control(step_done())
    assert len(told.orders) == 3


@pytest.mark.parametrize(
    "line", ["replicas", "replicas 0", "replicas x y", "faster", "stop now", LARGE]
)
def test_an_order_that_cannot_be_is_refused(line: str, tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "orders"
    path.write_text(line)
    Control(path, told)(step_done())
    [(kind, reason)] = told.orders
    assert kind == "refused"
    assert "must be" in reason


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "orders"
    path.write_bytes(b"\xff\xfe replicas 3")
    Control(path, told)(step_done())
    assert told.orders[0][0] == "refused"


def test_what_reading_would_wait_for_is_refused(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "orders"
    control = Control(path, told)
    os.mkfifo(path)
    control(step_done())
    [(kind, reason)] = told.orders
    assert kind == "refused"
    assert "must be a file" in reason
    for place in (path, tmp_path):
        with pytest.raises(ConfigError, match="must be a file"):
            Control(place, told)


def test_a_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "orders"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    Control(path, told)(step_done())
    assert told.orders == [
        ("refused", f"{path} must hold at most 4096 characters of orders, but holds more.")
    ]


def test_a_file_that_is_put_in_the_place_of_another_is_read(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "orders"
    control = Control(path, told)
    for replicas in (3, 4):
        beside = tmp_path / str(replicas)
        beside.write_text(f"\N{ZERO WIDTH NO-BREAK SPACE}replicas {replicas}\n")
        os.utime(beside, ns=(0, 0))
        beside.replace(path)
        control(step_done())
    assert told.orders == [3, 4]


def test_a_stop_that_ended_an_earlier_training_does_not_end_the_next(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "orders"
    path.write_text("replicas 3\nstop\n")
    control = Control(path, told)
    for step in range(2):
        control(step_done(step + 1))
    assert told.orders == [3]
    path.write_text("stop\n")
    control(step_done())
    assert told.orders == [3, "stop"]


def test_orders_are_followed_between_steps_only(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "orders"
    path.write_text("stop")
    Control(path, told)(epoch_done())
    assert told.orders == []


def test_signals_add_replicas_and_take_them_away() -> None:
    told = Told()
    control = Control(None, told)
    before = signal.getsignal(signal.SIGUSR1)
    with resized_by_signals(control.grow):
        os.kill(os.getpid(), signal.SIGUSR1)
        control(step_done())
        os.kill(os.getpid(), signal.SIGUSR2)
        control(step_done())
        for _ in range(4):  # never below one
            os.kill(os.getpid(), signal.SIGUSR2)
        control(step_done())
    assert told.orders == [("cpu", "cpu", "cpu"), ("cpu",), ("cpu",)]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_run_that_is_resized_can_be_shown_and_drawn() -> None:
    meter, history = Meter(), History()
    for step, replicas in enumerate([2, 2, 3], 1):
        event = step_done(step, replicas=replicas)
        meter.add(event, 0.1 * step)
        history(event)
    assert len(meter.read().busy) == 3
    assert [len(event.shares) for event in history.last_steps] == [3]

"""When a rank counts as contended, so that it sleeps at once where it would have spun."""

from __future__ import annotations

import pytest

from phalanx.distributed import contention
from phalanx.distributed.contention import Contention, ContentionVerdict, Waits, is_delayed

NOW = 100.0


@pytest.mark.parametrize(
    ("why", "waits", "delayed"),
    [
        ("a core of its own", Waits(0.0, 0), False),
        ("the kernel's own work", Waits(0.2e-3, 3), False),
        ("something ran once for a moment", Waits(1.2e-3, 1), False),
        ("two ranks hand one core to each other", Waits(2.5e-3, 100), False),
        ("a busy process had a time slice", Waits(2.8e-3, 1), True),
        ("two ranks spin in turns on one core", Waits(2.4e-3, 4), True),
        ("never run at all", Waits(5e-3, 0), True),
    ],
)
def test_a_rank_is_delayed_by_long_waits_in_a_large_share_of_a_window(why, waits, delayed):
    assert is_delayed(waits, 5e-3) is delayed, why


def test_nobody_is_contended_at_first():
    assert not ContentionVerdict().holds(0.0)


def test_a_verdict_holds_for_a_while():
    verdict = ContentionVerdict().delayed(NOW)
    assert verdict.holds(NOW)
    assert verdict.holds(NOW + 0.019)
    assert not verdict.holds(NOW + 0.021)


def test_delays_while_it_holds_prolong_a_verdict_and_make_it_no_longer():
    verdict = ContentionVerdict().delayed(NOW).delayed(NOW + 0.01).delayed(NOW + 0.02)
    assert verdict.length_s == 0.02
    assert verdict.holds(NOW + 0.039)
    assert not verdict.holds(NOW + 0.041)


def test_a_rank_that_is_delayed_soon_again_is_contended_for_twice_as_long_up_to_a_second():
    verdict, lengths = ContentionVerdict().delayed(NOW), []
    for _ in range(8):
        verdict = verdict.delayed(verdict.until_s + 0.005)
        lengths.append(verdict.length_s)
    assert lengths == [0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]


def test_a_rank_that_is_delayed_much_later_is_contended_for_the_shortest_time():
    verdict = ContentionVerdict(until_s=NOW, length_s=0.32).delayed(NOW + 1.7)
    assert verdict.length_s == 0.02


class Kernel:
    """A clock, and what the kernel tells of the calling thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.thread = NOW, 1
        self.waits: Waits | None = Waits(0.0, 0)
        patch.setattr(contention, "now_s", lambda: self.now)
        patch.setattr(contention, "_own_waits", lambda: self.waits)
        patch.setattr(contention.threading, "get_ident", lambda: self.thread)

    def pass_time(self, seconds: float, *, waited_s: float = 0.0) -> None:
        self.now += seconds
        if self.waits is not None:
            self.waits = Waits(self.waits.waited_s + waited_s, self.waits.num_runs + 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def test_a_rank_that_was_delayed_says_so_and_does_not_spin(kernel):
    rank = Contention(2)
    assert not rank.begin()
    kernel.pass_time(0.006, waited_s=0.003)
    rank.look()
    assert not rank.spins
    assert rank.begin()
    kernel.pass_time(0.021)
    assert rank.spins
    assert not rank.begin()


def test_delays_between_operations_do_not_count(kernel):
    rank = Contention(2)
    rank.begin()
    kernel.pass_time(0.050, waited_s=0.040)  # the program's own work, or another backend's
    assert not rank.begin()
    rank.look()
    assert rank.spins


def test_short_operations_share_a_window(kernel):
    rank = Contention(2)
    for _ in range(30):
        assert rank.spins
        rank.begin()
        kernel.pass_time(0.0002, waited_s=0.00015 if _ == 3 else 0.0)
        rank.look()
    kernel.pass_time(0.001, waited_s=0.003)
    rank.look()
    assert rank.spins  # of a window that has just begun


def test_what_two_threads_waited_is_not_compared(kernel):
    rank = Contention(2)
    rank.begin()
    kernel.pass_time(0.006, waited_s=0.005)
    kernel.thread = 2
    rank.look()
    assert rank.spins


def test_a_rank_spins_where_the_kernel_does_not_tell(kernel):
    kernel.waits = None
    rank = Contention(2)
    rank.begin()
    kernel.pass_time(0.006)
    rank.look()
    assert rank.spins


def test_no_rank_spins_after_one_was_contended(kernel):
    rank = Contention(2)
    rank.agreed = True
    assert not rank.spins


@pytest.mark.parametrize(("size", "spin_s"), [(1, 3.0), (2, 3.0), (3, 1.0)])
def test_a_rank_spins_briefly_where_ranks_outnumber_cores(monkeypatch, size, spin_s):
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda _: {0, 1})
    rank = Contention(size)
    assert rank.spin_s(3.0, 1.0) == spin_s
    rank.agreed = True
    assert rank.spin_s(3.0, 1.0) == 0.0


def test_the_kernel_tells_of_this_thread():
    waits = contention._own_waits()
    assert waits is not None
    assert waits.waited_s >= 0.0
    assert waits.num_runs > 0

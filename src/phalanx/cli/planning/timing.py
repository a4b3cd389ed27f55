"""How steps are timed."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.clock import now_s

__all__ = ["time_steps", "usual_step_s"]

_WARM_UP = 4
_LEAST = 9
_MOST = 400


def time_steps(
    step: Callable[[], object], seconds: float, *, agree: Callable[[int], int] = int
) -> list[float]:
    """Take steps for about so many seconds, and return what each took.

    Args:
        agree: From the number of steps that suits this process to the one that is taken.
    """

    def timed() -> float:
        began_s = now_s()
        step()
        return now_s() - began_s

    warm_s = min(timed() for _ in range(_WARM_UP))
    wanted = agree(int(min(_MOST, max(_LEAST, seconds / max(warm_s, 1e-9)))))
    return [timed() for _ in range(wanted)]


def usual_step_s(
    step: Callable[[], object], seconds: float, *, agree: Callable[[int], int] = int
) -> float:
    """Return what a step takes that nothing else on the machine holds up: the lower decile."""
    taken_s = sorted(time_steps(step, seconds, agree=agree))
    return taken_s[len(taken_s) // 10]

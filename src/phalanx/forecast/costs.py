"""What must be measured of a model and a machine before anything can be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

from phalanx.errors import ConfigError

__all__ = ["FORMATIONS", "FormationCosts", "FormationKind", "StepCosts", "read_costs"]

_LARGEST = 1e12


@dataclass(frozen=True, kw_only=True)
class FormationKind:
    """How a formation divides its work.

    Attributes:
        is_on_one_host: Whether it cannot have workers on several.
        shards_optimizer: Whether each worker steps its part of the parameters only.
        adds_along_tree: Whether workers add whole gradients to each other's.
        has_queue: Whether a worker that has finished takes the next microbatch.
        meets_all: Whether each worker exchanges something with each, host or not.
        is_one_process: Whether its workers are threads, which are lost together.
    """

    is_on_one_host: bool = False
    shards_optimizer: bool = False
    adds_along_tree: bool = False
    has_queue: bool = False
    meets_all: bool = False
    is_one_process: bool = False


FORMATIONS: Mapping[str, FormationKind] = MappingProxyType(
    {
        "threads": FormationKind(
            is_on_one_host=True,
            shards_optimizer=True,
            adds_along_tree=True,
            has_queue=True,
            is_one_process=True,
        ),
        "processes": FormationKind(
            is_on_one_host=True, shards_optimizer=True, adds_along_tree=True, has_queue=True
        ),
        "ranks": FormationKind(shards_optimizer=True, meets_all=True),
        "ddp": FormationKind(),
    }
)
"""By name: `Trainer` on threads, on worker processes and on ranks, and DDP over our backend."""


@dataclass(frozen=True, kw_only=True)
class FormationCosts:
    """Seconds of one step of a formation on one host at rest, for a few numbers of workers.

    Each worker has one thread and computes one microbatch. A step is taken by three models: one
    with as many parameters that have one element each (*empty*), one with parameters of the true
    sizes (*hollow*), which both compute nothing, and the *whole* model. So the differences are what
    the bytes cost, and what the computation costs.

    Attributes:
        workers: The numbers of workers; the first is 1.
        empty_s, hollow_s, whole_s: Seconds, one for each of these.
        restart_s: From the loss of a worker until it is replaced, or all are started again.
        recovery_s: How much longer the step takes in which a worker is lost; None where the loss
            ends the job, which goes on from its last checkpoint.
    """

    workers: tuple[int, ...]
    empty_s: tuple[float, ...]
    hollow_s: tuple[float, ...]
    whole_s: tuple[float, ...]
    restart_s: float
    recovery_s: float | None = None

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.workers, self.workers[1:], strict=False))
        if len(self.workers) < 2 or self.workers[0] != 1 or not rising:
            raise ConfigError(
                "`workers` must hold 1 and at least one larger number, in rising order, but is "
                f"{list(self.workers)}."
            )
        for name in ("empty_s", "hollow_s", "whole_s"):
            if len(getattr(self, name)) != len(self.workers):
                raise ConfigError(
                    f"`{name}` must hold one number for each of `workers` ({len(self.workers)}), "
                    f"but holds {len(getattr(self, name))}."
                )


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What was measured on one machine.

    Attributes:
        model: What was trained, in words.
        rows: Rows of a microbatch.
        cores: Of the machine.
        gradient_bytes: Of all parameters that are trained.
        optimizer_s: One step of the optimizer over all parameters, on one core.
        add_s: Adding one gradient to another, on one core.
        jitter: How much a microbatch's seconds vary: the standard deviation of their logarithm.
        formations: By name, as in `FORMATIONS`.
    """

    model: str
    rows: int
    cores: int
    gradient_bytes: int
    optimizer_s: float
    add_s: float
    jitter: float
    formations: Mapping[str, FormationCosts]

    def __post_init__(self) -> None:
        for name in ("rows", "cores", "gradient_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` must be 1 or more, but is {getattr(self, name)!r}.")
        unknown = sorted(set(self.formations) - set(FORMATIONS))
        if unknown or not self.formations:
            raise ConfigError(
                f"`formations` must name some of {', '.join(FORMATIONS)}, but names "
                f"{', '.join(unknown) or 'none'}."
            )

    @property
    def alone_s(self) -> float:
        """A step of one worker, in the formation that is fastest at it."""
        return min(each.whole_s[0] for each in self.formations.values())

    def as_json(self) -> dict[str, Any]:
        """Return what `read_costs` reads. Any: JSON."""
        return asdict(self)


# Any: JSON, which may have been written by hand.
def read_costs(told: Any) -> StepCosts:
    """Read what was measured from JSON.

    Raises:
        ConfigError: Something is missing, unknown, of another type, or out of its range.
    """
    known = _members(told, StepCosts, "measured")
    formations = known["formations"]
    if not isinstance(formations, Mapping):
        raise ConfigError(f"`formations` must be an object, but is {formations!r:.80}.")
    known["formations"] = {
        name: FormationCosts(**_members(each, FormationCosts, f"formations.{name}"))
        for name, each in formations.items()
    }
    return StepCosts(**known)


def _members(told: Any, kind: type[Any], name: str) -> dict[str, Any]:
    """Return the members of an object of JSON as the fields of ``kind`` want them."""
    wanted = {each.name: each.type for each in fields(kind)}
    if not isinstance(told, Mapping) or set(told) != set(wanted):
        is_object = isinstance(told, Mapping)
        found = f"has {', '.join(map(str, told))}" if is_object else f"is {told!r:.80}"
        raise ConfigError(f"`{name}` must be an object of {', '.join(wanted)}, but {found}.")
    return {each: _value(told[each], str(wanted[each]), f"{name}.{each}") for each in wanted}


def _value(value: Any, kind: str, name: str) -> Any:
    if kind.startswith("Mapping") or (value is None and "None" in kind):
        return value
    if kind.startswith("tuple"):
        inner = "int" if "int" in kind else "float"
        if not isinstance(value, list | tuple):
            raise ConfigError(f"`{name}` must be a list of numbers, but is {value!r:.80}.")
        return tuple(_value(each, inner, name) for each in value)
    if kind == "str":
        if not isinstance(value, str):
            raise ConfigError(f"`{name}` must be text, but is {value!r:.80}.")
        return value
    is_number = isinstance(value, int if kind == "int" else int | float)
    if not is_number or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        wanted = "a whole number" if kind == "int" else "a number"
        raise ConfigError(f"`{name}` must be {wanted} from 0 to 1e12, but is {value!r:.80}.")
    return value if kind == "int" else float(value)

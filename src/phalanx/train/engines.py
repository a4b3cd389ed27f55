"""The engines of a trainer, one at a time: opened for a first batch, exchanged, closed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from phalanx.callbacks import FormationChosen
from phalanx.plan import Balancer
from phalanx.replicas import num_cores
from phalanx.train.formation import Formation, choose_formation
from phalanx.train.step import EngineSpec, StepEngine
from phalanx.types import Nested

__all__ = ["Engines"]


class Engines:
    """The current engine of a trainer, its formation, and the shares of its replicas.

    Args:
        spec: The parts that all engines share.
        formation: Given by the user; None for `replicas="auto"`.
        home: The device of the module.
        intra_op: Threads inside operators, where that is decided.
        balances: Whether the replicas' shares follow their seconds.
        tell: Called with the choice of "auto".

    Attributes:
        current: None before the first batch.
        formation: None before the trial of "auto".
        balancer: None without balancing, and before the first batch.
    """

    def __init__(
        self,
        spec: EngineSpec,
        formation: Formation | None,
        *,
        home: torch.device,
        intra_op: int | None,
        balances: bool,
        tell: Callable[[FormationChosen], None],
    ) -> None:
        self._spec = spec
        self._home = home
        self._intra_op = intra_op
        self._balances = balances
        self._tell = tell
        self._next_formation: Formation | None = None
        self.current: StepEngine | None = None
        self.formation = formation
        self.balancer: Balancer | None = None

    @property
    def workloads(self) -> tuple[float, ...]:
        """Each replica's relative share of the next batch; empty until replicas are chosen."""
        if self._spec.workloads is not None:
            return tuple(self._spec.workloads)
        if self.balancer is not None:
            return self.balancer.workloads
        return (1.0,) * (0 if self.formation is None else len(self.formation.devices))

    def open(self, batch: Nested) -> StepEngine:
        """Return the engine to train with, made for ``batch`` where there is none that fits."""
        wanted = self._next_formation
        if wanted is not None and wanted != self.formation:
            self._exchange(wanted)
        if self.formation is None:
            self.close()  # what `open_to_predict()` has made
            self.formation = self._choose_formation(batch)
        engine = self._fitting()
        if engine is None:
            engine = self.current = self._made(self.formation)
        if self._balances and self.balancer is None:
            self.balancer = self._open_balancer(None)
        return engine

    def open_to_predict(self) -> StepEngine:
        """Return an engine that runs the module: the one to train with, if that is chosen.

        Batches to predict from need no targets, so they cannot decide a trial.
        """
        engine = self._fitting()
        if engine is None:
            formation = self.formation or Formation((self._home,), self._intra_op or num_cores())
            engine = self.current = self._made(formation)
        return engine

    def resize(self, formation: Formation) -> None:
        """Use ``formation`` from the next :meth:`open` on."""
        self._next_formation = formation

    def restore(self, formation: tuple[int, int] | None, workloads: Sequence[float] | None) -> None:
        """Take over a state that was loaded into module and optimizer.

        Args:
            formation: Of the checkpoint, for a trainer that has not chosen any.
            workloads: The shares that balancing had come to.
        """
        if self.formation is None and formation is not None:
            self.close()  # what `open_to_predict()` has made
            count, intra_op = formation
            self.formation = Formation((self._home,) * count, self._intra_op or intra_op)
        self.balancer = self._open_balancer(workloads)
        if self.current is not None:
            self.current.reload_state()

    def refresh(self) -> None:
        """Let the next run read everything that the module and the loss hold as it is then."""
        if self.current is not None:
            self.current.executor.refresh()

    def write(self, function: Callable[[], None]) -> None:
        """Call what writes to the module or the position of the run; no Ctrl-C comes in between."""
        if self.current is None:
            function()
            return
        executor = self.current.executor
        executor.each(lambda index: function() if index == 0 else None, uninterrupted=True)

    def close(self) -> None:
        """Dismiss the replicas."""
        if self.current is not None:
            with torch.inference_mode(False):
                self.current.close()
            self.current = None

    def _made(self, formation: Formation) -> StepEngine:
        # A caller who evaluates in inference mode still trains afterwards, and the memory that an
        # engine gives to parameters is what they keep.
        with torch.inference_mode(False):
            return StepEngine(self._spec, formation)

    def _fitting(self) -> StepEngine | None:
        """Return the engine if it still fits module and optimizer, else close it."""
        if self.current is not None and not self.current.matches_spec():
            self.current.complete_state(changed=True)
            self.close()
        return self.current

    def _exchange(self, formation: Formation) -> None:
        """Open an engine of ``formation``, or keep the present one where that cannot be had."""
        if self.current is not None:
            self.close()
            try:
                self.current = self._made(formation)
            except Exception as error:  # whatever the system lacks: no reason to end the training
                self._next_formation = None
                warnings.warn(
                    f"Going on with {self.formation}, as {formation} cannot be had: {error}",
                    stacklevel=2,
                )
                return
        self.formation, self.balancer = formation, None

    def _open_balancer(self, workloads: Sequence[float] | None) -> Balancer | None:
        """Begin to balance, from ``workloads`` if they are of as many replicas."""
        if not self._balances or self.formation is None:
            return None
        count = len(self.formation.devices)
        same = workloads is not None and len(workloads) == count
        return Balancer(count, workloads=workloads if same else None)

    def _choose_formation(self, batch: Nested) -> Formation:
        """Choose the formation of `replicas="auto"`, and tell."""
        workloads = self._spec.workloads
        if workloads is None:
            spec = self._spec
            chosen, why = choose_formation(
                spec.module, spec.splitter, spec.objective, batch, self._home
            )
        else:
            chosen = Formation((self._home,) * len(workloads), 1)
            why = "as many as there are workloads"
        count = len(chosen.devices)
        self._tell(FormationChosen(replicas=count, intra_op=chosen.intra_op, reason=why))
        return chosen

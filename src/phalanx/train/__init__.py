"""Training: the loop, the optimizer's step, metrics, checkpoints."""

from phalanx.train.events import Callback, EpochDone, Event, FormationChosen, Span, StepDone
from phalanx.train.trainer import Trainer

__all__ = ["Callback", "EpochDone", "Event", "FormationChosen", "Span", "StepDone", "Trainer"]

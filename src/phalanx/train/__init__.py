"""Training: the loop, the optimizer's step, metrics, checkpoints."""

from phalanx.train.order import length_of
from phalanx.train.sampler import ExactSampler
from phalanx.train.trainer import Trainer
from phalanx.train.updates import Update, merge_updates, split_batch

__all__ = ["ExactSampler", "Trainer", "Update", "length_of", "merge_updates", "split_batch"]

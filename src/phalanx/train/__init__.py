"""Training: the loop, the optimizer's step, metrics, checkpoints."""

from phalanx.train.order import length_of
from phalanx.train.sampler import ExactSampler
from phalanx.train.trainer import Trainer

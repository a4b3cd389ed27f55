"""What users wrap a model with."""

from phalanx.parallel.abstract_parallel import AbstractParallel, join_columns
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.model_parallel import ModelParallel
from phalanx.parallel.on_device import OnDevice
from phalanx.parallel.redrawing import redraw_of, refuse_unreached
from phalanx.parallel.unwrapped import Unwrapped

__all__ = [
    "AbstractParallel",
    "DataParallel",
    "ModelParallel",
    "OnDevice",
    "Unwrapped",
    "join_columns",
    "redraw_of",
    "refuse_unreached",
]

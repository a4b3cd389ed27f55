"""What users wrap a model with."""

from phalanx.parallel.data_parallel import DataParallel

__all__ = ["DataParallel"]

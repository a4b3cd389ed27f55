"""Containers: modules that users wrap a model with."""

from phalanx.parallel.abstract_parallel import AbstractParallel, ModelParallel
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.distributed_data_parallel import DistributedDataParallel
from phalanx.parallel.on_device import OnDevice

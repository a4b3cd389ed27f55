"""MXNet's executor group, its batches and monitor."""

from phalanx.compat.mxnet.binding import DataBatch, DataDesc
from phalanx.compat.mxnet.group import DataParallelExecutorGroup
from phalanx.compat.mxnet.monitor import Monitor

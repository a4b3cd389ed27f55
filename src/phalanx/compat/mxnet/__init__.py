"""MXNet's executor group, its batches, monitor and base of metrics."""

from phalanx.compat.mxnet.binding import DataBatch, DataDesc
from phalanx.compat.mxnet.eval_metrics import EvalMetric
from phalanx.compat.mxnet.group import DataParallelExecutorGroup
from phalanx.compat.mxnet.monitor import Monitor

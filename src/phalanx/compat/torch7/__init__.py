"""Torch7: the containers of fbcunn and cunn, and explicit passes for any module.

    from phalanx.compat import torch7

    net = torch7.DataParallelTable(0)               # dims and indices count from 0
    net.add(conv_net, ["cpu", "cpu"])
    output = net.forward(input)
    loss = criterion.forward(output, target)        # criterion = torch7.Criterion(nn.MSELoss())
    net.zeroGradParameters()
    gradInput = net.backward(input, criterion.backward(output, target))
    net.updateParameters(lr)

Scripts go over line by line; docs/migrating.md has the names, and what is different.
"""

from phalanx.compat.torch7.containers import (
    GPU,
    AbstractParallel,
    DataParallel,
    DataParallelTable,
    ModelParallel,
)
from phalanx.compat.torch7.explicit import Criterion, Explicit

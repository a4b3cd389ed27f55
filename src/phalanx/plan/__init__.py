"""Pure decisions: who gets how much, what is split, in which order sums are made."""

from phalanx.plan.layout import Layout, cut, flatten, join, num_rows, unflatten
from phalanx.plan.parts import Overlap, overlaps, part_bounds
from phalanx.plan.shares import Shares
from phalanx.plan.slices import check_workloads, equal_sizes, round_robin, workload_sizes
from phalanx.plan.tree import Node, SummationTree

__all__ = [
    "Layout",
    "Node",
    "Overlap",
    "Shares",
    "SummationTree",
    "check_workloads",
    "cut",
    "equal_sizes",
    "flatten",
    "join",
    "num_rows",
    "overlaps",
    "part_bounds",
    "round_robin",
    "unflatten",
    "workload_sizes",
]

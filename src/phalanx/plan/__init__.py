"""Pure decisions: who gets how much, what is split, in which order sums are made."""

from phalanx.plan.arguments import (
    check_argument,
    check_function,
    check_mean_loss,
    check_microbatches,
    read_count,
    read_number,
    read_whole,
    say_numbers,
)
from phalanx.plan.layout import Layout, Rows, open_rows, read_layout
from phalanx.plan.leaves import copy_rows, flatten, leaf_paths, unflatten
from phalanx.plan.merging import Merging, merge_leaves
from phalanx.plan.slices import (
    equal_sizes,
    ranges_of,
    read_weights,
    read_workloads,
    workload_sizes,
)
from phalanx.plan.tree import Node, SummationTree

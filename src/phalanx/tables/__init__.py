"""Parameter tables, on one host or several: workers add deltas to shared rows, and read them."""

from phalanx.tables.embedding import TableEmbedding
from phalanx.tables.shared_module import SharedModule
from phalanx.tables.spec import Uniform
from phalanx.tables.table import KeyTable, Table
from phalanx.tables.table_group import TableGroup, TableOptions, join
from phalanx.tables.updaters import AdaGrad, Adam, Momentum, Nesterov, Sgd, Sum, Updater

__all__ = [
    "AdaGrad",
    "Adam",
    "KeyTable",
    "Momentum",
    "Nesterov",
    "Sgd",
    "SharedModule",
    "Sum",
    "Table",
    "TableEmbedding",
    "TableGroup",
    "TableOptions",
    "Uniform",
    "Updater",
    "join",
]

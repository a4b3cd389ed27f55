"""Parameter tables, on one host or several: workers add deltas to shared rows, and read them."""

from phalanx.tables.embedding import TableEmbedding, TableEmbeddingBag
from phalanx.tables.joining import join
from phalanx.tables.row_initializer import Uniform
from phalanx.tables.shared_module import SharedModule
from phalanx.tables.table import KeyTable, Table
from phalanx.tables.table_group import TableGroup, TableOptions
from phalanx.tables.updaters import (
    AdaGrad,
    Adam,
    DcAsgd,
    Momentum,
    Nesterov,
    RowwiseAdaGrad,
    Sgd,
    Sum,
    Updater,
)

__all__ = [
    "AdaGrad",
    "Adam",
    "DcAsgd",
    "KeyTable",
    "Momentum",
    "Nesterov",
    "RowwiseAdaGrad",
    "Sgd",
    "SharedModule",
    "Sum",
    "Table",
    "TableEmbedding",
    "TableEmbeddingBag",
    "TableGroup",
    "TableOptions",
    "Uniform",
    "Updater",
    "join",
]

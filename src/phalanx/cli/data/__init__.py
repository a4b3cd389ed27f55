"""Data that the CLI trains on, opened by one word: ``open_data("digits", ...)``."""

from phalanx.cli.data.attribute import call_without_arguments, import_attribute
from phalanx.cli.data.data import Data
from phalanx.cli.data.loader import TensorLoader
from phalanx.cli.data.sources import open_data

__all__ = ["Data", "TensorLoader", "call_without_arguments", "import_attribute", "open_data"]

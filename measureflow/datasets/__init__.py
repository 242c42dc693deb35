"""Bundled data and generators of measure pairs, and files of pairs."""

from measureflow.datasets.pair_files import read_pairs, write_pairs
from measureflow.datasets.storms import storms

__all__ = ["read_pairs", "storms", "write_pairs"]

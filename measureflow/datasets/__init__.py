"""Bundled data and generators of measure pairs, and files of pairs."""

from measureflow.datasets.curves import rings, spirals
from measureflow.datasets.letters import letters
from measureflow.datasets.mixtures import clusters, diracs, shared_atoms
from measureflow.datasets.pair_files import read_pairs, write_pairs
from measureflow.datasets.storms import storms

__all__ = [
    "clusters",
    "diracs",
    "letters",
    "read_pairs",
    "rings",
    "shared_atoms",
    "spirals",
    "storms",
    "write_pairs",
]

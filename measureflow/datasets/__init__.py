"""Bundled data and generators of measure pairs, and files of pairs."""

from measureflow.datasets.storms import storms

__all__ = ["storms"]

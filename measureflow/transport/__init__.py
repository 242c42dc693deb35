"""Optimal transport between measures on the sphere."""

from measureflow.transport.displacement import displacement
from measureflow.transport.entropic import sinkhorn_divergence, unbalanced
from measureflow.transport.exact import Solution, assignment, plan, solve, wasserstein, wasserstein_power
from measureflow.transport.maps import Conflict, MapCheck, can_map, find_conflicts
from measureflow.transport.sliced import sliced

__all__ = [
    "Conflict",
    "MapCheck",
    "Solution",
    "assignment",
    "can_map",
    "displacement",
    "find_conflicts",
    "plan",
    "sinkhorn_divergence",
    "sliced",
    "solve",
    "unbalanced",
    "wasserstein",
    "wasserstein_power",
]

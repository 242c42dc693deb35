"""Optimal transport between measures on the sphere."""

from measureflow.transport.displacement import displacement
from measureflow.transport.entropic import EntropicSolution, sinkhorn_divergence, solve_entropic
from measureflow.transport.exact import Solution, assignment, plan, solve, wasserstein, wasserstein_power
from measureflow.transport.maps import Conflict, MapCheck, can_map, find_conflicts
from measureflow.transport.sliced import sliced
from measureflow.transport.unbalanced import UnbalancedSolution, unbalanced

__all__ = [
    "Conflict",
    "EntropicSolution",
    "MapCheck",
    "Solution",
    "UnbalancedSolution",
    "assignment",
    "can_map",
    "displacement",
    "find_conflicts",
    "plan",
    "sinkhorn_divergence",
    "sliced",
    "solve",
    "solve_entropic",
    "unbalanced",
    "wasserstein",
    "wasserstein_power",
]

"""Optimal transport between measures on the sphere."""

from measureflow.transport.exact import Solution, assignment, plan, solve, wasserstein, wasserstein_power

__all__ = ["Solution", "assignment", "plan", "solve", "wasserstein", "wasserstein_power"]

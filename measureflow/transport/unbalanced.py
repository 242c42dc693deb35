"""Unbalanced optimal transport: mass may be left behind or made, at a price."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import kl_div
from torch import Tensor

from measureflow.errors import NotConvergedError
from measureflow.measures import TokenMeasure
from measureflow.transport.costs import Cost, check_problem, pair_name, pairwise_cost
from measureflow.transport.exact import MAX_ITERATIONS, network_simplex

ROUND = 1000
"""Iterations from one look at the duality gap to the next."""
ROUNDING = 1e-14
"""Gap, as a share of the largest numbers in it, that is rounding."""


@dataclass(frozen=True, eq=False)
class UnbalancedSolution:
    """An unbalanced plan, under POT's attribute names.

    Attributes:
        value: (*batch) <P, d^p / p> + reach^p (KL(P 1 | a) + KL(P^T 1 | b)).
        plan: (*batch, n, m) P; its total is the mass carried, at most 1; 0 on padding. A constant.
        potentials: (*batch, n) and (*batch, m), -reach^p log(P 1 / a) and the same for b; 0 on padding. Constants.
        gap: (*batch) how far `value` may be above the least, by a feasible point of the dual.
    """

    value: Float[Tensor, "*batch"]
    plan: Float[Tensor, "*batch n m"]
    potentials: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]
    gap: Float[Tensor, "*batch"]


def unbalanced(
    mu: TokenMeasure,
    nu: TokenMeasure,
    reach: float,
    p: float = 2,
    cost: Cost = "geodesic",
    *,
    tolerance: float = 0.01,
    max_iterations: int = 100_000,
) -> UnbalancedSolution:
    """Transport that carries an atom only if it is worth it: the plan of least

        <P, d^p / p> + reach^p (KL(P 1 | a) + KL(P^T 1 | b)).

    KL(m | a) = Σ m log(m / a) - m + a. A single atom moved by d keeps the share exp(-d^p / (2 p reach^p)) of its mass;
    reach -> ∞ is W_p^p / p. No entropy. Solved pair by pair in float64 by POT's majorisation-minimisation until the
    duality gap is small enough: storms of one season take 0.1 s to 4 s, longest at a reach near 2 rad, where the
    steps are too small for a tolerance of 1e-3.

    Differentiable in the points, the plan held fixed; not in the weights.

    Args:
        mu, nu: measures, matched up by broadcasting of their batches.
        reach: distance (in the units of the cost) up to which mass is rather carried than made.
        p: power of the distance, at least 1.
        cost: "geodesic" (radians) or "chordal".
        tolerance: gap allowed, as a share of the value.
        max_iterations: of the solver, a pair.

    Raises:
        ValueError: the measures do not fit together, or an option is out of range.
        NotConvergedError: the gap is not reached; the pair, the gap and the mass of its plan are named.

    Source: Chapel, Flamary, Wu, Févotte, Gasso (2021), "Unbalanced optimal transport through non-negative penalized
    linear regression".

    >>> mu = TokenMeasure(torch.eye(2, dtype=torch.float64)[:1])
    >>> moved = TokenMeasure(torch.eye(2, dtype=torch.float64)[1:])
    >>> unbalanced(mu, moved, reach=math.pi / 2).plan  # exp(-1/4)
    tensor([[0.7788]], dtype=torch.float64)
    """
    batch = check_problem(mu, nu, p, cost)
    for name, number in (("reach", reach), ("tolerance", tolerance), ("max_iterations", max_iterations)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name}: expected a positive number, got {number}")
    dtype, rho = torch.promote_types(mu.points.dtype, nu.points.dtype), reach**p
    x, y = (side.points.double().expand(*batch, *side.points.shape[-2:]) for side in (mu, nu))
    table = pairwise_cost(x, y, p, cost) / p
    costs = table.detach().reshape(-1, *table.shape[-2:]).cpu().numpy()
    a, b = (
        side.weights.detach().double().expand(*batch, -1).reshape(len(costs), -1).cpu().numpy() for side in (mu, nu)
    )
    plans, f, g = np.zeros_like(costs), np.zeros_like(a), np.zeros_like(b)
    penalties, gaps = np.zeros(len(costs)), np.zeros(len(costs))
    for pair in range(len(costs)):
        rows, cols = a[pair].nonzero()[0], b[pair].nonzero()[0]
        source, target = a[pair, rows] / a[pair].sum(), b[pair, cols] / b[pair].sum()
        matrix = costs[pair][np.ix_(rows, cols)]
        plan, gaps[pair] = _solve(matrix, source, target, rho, tolerance, max_iterations, pair_name(batch, pair))
        plans[pair][np.ix_(rows, cols)] = plan
        penalties[pair] = _penalty(plan, source, target, rho)
        f[pair, rows], g[pair, cols] = _potential(plan.sum(1), source, rho), _potential(plan.sum(0), target, rho)

    def batched(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(table.device).reshape((*batch, *values.shape[1:]))

    carried = batched(plans)
    value = (carried * table).sum((-1, -2)) + batched(penalties)
    potentials = (batched(f).to(dtype), batched(g).to(dtype))
    return UnbalancedSolution(value.to(dtype), carried.to(dtype), potentials, batched(gaps).to(dtype))


def _solve(
    matrix: np.ndarray, a: np.ndarray, b: np.ndarray, rho: float, tolerance: float, max_iterations: int, pair: str
) -> tuple[np.ndarray, float]:
    import ot  # slow to load

    # The balanced problem gives a start, and where rho is large already the answer: its plan in the best proportion,
    # certified by its own potentials.
    balanced, potentials = network_simplex(matrix, a, b, MAX_ITERATIONS, pair)
    plan = balanced * math.exp(-float((balanced * matrix).sum()) / (2 * rho))
    known = _height(*potentials, a, b, rho)
    value, gap = math.inf, math.inf
    for done in range(0, max_iterations + 1, ROUND):
        value = float((plan * matrix).sum()) + _penalty(plan, a, b, rho)
        gap = max(0.0, value - max(known, _dual(plan, matrix, a, b, rho)))
        if gap <= tolerance * value + ROUNDING * (rho + matrix.max()):
            return plan, gap
        # Updates are products, so the start needs mass everywhere.
        start = plan if done else 0.99 * plan + 0.01 * a[:, None] * b[None, :]
        rest = max(1, min(ROUND, max_iterations - done))
        plan = np.asarray(
            ot.unbalanced.mm_unbalanced(a, b, matrix, rho, div="kl", G0=start, numItermax=rest, stopThr=0)
        )
    raise NotConvergedError(
        f"{pair}unbalanced transport did not converge in {max_iterations} iterations: its value {value:.6g} may be "
        f"{gap:.3g} too high; the plan carries mass {plan.sum():.6g}; raise max_iterations or tolerance"
    )


def _penalty(plan: np.ndarray, a: np.ndarray, b: np.ndarray, rho: float) -> float:
    left, right = plan.sum(1), plan.sum(0)
    return rho * float(kl_div(left, a).sum() + kl_div(right, b).sum())


def _potential(mass: np.ndarray, given: np.ndarray, rho: float) -> np.ndarray:
    return -rho * np.log(np.maximum(mass, np.finfo(float).tiny) / given)


def _dual(plan: np.ndarray, matrix: np.ndarray, a: np.ndarray, b: np.ndarray, rho: float) -> float:
    """The dual rho (<a, 1 - e^{-f/rho}> + <b, 1 - e^{-g/rho}>) at a feasible f + g <= C: a lower bound."""
    # Where an atom is as good as left behind its potential is badly known; past 30 rho it adds less than e^-30.
    f = np.minimum(_potential(plan.sum(1), a, rho), 30 * rho)
    return _height(f, (matrix - f[:, None]).min(0), a, b, rho)


def _height(f: np.ndarray, g: np.ndarray, a: np.ndarray, b: np.ndarray, rho: float) -> float:
    with np.errstate(over="ignore"):  # far below the optimum: minus infinity says so
        return -rho * float(a @ np.expm1(-f / rho) + b @ np.expm1(-g / rho))

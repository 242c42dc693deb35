import math

import numpy as np
import pytest
import torch
from problems import random_measures
from scipy.optimize import minimize

from measureflow.errors import NotConvergedError
from measureflow.measures import TokenMeasure
from measureflow.transport import unbalanced, wasserstein_power
from measureflow.transport.costs import pairwise_cost


def by_scipy(mu: TokenMeasure, nu: TokenMeasure, reach: float) -> float:
    """The dual, maximised over its potentials by scipy's SLSQP."""
    C = pairwise_cost(mu.points, nu.points, 2, "geodesic").numpy() / 2
    a, b, rho = mu.weights.numpy(), nu.weights.numpy(), reach**2
    n, m = C.shape

    def height(z: np.ndarray) -> float:
        return rho * float(a @ np.expm1(-z[:n] / rho) + b @ np.expm1(-z[n:] / rho))

    def room(z: np.ndarray) -> np.ndarray:
        return (C - z[:n, None] - z[None, n:]).ravel()

    solved = minimize(
        height, np.zeros(n + m), method="SLSQP", constraints={"type": "ineq", "fun": room}, options={"maxiter": 500}
    )
    return -solved.fun


@pytest.mark.parametrize("reach", [0.3, 1.0])
def test_value_agrees_with_the_dual_solved_by_scipy(reach):
    mu, nu = random_measures(n=4, d=3, seed=6), random_measures(n=3, d=3, seed=7)
    solution = unbalanced(mu, nu, reach, tolerance=1e-4)
    # SLSQP stops at 1e-6; the value may be above by its gap.
    assert float(solution.value) == pytest.approx(by_scipy(mu, nu, reach), rel=1e-4, abs=2e-6)
    assert 0 <= float(solution.gap) <= 1e-4 * float(solution.value)


def test_two_atoms_have_a_closed_form():
    x, y = (TokenMeasure(torch.eye(3, dtype=torch.float64)[i : i + 1]) for i in (0, 1))
    reach, c = 0.8, (math.pi / 2) ** 2 / 2
    solution = unbalanced(x, y, reach)
    # P = exp(-c / 2 reach²) makes the derivative c + 2 reach² log P vanish, and the value is 2 reach² (1 - P).
    mass = math.exp(-c / (2 * reach**2))
    assert float(solution.plan) == pytest.approx(mass, rel=1e-9)
    assert float(solution.value) == pytest.approx(2 * reach**2 * (1 - mass), rel=1e-9)


def test_a_far_reach_is_balanced():
    mu, nu = random_measures(2, n=4, d=3, seed=6), random_measures(2, n=3, d=3, seed=7)
    # Mass given up is of the order cost / reach² = 1e-4.
    torch.testing.assert_close(unbalanced(mu, nu, 100.0).value, wasserstein_power(mu, nu) / 2, rtol=1e-3, atol=0)


def test_a_measure_keeps_all_its_mass_in_its_place():
    mu = random_measures(2, n=5, d=3, seed=1)
    solution = unbalanced(mu, mu, 0.5)
    assert float(solution.value.abs().max()) < 1e-12
    torch.testing.assert_close(solution.plan, torch.diag_embed(mu.weights), rtol=0, atol=1e-6)


def test_p23_padding_has_no_mass_and_changes_nothing():
    weights = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    mu = TokenMeasure(torch.eye(3, dtype=torch.float64), weights)
    nu = random_measures(n=3, d=3, seed=8)
    padded, plain = unbalanced(mu, nu, 0.5), unbalanced(TokenMeasure(mu.atoms()), nu, 0.5)
    assert bool((padded.plan[1] == 0).all())
    assert padded.potentials[0][1] == 0
    torch.testing.assert_close(padded.plan[[0, 2]], plain.plan, rtol=0, atol=1e-15)


def test_the_gradient_in_the_points_is_that_of_finite_differences():
    mu, nu = random_measures(n=4, d=3, seed=2), random_measures(n=3, d=3, seed=3)
    x = mu.points.clone().requires_grad_()
    unbalanced(mu.with_points(x), nu, 0.7, tolerance=1e-6).value.backward()
    turn = torch.linalg.matrix_exp(1e-4 * torch.tensor([[0.0, 1, 0], [-1, 0, 2], [0, -2, 0]], dtype=torch.float64))
    ahead, back = (unbalanced(mu.with_points(mu.points @ Q), nu, 0.7, tolerance=1e-6).value for Q in (turn, turn.mT))
    along = (x.grad * ((mu.points @ turn - mu.points @ turn.mT) / 2)).sum()
    # The values are off by 1e-6 of themselves, their difference is 1e-4 of them.
    assert float(along) == pytest.approx(float(ahead - back) / 2, rel=0.05)


def test_p29_not_converged_names_pair_gap_and_mass():
    mu, nu = random_measures(2, n=9, d=3, seed=4), random_measures(2, n=8, d=3, seed=5)
    with pytest.raises(NotConvergedError, match=r"pair 0: unbalanced .* 10 iterations.* too high; .* mass 0\.\d+"):
        unbalanced(mu, nu, 0.5, tolerance=1e-12, max_iterations=10)


@pytest.mark.bad_input
@pytest.mark.parametrize("reach", [0.0, -1.0, math.inf, math.nan])
def test_reach_out_of_range_is_an_error(reach):
    mu = random_measures(n=3, d=3, seed=0)
    with pytest.raises(ValueError, match="reach: expected a positive number"):
        unbalanced(mu, mu, reach)

import numpy as np
import ot
import pytest
import torch

from measureflow.measures import TokenMeasure
from measureflow.transport.costs import pairwise_cost
from measureflow.transport.entropic import sinkhorn_divergence, unbalanced
from measureflow.transport.exact import wasserstein_power
from tests.problems import random_measures


def entropic_by_pot(mu: TokenMeasure, nu: TokenMeasure, reg: float, cost: str) -> float:
    M = pairwise_cost(mu.points, nu.points, 2, cost).numpy() / 2
    a, b = mu.weights.numpy(), nu.weights.numpy()
    P = ot.sinkhorn(a, b, M, reg, method="sinkhorn_log", numItermax=20_000, stopThr=1e-12)
    return float((P * M).sum() + reg * (P * np.log(P / np.outer(a, b))).sum())


@pytest.mark.parametrize("cost", ["geodesic", "chordal"])
def test_p26_agrees_with_pot_after_the_conversion(cost):
    mu, nu = random_measures(n=6, d=3, seed=0), random_measures(n=5, d=3, seed=1)
    blur = 0.5
    cross, first, second = (entropic_by_pot(*pair, blur**2, cost) for pair in ((mu, nu), (mu, mu), (nu, nu)))
    # What lowering the blur leaves: 2e-4 at scaling 0.98.
    expected = cross - (first + second) / 2
    assert float(sinkhorn_divergence(mu, nu, blur, cost, scaling=0.99)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("eps", [1e-3, 1e-6])
def test_p24_small_blur_gives_half_the_squared_distance(eps):
    mu, nu = random_measures(n=6, d=3, seed=0), random_measures(n=5, d=3, seed=1)
    half = wasserstein_power(mu, nu) / 2
    # Entropy moves the value by eps log n at most; what lowering the blur leaves is below 1 % at this scaling.
    torch.testing.assert_close(sinkhorn_divergence(mu, nu, eps**0.5, scaling=0.99), half, rtol=0.01, atol=5 * eps)


@pytest.mark.parametrize("eps", [1e-2, 1e-6])
def test_p23_atoms_of_weight_zero_change_nothing(eps):
    mu, nu = random_measures(2, n=5, d=3, seed=2), random_measures(2, n=4, d=3, seed=3)
    padded = TokenMeasure(
        torch.cat([mu.points, torch.full((2, 3, 3), torch.nan, dtype=torch.float64)], 1),
        torch.cat([mu.weights, torch.zeros(2, 3, dtype=torch.float64)], 1),
    )
    blur = eps**0.5
    plain = sinkhorn_divergence(mu, nu, blur)
    torch.testing.assert_close(sinkhorn_divergence(padded, nu, blur), plain, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sinkhorn_divergence(mu[1], nu[1], blur), plain[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_p25_divergence_of_a_measure_with_itself_is_0(dtype):
    mu = random_measures(2, n=30, d=3, seed=4, dtype=dtype)
    # Roundings of potentials of size 1.
    assert sinkhorn_divergence(mu, mu).abs().max() <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("cost", ["geodesic", "chordal"])
def test_p28_gradients_at_coincident_atoms_are_finite(cost):
    mu = random_measures(n=5, d=3, seed=5)
    x = mu.points[[0, 0, 1, 2, 3]].clone().requires_grad_()
    w = torch.tensor([0.2, 0.2, 0.3, 0.3, 0.0], dtype=torch.float64, requires_grad=True)
    sinkhorn_divergence(TokenMeasure(x, w), mu, cost=cost).backward()
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.isfinite().all()
    assert w.grad.isfinite().all()
    assert (x.grad[4] == 0).all()
    assert w.grad[4] == 0
    x.grad = None
    same = TokenMeasure(x, w)
    sinkhorn_divergence(same, TokenMeasure(x.detach(), w.detach()), cost=cost).backward()
    # The self term cancels the cross term up to roundings and what lowering the blur leaves.
    assert x.grad.abs().max() < 1e-3


def test_unbalanced_far_reach_is_balanced():
    mu, nu = random_measures(2, n=4, d=3, seed=6), random_measures(2, n=3, d=3, seed=7)
    solution = unbalanced(mu, nu, reach=100.0)
    # Mass given up is of the order cost / reach² = 1e-4.
    torch.testing.assert_close(solution.value, wasserstein_power(mu, nu) / 2, rtol=1e-3, atol=0)


def test_unbalanced_between_two_atoms_is_the_closed_form():
    x, y = (TokenMeasure(torch.eye(3, dtype=torch.float64)[i : i + 1]) for i in (0, 1))
    reach, c = 0.8, (torch.pi / 2) ** 2 / 2
    solution = unbalanced(x, y, reach)
    # P = exp(-c / 2 reach²) makes the derivative c + 2 reach² log P vanish, and the value is 2 reach² (1 - P).
    mass = np.exp(-c / (2 * reach**2))
    assert float(solution.plan) == pytest.approx(mass, rel=1e-5)
    assert float(solution.value) == pytest.approx(2 * reach**2 * (1 - mass), rel=1e-9)


def test_unbalanced_padding_has_no_mass():
    mu = TokenMeasure(torch.eye(3, dtype=torch.float64), torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64))
    solution = unbalanced(mu, random_measures(n=3, d=3, seed=8), reach=0.5)
    assert (solution.plan[1] == 0).all()
    assert solution.potentials[0][1] == 0


@pytest.mark.bad_input
@pytest.mark.parametrize("blur", [0.0, -1.0, 4.0])
def test_blur_out_of_range_is_an_error(blur):
    mu = random_measures(n=3, d=3, seed=0)
    with pytest.raises(ValueError, match="blur: expected a length"):
        sinkhorn_divergence(mu, mu, blur)

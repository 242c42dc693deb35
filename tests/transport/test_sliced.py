import math

import numpy as np
import ot
import pytest
import torch

from measureflow import sphere
from measureflow.measures import TokenMeasure
from measureflow.transport.exact import wasserstein
from measureflow.transport.sliced import circle_power, sliced
from tests.problems import random_measures


@pytest.mark.parametrize("p", [1, 2, 3])
def test_on_the_circle_it_is_the_exact_distance(p):
    mu, nu = random_measures(6, n=7, d=2, seed=0), random_measures(6, n=5, d=2, seed=1)
    # The p-th root of a rounding; both sides are exact.
    torch.testing.assert_close(2 * math.pi * sliced(mu, nu, p), wasserstein(mu, nu, p), rtol=1e-10, atol=0)


@pytest.mark.parametrize("p", [1, 2])
def test_circle_agrees_with_pot(p):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(6, generator=generator).double(), torch.rand(9, generator=generator).double()
    a, b = (torch.full_like(v, 1 / len(v)) for v in (x, y))
    expected = ot.wasserstein_circle(x.numpy(), y.numpy(), p=p)[0]
    # POT stops its search at 1e-6.
    assert float(circle_power(x, a, y, b, p)) == pytest.approx(expected, abs=1e-6)


def test_sphere_agrees_with_pot_in_the_mean():
    mu, nu = random_measures(n=6, d=3, seed=2), random_measures(n=8, d=3, seed=3)
    expected = ot.sliced_wasserstein_sphere(
        mu.points.numpy(), nu.points.numpy(), mu.weights.numpy(), nu.weights.numpy(), n_projections=2000, seed=0
    )
    # Other circles: two means over 2,000 draws, each off by 1 to 2 %.
    assert float(sliced(mu, nu, projections=2000)) == pytest.approx(float(expected), rel=0.06)


def test_p11_padding_order_and_batch_change_nothing():
    mu, nu = random_measures(3, n=6, d=4, seed=4), random_measures(3, n=5, d=4, seed=5)
    padded = TokenMeasure(
        torch.cat([torch.full((3, 2, 4), torch.nan, dtype=torch.float64), mu.points.flip(-2)], -2),
        torch.cat([torch.zeros(3, 2, dtype=torch.float64), mu.weights.flip(-1)], -1),
    )
    whole = sliced(mu, nu)
    # Sums in another order.
    torch.testing.assert_close(sliced(padded, nu), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(sliced(mu[1], nu[1]), whole[1], rtol=1e-12, atol=0)


def test_p28_gradient_is_right_and_zero_between_copies():
    mu, nu = random_measures(n=5, d=3, seed=6), random_measures(n=4, d=3, seed=7)
    x = mu.points.clone().requires_grad_()
    direction = sphere.tangent(mu.points, torch.ones_like(x))
    (slope,) = torch.autograd.grad(sliced(TokenMeasure(x, mu.weights), nu), x)
    step = 1e-5
    ahead, behind = (sliced(TokenMeasure(sphere.exp(mu.points, s * direction), mu.weights), nu) for s in (step, -step))
    # Central differences: the third derivative times step² = 1e-10, and rounding 1e-16 / step.
    assert float((slope * direction).sum()) == pytest.approx(float((ahead - behind) / (2 * step)), rel=1e-6)
    same = sliced(TokenMeasure(x, mu.weights), mu)
    assert float(same.detach()) == pytest.approx(0, abs=1e-7)
    (slope,) = torch.autograd.grad(same, x)
    assert slope.isfinite().all()


def test_seed_decides():
    mu, nu = random_measures(n=5, d=3, seed=8), random_measures(n=5, d=3, seed=9)
    assert torch.equal(sliced(mu, nu, seed=1), sliced(mu, nu, seed=1))
    assert not torch.equal(sliced(mu, nu, seed=1), sliced(mu, nu, seed=2))
    assert np.isfinite(float(sliced(mu.to(torch.float32), nu.to(torch.float32))))


@pytest.mark.bad_input
def test_no_projections_is_an_error():
    mu = random_measures(n=3, d=3, seed=0)
    with pytest.raises(ValueError, match="projections: expected at least 1, got 0"):
        sliced(mu, mu, projections=0)

import math

import numpy as np
import ot
import pytest
import torch
from geomloss import SamplesLoss
from problems import random_measures

from measureflow import sphere
from measureflow.datasets import storms
from measureflow.errors import NotConvergedError
from measureflow.measures import TokenMeasure
from measureflow.transport import sinkhorn_divergence, solve_entropic, wasserstein_power
from measureflow.transport.costs import pairwise_cost


def by_pot(mu: TokenMeasure, nu: TokenMeasure, p: float, eps: float, cost: str) -> float:
    M = pairwise_cost(mu.points, nu.points, p, cost).numpy() / p
    a, b = mu.weights.numpy(), nu.weights.numpy()
    P = ot.sinkhorn(a, b, M, eps, method="sinkhorn_log", numItermax=20_000, stopThr=1e-12)
    # POT's own value leaves the entropy out.
    return float((P * M).sum() + eps * (P * np.log(P / np.outer(a, b))).sum())


def padded(mu: TokenMeasure, rows: int) -> TokenMeasure:
    points = torch.nn.functional.pad(mu.points, (0, 0, 0, rows), value=math.nan)
    return TokenMeasure(points, torch.nn.functional.pad(mu.weights, (0, rows)))


@pytest.mark.parametrize("cost", ["geodesic", "chordal"])
@pytest.mark.parametrize("p", [1, 2])
def test_p26_agrees_with_pot_after_the_conversion(cost, p):
    mu, nu = random_measures(n=6, d=3, seed=0), random_measures(n=5, d=3, seed=1)
    blur = 0.5
    cross, first, second = (by_pot(*pair, p, blur**p, cost) for pair in ((mu, nu), (mu, mu), (nu, nu)))
    found = float(sinkhorn_divergence(mu, nu, p, cost, blur=blur, tolerance=1e-10))
    # POT stops at 1e-12 of the mass.
    assert found == pytest.approx(cross - (first + second) / 2, rel=1e-9)


def test_p26_agrees_with_geomloss_at_its_slowest():
    mu, nu = random_measures(3, n=6, d=3, seed=0), random_measures(3, n=5, d=3, seed=1)
    loss = SamplesLoss(
        "sinkhorn",
        p=2,
        blur=0.3,
        scaling=0.999,
        diameter=math.pi,
        cost=lambda x, y: pairwise_cost(x, y, 2, "geodesic") / 2,
        backend="tensorized",
    )
    expected = loss(mu.weights, mu.points, nu.weights, nu.points)
    # geomloss cools and never iterates at the end: 2e-3 is left here at 0.99, 2e-4 at 0.999.
    torch.testing.assert_close(sinkhorn_divergence(mu, nu, blur=0.3), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("p", [1, 2])
def test_both_solvers_end_at_the_same_value(p):
    mu, nu = random_measures(2, n=6, d=3, seed=2), random_measures(2, n=5, d=3, seed=3)
    newton = sinkhorn_divergence(mu, nu, p, blur=0.5)
    other = sinkhorn_divergence(mu, nu, p, blur=0.5, solver="geomloss", tolerance=0.1)
    # The dual value errs by the square of the mass error, 0.06.
    torch.testing.assert_close(other, newton, rtol=4e-3, atol=0)


@pytest.mark.parametrize("share", [1e-3, 1e-6])
def test_p24_small_regulariser_gives_half_the_squared_distance(share):
    mu, nu = random_measures(3, n=9, d=3, seed=0), random_measures(3, n=7, d=3, seed=1)
    eps = share * math.pi**2 / 2
    solution = solve_entropic(mu, nu, blur=eps**0.5)
    assert bool((solution.error < 1e-6).all())
    half = wasserstein_power(mu, nu) / 2
    # The entropy of a plan is between 0 and that of its marginals, log 9 at most; the blurred plan costs more.
    assert bool((solution.value >= half - 1e-6).all())
    assert bool((solution.value <= half + eps * math.log(9 * 7)).all())


def test_p24_storms_converge_at_any_blur():
    pairs = storms(years=[2015, 2020])
    half = wasserstein_power(pairs.source, pairs.target) / 2
    for blur in (0.05, 0.01, 1e-3):
        solution = solve_entropic(pairs.source, pairs.target, blur=blur)
        assert bool((solution.error < 1e-6).all()), blur
        assert bool((solution.value - half).abs().max() < blur**2 * 2 * math.log(120)), blur


def test_the_plan_is_a_plan_and_its_potentials_make_it():
    mu, nu = padded(random_measures(2, n=6, d=3, seed=4), 2), random_measures(2, n=5, d=3, seed=5)
    solution = solve_entropic(mu, nu, blur=0.4, tolerance=1e-9)
    torch.testing.assert_close(solution.plan.sum(-1), mu.weights, rtol=0, atol=1e-14)
    torch.testing.assert_close(solution.plan.sum(-2), nu.weights, rtol=0, atol=1e-9)
    f, g = solution.potentials
    C = pairwise_cost(mu.points, nu.points, 2, "geodesic") / 2
    density = torch.exp((f.unsqueeze(-1) + g.unsqueeze(-2) - C) / 0.4**2)
    made = mu.weights.unsqueeze(-1) * nu.weights.unsqueeze(-2) * density
    torch.testing.assert_close(made, solution.plan, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close((mu.weights * f).sum(-1), (nu.weights * g).sum(-1), rtol=0, atol=1e-14)
    # Primal: the plan's cost and relative entropy; the dual value differs by the square of the error.
    entropy = torch.special.xlogy(solution.plan, density).sum((-1, -2))
    torch.testing.assert_close((solution.plan * C).sum((-1, -2)) + 0.16 * entropy, solution.value, rtol=1e-8, atol=0)


@pytest.mark.parametrize("blur", [0.3, 1e-3])
def test_p23_atoms_of_weight_zero_change_nothing(blur):
    mu, nu = random_measures(2, n=5, d=3, seed=2), random_measures(2, n=4, d=3, seed=3)
    plain = sinkhorn_divergence(mu, nu, blur=blur)
    # Both are within 1e-6 of mass of the limit, and the value within its square.
    torch.testing.assert_close(sinkhorn_divergence(padded(mu, 3), padded(nu, 1), blur=blur), plain, rtol=0, atol=1e-9)
    torch.testing.assert_close(sinkhorn_divergence(mu[1], nu[1], blur=blur), plain[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_p25_divergence_of_a_measure_with_its_copy_is_0(dtype):
    mu = random_measures(2, n=30, d=3, seed=4, dtype=dtype)
    copy = TokenMeasure(mu.points.clone(), mu.weights.clone())
    assert bool((sinkhorn_divergence(mu, copy) == 0).all())


def test_p25_nearly_equal_measures_are_within_the_stated_error_of_0():
    mu = random_measures(5, n=40, d=3, seed=4)
    moved = mu.with_points(sphere.project(mu.points + 1e-9 * random_measures(5, n=40, d=3, seed=5).points))
    value = sinkhorn_divergence(mu, moved)
    assert bool((value.abs() < 1e-6 * math.pi**2 / 2).all())


def test_rotation_and_order_change_nothing():
    mu, nu = random_measures(n=6, d=4, seed=0), random_measures(n=5, d=4, seed=1)
    Q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))).Q
    plain = sinkhorn_divergence(mu, nu, blur=0.3)
    turned = sinkhorn_divergence(mu.with_points(mu.points @ Q), nu.with_points(nu.points @ Q), blur=0.3)
    order = torch.tensor([4, 2, 0, 1, 5, 3])
    shuffled = sinkhorn_divergence(TokenMeasure(mu.points[order], mu.weights[order]), nu, blur=0.3)
    torch.testing.assert_close(turned, plain, rtol=0, atol=1e-10)
    torch.testing.assert_close(shuffled, plain, rtol=0, atol=1e-10)


def test_gradients_are_those_of_finite_differences():
    mu, nu = random_measures(2, n=6, d=3, seed=6), random_measures(2, n=5, d=3, seed=7)
    g = torch.Generator().manual_seed(8)
    step, change = (torch.randn(mu.weights.shape + s, generator=g, dtype=torch.float64) for s in ((3,), ()))
    step, change = sphere.tangent(mu.points, step), 0.01 * (change - change.mean(-1, keepdim=True))

    def value(t: float | torch.Tensor) -> torch.Tensor:
        moved = TokenMeasure(sphere.exp(mu.points, t * step), mu.weights + t * change)
        return sinkhorn_divergence(moved, nu, blur=0.4, tolerance=1e-11).sum()

    t = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    value(t).backward()
    h = 1e-4
    # h² of the third derivative, some 10.
    assert float(t.grad) == pytest.approx(float(value(h) - value(-h)) / (2 * h), abs=1e-6)


@pytest.mark.parametrize("cost", ["geodesic", "chordal"])
def test_p28_gradients_at_coincident_atoms_are_finite(cost):
    mu = random_measures(n=5, d=3, seed=5)
    x = mu.points[[0, 0, 1, 2, 3]].clone().requires_grad_()
    w = torch.tensor([0.2, 0.2, 0.3, 0.3, 0.0], dtype=torch.float64, requires_grad=True)
    sinkhorn_divergence(TokenMeasure(x, w), mu, cost=cost).backward()
    assert bool(x.grad.isfinite().all())
    assert bool(w.grad.isfinite().all())
    assert bool((x.grad[4] == 0).all())
    assert w.grad[4] == 0
    x.grad = None
    sinkhorn_divergence(TokenMeasure(x, w), TokenMeasure(x.detach(), w.detach()), cost=cost).backward()
    assert float(x.grad.abs().max()) < 1e-12  # the self term cancels the cross term


@pytest.mark.parametrize("solver", ["newton", "geomloss"])
def test_no_grad_stays_no_grad(solver):
    mu = random_measures(n=5, d=3, seed=5)
    with torch.no_grad():
        sinkhorn_divergence(mu, mu, blur=0.5, solver=solver, tolerance=0.1)
        assert not torch.is_grad_enabled()


def test_p29_not_converged_names_pair_error_and_mass():
    pairs = storms(years=[2015, 2020])
    with pytest.raises(NotConvergedError, match=r"pair 0: entropic .*blur 0.05.*geomloss.*off by 0\.\d+.*mass \d"):
        solve_entropic(pairs.source, pairs.target, solver="geomloss")


@pytest.mark.bad_input
def test_options_out_of_range_are_errors():
    mu = random_measures(n=3, d=3, seed=0)
    for blur in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="blur: expected a positive number"):
            sinkhorn_divergence(mu, mu, blur=blur)
    with pytest.raises(ValueError, match="tolerance: expected a positive number, got 0"):
        sinkhorn_divergence(mu, mu, tolerance=0)
    with pytest.raises(ValueError, match="solver: expected one of newton, geomloss, got 'keops'"):
        sinkhorn_divergence(mu, mu, solver="keops")

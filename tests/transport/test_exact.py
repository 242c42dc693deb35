import itertools
import math

import numpy as np
import ot
import pytest
import torch
from problems import random_measures
from scipy.optimize import linprog

from measureflow import sphere
from measureflow.datasets import storms
from measureflow.errors import NotConvergedError
from measureflow.measures import TokenMeasure
from measureflow.transport import assignment, plan, solve, wasserstein, wasserstein_power
from measureflow.transport.costs import pairwise_cost

COSTS = ["geodesic", "chordal"]


def table(mu: TokenMeasure, nu: TokenMeasure, p: float, cost: str) -> np.ndarray:
    """Ground costs by other formulas than the library's."""
    cosine = (mu.points @ nu.points.mT).clamp(-1, 1).numpy()
    return (np.arccos(cosine) if cost == "geodesic" else np.sqrt(2 - 2 * cosine)) ** p


def padded(mu: TokenMeasure, rows: int) -> TokenMeasure:
    points = torch.nn.functional.pad(mu.points, (0, 0, rows, 0), value=math.nan)
    return TokenMeasure(points, torch.nn.functional.pad(mu.weights, (rows, 0)))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [1, 1.5, 2, 3])
def test_value_agrees_with_a_linear_programme_and_with_pot(p, cost):
    mu, nu = random_measures(4, n=6, d=3, seed=0), random_measures(4, n=5, d=3, seed=1)
    found = wasserstein_power(mu, nu, p, cost)
    for i in range(4):
        C, a, b = table(mu[i], nu[i], p, cost), mu.weights[i].numpy(), nu.weights[i].numpy()
        sums = np.vstack([np.kron(np.eye(6), np.ones(5)), np.kron(np.ones(6), np.eye(5))])
        programme = linprog(C.ravel(), A_eq=sums, b_eq=np.concatenate([a, b])).fun
        # acos is good to 1e-8 at worst; HiGHS to 1e-9.
        assert float(found[i]) == pytest.approx(programme, abs=1e-7)
        assert float(found[i]) == pytest.approx(ot.emd2(a, b, C), abs=1e-7)
    torch.testing.assert_close(wasserstein(mu, nu, p, cost), found ** (1 / p), rtol=1e-14, atol=0)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [1, 2])
def test_equal_weights_agree_with_all_permutations(p, cost):
    mu, nu = (TokenMeasure(random_measures(3, n=6, d=4, seed=s).points) for s in (2, 3))
    for i in range(3):
        C = table(mu[i], nu[i], p, cost)
        best = min(itertools.permutations(range(6)), key=lambda o: sum(C[r, o[r]] for r in range(6)))
        value = sum(C[r, best[r]] for r in range(6)) / 6
        assert float(wasserstein_power(mu[i], nu[i], p, cost)) == pytest.approx(value, abs=1e-9)
        assert assignment(mu[i], nu[i], p, cost).tolist() == list(best)


def test_a_small_rotation_of_few_atoms_has_a_closed_form():
    # Each token moves less than half its distance to any other, so it goes to its own image, however small the turn.
    x = torch.eye(3, dtype=torch.float64)
    for angle in (1e-12, 1e-6, 0.1):
        c, s = math.cos(angle), math.sin(angle)
        Q = torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=torch.float64)
        expected = math.sqrt(2 / 3) * angle
        assert float(wasserstein(TokenMeasure(x), TokenMeasure(x @ Q.mT))) == pytest.approx(expected, rel=1e-9)


def test_from_one_atom_there_is_one_plan():
    nu = random_measures(3, n=7, d=3, seed=4)
    north = TokenMeasure(torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64))
    angle = torch.acos(nu.points[..., 2])
    torch.testing.assert_close(wasserstein(north, nu), (nu.weights * angle**2).sum(-1).sqrt(), rtol=1e-12, atol=0)
    torch.testing.assert_close(plan(north, nu), nu.weights.unsqueeze(-2), rtol=0, atol=1e-15)


@pytest.mark.parametrize("cost", COSTS)
def test_the_dual_certifies_the_plan(cost):
    mu, nu = padded(random_measures(3, n=9, d=3, seed=5), 2), random_measures(3, n=8, d=3, seed=6)
    solution = solve(mu, nu, 2, cost)
    torch.testing.assert_close(solution.plan.sum(-1), mu.weights, rtol=0, atol=1e-15)
    torch.testing.assert_close(solution.plan.sum(-2), nu.weights, rtol=0, atol=1e-15)
    f, g = solution.potentials
    C = pairwise_cost(mu.points, nu.points, 2, cost)
    slack = torch.where((mu.weights > 0).unsqueeze(-1), C - f.unsqueeze(-1) - g.unsqueeze(-2), 0)
    assert float(slack.min()) > -1e-13  # feasible
    half = solution.value / 2
    torch.testing.assert_close((mu.weights * f).sum(-1), half, rtol=1e-12, atol=0)
    torch.testing.assert_close((nu.weights * g).sum(-1), half, rtol=1e-12, atol=0)
    assert bool((f[:, :2] == 0).all())


def test_batches_broadcast_and_pairs_do_not_meet():
    mu, nu = random_measures(4, n=5, d=3, seed=7), random_measures(3, 1, n=6, d=3, seed=8)
    whole = wasserstein(mu, nu)
    assert whole.shape == (3, 4)
    for i, j in itertools.product(range(3), range(4)):
        alone = wasserstein(mu[j], TokenMeasure(nu.points[i, 0], nu.weights[i, 0]))
        torch.testing.assert_close(whole[i, j], alone, rtol=1e-14, atol=0)


def test_p23_padding_changes_nothing_and_has_no_gradient():
    mu, nu = random_measures(3, n=6, d=3, seed=9), random_measures(3, n=5, d=3, seed=10)
    wide = padded(mu, 3)
    x, w = wide.points.clone().requires_grad_(), wide.weights.clone().requires_grad_()
    value = wasserstein(TokenMeasure(x, w), padded(nu, 2))
    assert torch.equal(value, wasserstein(mu, nu))
    value.sum().backward()
    assert bool((x.grad[:, :3] == 0).all())
    assert bool((w.grad[:, :3] == 0).all())
    equal = TokenMeasure(mu.points)
    assert torch.equal(wasserstein(padded(equal, 1), nu), wasserstein(equal, nu))
    assert assignment(padded(equal, 1), padded(equal, 2)).tolist() == [[-1, 2, 3, 4, 5, 6, 7]] * 3


def test_distance_axioms_and_rotations():
    a, b, c = (random_measures(5, n=n, d=3, seed=s) for n, s in ((6, 11), (5, 12), (4, 13)))
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    for p in (1, 2):
        ab = wasserstein(a, b, p)
        torch.testing.assert_close(wasserstein(b, a, p), ab, rtol=1e-12, atol=0)
        assert bool((ab <= wasserstein(a, c, p) + wasserstein(c, b, p)).all())
        turned = wasserstein(a.with_points(a.points @ Q), b.with_points(b.points @ Q), p)
        torch.testing.assert_close(turned, ab, rtol=1e-12, atol=0)
    assert bool((wasserstein(a, b, 1) <= wasserstein(a, b, 2)).all())
    assert bool((wasserstein(a, b, cost="chordal") <= wasserstein(a, b)).all())


def test_every_atom_twice_at_half_the_weight_changes_nothing():
    mu, nu = random_measures(2, n=5, d=3, seed=14), random_measures(2, n=4, d=3, seed=15)
    twice = TokenMeasure(mu.points.repeat(1, 2, 1), mu.weights.repeat(1, 2) / 2)
    torch.testing.assert_close(wasserstein(twice, nu), wasserstein(mu, nu), rtol=1e-12, atol=0)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [1, 2])
def test_gradients_are_those_of_finite_differences(p, cost):
    mu, nu = random_measures(3, n=6, d=3, seed=16), random_measures(3, n=5, d=3, seed=17)
    g = torch.Generator().manual_seed(18)
    steps = [sphere.tangent(m.points, torch.randn(m.points.shape, generator=g, dtype=torch.float64)) for m in (mu, nu)]
    changes = [0.01 * torch.randn(m.weights.shape, generator=g, dtype=torch.float64) for m in (mu, nu)]
    changes = [c - c.mean(-1, keepdim=True) for c in changes]

    def value(t: float | torch.Tensor, points: float, weights: float) -> torch.Tensor:
        moved = [
            TokenMeasure(sphere.exp(m.points, points * t * s), m.weights + weights * t * c)
            for m, s, c in zip((mu, nu), steps, changes, strict=True)
        ]
        return wasserstein(*moved, p, cost).sum()

    h = 1e-5
    for points, weights in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        t = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
        value(t, points, weights).backward()
        central = (value(h, points, weights) - value(-h, points, weights)) / (2 * h)
        # h² of the third derivative, and 1e-16 / h of rounding.
        assert float(t.grad) == pytest.approx(float(central), rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_p27_copies_are_at_distance_0_with_gradient_0(p, cost, dtype):
    for mu in (
        random_measures(2, n=40, d=3, seed=19, dtype=dtype),
        TokenMeasure(sphere.uniform(2, 40, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)),
    ):
        x, w = mu.points.clone().requires_grad_(), mu.weights.clone().requires_grad_()
        value = wasserstein(TokenMeasure(x, w), mu, p, cost)
        assert bool((value == 0).all())
        value.sum().backward()
        assert bool((x.grad == 0).all())
        assert bool(w.grad.isfinite().all())


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [1, 2])
def test_p28_gradients_at_coincident_and_antipodal_atoms_are_finite(p, cost):
    x = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 2]].requires_grad_()
    y = torch.stack([x[0].detach(), -x[1].detach(), x[2].detach(), x[2].detach()])
    for nu in (TokenMeasure(y), TokenMeasure(y[:2], torch.tensor([0.3, 0.7], dtype=torch.float64))):
        (slope,) = torch.autograd.grad(wasserstein(TokenMeasure(x), nu, p, cost), x)
        assert bool(slope.isfinite().all())
        # A distance of at least 1/2 is a mean of angles whose slopes are at most 1.
        assert float(slope.norm()) < 4


def test_p21_weights_of_two_dtypes_are_one_problem():
    mu = TokenMeasure(sphere.uniform(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float32))
    nu = random_measures(n=7, d=3, seed=1)
    found = plan(mu, nu)
    assert found.dtype == torch.float64
    assert float(found.sum()) == pytest.approx(1, abs=1e-15)
    assert wasserstein(mu, nu).dtype == torch.float64
    assert wasserstein(mu, mu).dtype == torch.float32


@pytest.mark.bad_input
def test_p22_whole_numbers_never_reach_the_solver():
    with pytest.raises(TypeError, match=r"points: expected a floating-point tensor, got torch\.int64"):
        wasserstein(TokenMeasure(torch.eye(3, dtype=torch.int64)), random_measures(n=3, d=3, seed=0))


def test_several_source_atoms_to_a_target():
    nu = TokenMeasure(random_measures(3, n=4, d=3, seed=20).points)
    near = nu.points.repeat_interleave(3, dim=1)
    mu = TokenMeasure(sphere.project(near + 1e-3 * random_measures(3, n=12, d=3, seed=21).points))
    assert assignment(mu, nu).tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]] * 3


def test_storms_agree_with_pot():
    pairs = storms(years=[2019, 2020])
    found = wasserstein(pairs.source, pairs.target)
    for i, pair in enumerate(pairs):
        C = table(TokenMeasure(pair.source[0].atoms()), TokenMeasure(pair.target[0].atoms()), 2, "geodesic")
        a = np.full(len(C), 1 / len(C))
        assert float(found[i]) == pytest.approx(ot.emd2(a, a, C) ** 0.5, abs=1e-9)


def test_p29_out_of_pivots_is_an_error_that_names_pair_and_mass():
    mu, nu = random_measures(2, n=60, d=3, seed=22), random_measures(2, n=50, d=3, seed=23)
    with pytest.raises(
        NotConvergedError, match=r"pair 0: exact transport did not converge in 3 pivots: .* mass 0\.\d+"
    ):
        solve(mu, nu, max_iterations=3)


@pytest.mark.bad_input
class TestBadInput:
    def test_measures_that_do_not_fit(self):
        mu = random_measures(2, n=3, d=3, seed=0)
        with pytest.raises(ValueError, match="one dimension, got d = 3 and d = 4"):
            wasserstein(mu, random_measures(2, n=3, d=4, seed=0))
        with pytest.raises(ValueError, match=r"got batches \(2,\) and \(3,\)"):
            plan(mu, random_measures(3, n=3, d=3, seed=0))
        with pytest.raises(TypeError, match="nu: expected a TokenMeasure, got Tensor"):
            wasserstein(mu, mu.points)

    def test_options(self):
        mu = random_measures(n=3, d=3, seed=0)
        with pytest.raises(ValueError, match="cost: expected one of geodesic, chordal, got 'euclid'"):
            wasserstein(mu, mu, cost="euclid")
        for p in (0.5, math.inf, math.nan):
            with pytest.raises(ValueError, match="p: expected a finite number of at least 1"):
                wasserstein(mu, mu, p)

    def test_assignment_without_a_matching(self):
        mu = random_measures(2, n=4, d=3, seed=0)
        equal = TokenMeasure(mu.points)
        with pytest.raises(ValueError, match="pair 0: expected source atoms of equal weight"):
            assignment(mu, equal)
        with pytest.raises(ValueError, match=r"pair 0: .* whole number of source atoms per target, got 4 atoms to 3"):
            assignment(equal, TokenMeasure(mu.points[:, :3]))

"""Exact facts about token dynamics with V = I, B = beta I: what the flow has to reproduce."""

import math

import numpy as np
import pytest
import torch
from problems import equiangular, random_measures, simplex_cone
from scipy.integrate import solve_ivp
from scipy.optimize import nnls
from scipy.special import iv, ive

from measureflow import sphere
from measureflow.attention import attend
from measureflow.attention.kernels import Sinkhorn
from measureflow.flow import flow, push_forward
from measureflow.measures import TokenMeasure
from measureflow.transformer import Head, Layer, Transformer


def attention_flow(d: int, beta: float, duration: float, kernel: str = "softmax") -> Transformer:
    identity = torch.eye(d, dtype=torch.float64)
    return Transformer([Layer([Head(identity, beta * identity, kernel)], duration=duration)])


def energy(points: torch.Tensor, weights: torch.Tensor, beta: float) -> torch.Tensor:
    """(1/2 beta) ∬ e^{beta <x, y>} mu(dx) mu(dy)."""
    grown = torch.exp(beta * points @ points.mT)
    return torch.einsum("...i,...ij,...j->...", weights, grown, weights) / (2 * beta)


# --- 1. The energy grows at a known rate


@pytest.mark.parametrize("kernel", ["softmax", "unnormalised"])
def test_energy_grows_at_its_rate(kernel):
    beta, h = 2.0, 1e-3
    theta, mu = attention_flow(3, beta, 1.0, kernel), random_measures(n=8, d=3, seed=0)
    path = flow(theta, mu, times=[0.5 - h, 0.5, 0.5 + h, 1.0])
    before, _, after, _ = energy(path.points, mu.weights, beta)
    v = theta.velocity(path.points[1], mu.weights, 0.5)
    # Softmax: each |x'|² counts with its partition sum Z; unnormalised: dE/dt = ∫ |v|² dmu.
    Z = torch.exp(beta * path.points[1] @ path.points[1].mT) @ mu.weights if kernel == "softmax" else 1.0
    rate = (mu.weights * Z * v.square().sum(-1)).sum()
    # The central difference is off by h² E'''/6, about 1e-6 of the rate.
    assert float((after - before) / (2 * h)) == pytest.approx(float(rate), rel=1e-5)
    assert float(rate) > 0.05


@pytest.mark.parametrize("kernel", ["softmax", "unnormalised"])
def test_energy_never_falls_and_diracs_are_its_maximum(kernel):
    mu = random_measures(6, n=8, d=3, seed=1)
    values = energy(flow(attention_flow(3, 1.0, 12.0, kernel), mu, times=40).points, mu.weights, 1.0)
    assert float((values[1:] - values[:-1]).min()) > -1e-12
    assert float(values.max()) <= math.e / 2 + 1e-12  # one cluster: e^beta / (2 beta)
    assert float(values[-1].max()) > math.e / 2 - 1e-4


# --- 2. Equiangular tokens stay equiangular


@pytest.mark.parametrize(("n", "beta", "start"), [(2, 1.0, -0.9), (3, 4.0, 0.0), (6, 0.5, -0.19), (10, 2.0, 0.3)])
def test_equiangular_cosine_follows_the_scalar_equation(n, beta, start):
    theta, mu, expected = equiangular(n, beta, start, duration=1.5)
    moved = push_forward(theta, mu).points
    cosines = (moved @ moved.mT)[~torch.eye(n, dtype=torch.bool)]
    assert torch.allclose(cosines, torch.full_like(cosines, expected), atol=1e-9)


def test_unnormalised_equiangular_cosine_follows_its_equation():
    n, beta, start, duration = 4, 1.5, -0.2, 0.8
    end = solve_ivp(
        lambda _, r: 2 / n * np.exp(beta * r) * (1 - r) * ((n - 1) * r + 1),
        (0, duration),
        [start],
        method="DOP853",
        rtol=1e-13,
        atol=1e-14,
    ).y[0, -1]
    mu = TokenMeasure(simplex_cone(n, n, start))
    moved = push_forward(attention_flow(n, beta, duration, "unnormalised"), mu).points
    cosines = (moved @ moved.mT)[~torch.eye(n, dtype=torch.bool)]
    assert torch.allclose(cosines, torch.full_like(cosines, float(end)), atol=1e-9)


@pytest.mark.parametrize("solver", ["exact", "dopri8"])
def test_two_orthogonal_tokens_close_as_tanh(solver):
    # n = 2, beta = 0, r(0) = 0: r(t) = tanh t.
    path = flow(attention_flow(2, 0.0, 3.0), TokenMeasure(torch.eye(2, dtype=torch.float64)), times=13, solver=solver)
    cosines = (path.points[:, 0] * path.points[:, 1]).sum(-1)
    assert torch.allclose(cosines, torch.tanh(path.times), atol=1e-9)


@pytest.mark.parametrize(("kernel", "rate"), [("softmax", 2.0), ("unnormalised", 2 * math.e)])
def test_last_approach_is_exponential_at_its_rate(kernel, rate):
    mu = TokenMeasure(simplex_cone(3, 3, 0.0))
    path = flow(attention_flow(3, 1.0, 3.0, kernel), mu, times=[2.5, 3.0])
    # 1 - r = |x - y|²/2, without cancellation.
    gap = (path.points[:, 0] - path.points[:, 1]).square().sum(-1) / 2
    # Corrections to the rate are of the size of the gap.
    assert float(torch.log(gap[0] / gap[1]) / 0.5) == pytest.approx(rate, rel=5 * float(gap[0]) + 1e-6)


# --- 3. Controls: symmetric starts do not move


@pytest.mark.parametrize("n", [2, 4])
def test_antipodal_pair_and_regular_simplex_are_at_rest(n):
    points = simplex_cone(n, n, -1 / (n - 1) + 1e-15)
    mu = TokenMeasure(points / points.norm(dim=-1, keepdim=True))
    moved = push_forward(attention_flow(n, 1.0, 1.0), mu)
    assert torch.allclose(moved.points, mu.points, atol=1e-6)  # the start is off by sqrt(1e-15)


# --- 5. Growth of small waves on the uniform circle


@pytest.mark.parametrize("kernel", ["softmax", "unnormalised"])
@pytest.mark.parametrize(("beta", "k"), [(1.0, 1), (5.0, 1), (5.0, 3), (20.0, 6)])
def test_waves_on_the_circle_grow_at_bessel_rates(kernel, beta, k):
    # lambda_k = k² I_k(beta) / beta for the unnormalised flow, and that over I_0(beta) for softmax.
    rate = k**2 * iv(k, beta) / beta / (iv(0, beta) if kernel == "softmax" else 1)
    grid = torch.arange(256, dtype=torch.float64) * (2 * math.pi / 256)
    size = 1e-6
    angle = grid + size * torch.sin(k * grid)
    mu = TokenMeasure(torch.stack([angle.cos(), angle.sin()], dim=-1))
    duration = 0.5 / rate
    moved = push_forward(attention_flow(2, beta, duration, kernel), mu, rtol=1e-12, atol=1e-14).points
    offset = torch.atan2(
        moved[:, 1] * grid.cos() - moved[:, 0] * grid.sin(), moved[:, 0] * grid.cos() + moved[:, 1] * grid.sin()
    )
    amplitude = 2 * (offset * torch.sin(k * grid)).mean()
    # The wave is small (1e-6, its square is neglected) and written with 16 digits: ten remain.
    assert math.log(float(amplitude) / size) / duration == pytest.approx(rate, rel=1e-5)


def test_fastest_wave_and_the_value_in_the_literature():
    assert 9 * iv(3, 5.0) / 5 == pytest.approx(18.59607, abs=5e-6)
    fastest = {beta: max(range(1, 20), key=lambda k, b=beta: k**2 * iv(k, b)) for beta in (1.0, 5.0, 20.0)}
    assert fastest == {1.0: 1, 5.0: 3, 20.0: 6}


# --- 8. V = I, B = 0 moves each measure by a Möbius map


@pytest.mark.parametrize("solver", ["exact", "dopri8"])
@pytest.mark.parametrize("d", [2, 3, 5])
def test_cross_ratios_are_conserved(d, solver):
    mu = random_measures(3, n=6, d=d, seed=2)
    path = flow(attention_flow(d, 0.0, 2.0), mu, times=5, solver=solver)
    a, b, c, e = (path.points[:, :, i] for i in range(4))

    def chord(x, y):
        return (x - y).norm(dim=-1)

    ratio = chord(a, b) * chord(c, e) / (chord(a, c) * chord(b, e))
    # Chords shrink to about 0.1, so that errors of 1e-10 in tokens are 1e-9 in ratios.
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=2e-8)
    assert float((chord(a, b)[0] / chord(a, b)[-1] - 1).abs().min()) > 0.1


def test_complex_cross_ratio_of_tokens_on_the_circle_is_conserved():
    mu = random_measures(n=5, d=2, seed=3)
    path = flow(attention_flow(2, 0.0, 2.0), mu, times=4)
    a, b, c, e = torch.view_as_complex(path.points).unbind(-1)[:4]
    ratio = (a - c) * (b - e) / ((a - e) * (b - c))
    assert float(ratio.imag.abs().max()) < 1e-8  # four points of one circle
    assert torch.allclose(ratio.real, ratio.real[:1].expand(4), rtol=1e-8)


def test_attention_with_a_temperature_does_change_cross_ratios():
    mu = random_measures(n=6, d=3, seed=2)
    path = flow(attention_flow(3, 2.0, 2.0), mu, times=2)
    a, b, c, e = (path.points[:, i] for i in range(4))
    ratio = (a - b).norm(dim=-1) * (c - e).norm(dim=-1) / ((a - c).norm(dim=-1) * (b - e).norm(dim=-1))
    assert abs(float(ratio[1] / ratio[0]) - 1) > 1e-2


# --- 9. Convex hulls are nested; signs are kept


@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_hulls_are_nested_in_time(beta, generator):
    up = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    mu = TokenMeasure(sphere.von_mises_fisher(up, 4.0, 12, generator=generator))
    path = flow(attention_flow(3, beta, 2.0), mu, times=6)
    for earlier, later in zip(path.points[:-1].numpy(), path.points[1:].numpy(), strict=True):
        # A point is in the geodesic hull of others if it is in their cone.
        assert max(nnls(earlier.T, x)[1] for x in later) < 1e-9
    outside = max(nnls(path.points[-1].numpy().T, x)[1] for x in path.points[0].numpy())
    assert outside > 0.1


def test_mean_along_an_axis_never_changes_sign():
    alpha = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    zero = torch.zeros(3, 3, dtype=torch.float64)
    theta = Transformer([Layer([Head(alpha[:, None] * alpha, zero)], duration=8.0)])
    mu = random_measures(20, n=3, d=3, seed=4)
    for solver in ("exact", "dopri8"):
        path = flow(theta, mu, times=20, solver=solver)
        mean = torch.einsum("ij,tijd,d->ti", mu.weights, path.points, alpha)
        assert {1.0, -1.0} == set(mean[0].sign().tolist())
        assert torch.equal(mean.sign(), mean[:1].sign().expand_as(mean))


# --- 10. Sinkhorn attention after one iteration is softmax attention


def test_one_sinkhorn_iteration_is_the_softmax_flow():
    mu = random_measures(2, n=6, d=3, seed=5)
    ends = [push_forward(attention_flow(3, 2.0, 1.0, kernel), mu) for kernel in ("softmax", Sinkhorn(iterations=1))]
    assert torch.allclose(ends[0].points, ends[1].points, atol=1e-8)


# --- 12. A softmax layer is the posterior of a mixture of von Mises-Fisher distributions


def test_attention_is_the_posterior_mean_direction_of_a_mixture(generator):
    d, kappa = 4, 3.0
    keys = random_measures(n=5, d=d, seed=6)
    x = sphere.uniform(7, d, generator=generator)
    # Density of one component, with its constant: kappa^{d/2-1} / ((2 pi)^{d/2} I_{d/2-1}(kappa)) e^{kappa <m, x>}.
    constant = kappa ** (d / 2 - 1) / ((2 * math.pi) ** (d / 2) * ive(d / 2 - 1, kappa))
    joint = keys.weights.numpy() * constant * np.exp(kappa * (x @ keys.points.mT).numpy() - kappa)
    posterior = joint / joint.sum(1, keepdims=True)
    attended = attend(x, keys.points, keys.weights, kappa * torch.eye(d, dtype=torch.float64))
    assert np.allclose(attended.numpy(), posterior @ keys.points.numpy(), atol=1e-14)

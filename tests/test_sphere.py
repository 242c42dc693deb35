"""Geometry of the sphere: values and gradients, at the ends of every range too."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.special import ive
from scipy.stats import kstest
from torch.autograd import gradcheck, gradgradcheck

from measureflow import sphere

DTYPES = [torch.float32, torch.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
seeds = st.integers(0, 2**31)
dims = st.integers(2, 9)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def frame(seed: int, d: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Two orthogonal unit vectors."""
    x, u = torch.linalg.qr(torch.randn(d, 2, generator=rng(seed), dtype=torch.float64)).Q.mT
    return x.to(dtype), u.to(dtype)


# Projections


@given(seeds, dims, st.floats(-290, 290))
def test_project_gives_length_one_at_any_scale(seed, d, exponent):
    x = torch.randn(5, d, generator=rng(seed), dtype=torch.float64)
    scaled = sphere.project(x * 10.0**exponent)
    assert torch.allclose(scaled.norm(dim=-1), torch.ones(5, dtype=torch.float64), atol=4e-16)
    assert torch.allclose(scaled, sphere.project(x), atol=1e-15)


@pytest.mark.bad_input
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_p02_a_row_that_has_no_direction_is_named(bad):
    x = torch.ones(2, 4, 3)
    x[1, 2] = bad
    with pytest.raises(ValueError, match=rf"measure 1, row 2: expected a finite vector other than zero, got \[{bad}"):
        sphere.project(x)
    with pytest.raises(ValueError, match="row 0: "):
        sphere.project(x[1, 2:])
    with pytest.raises(ValueError, match="the only row: "):
        sphere.project(x[1, 2])


@given(seeds, dims)
def test_tangent_is_orthogonal_and_a_projection(seed, d):
    x, v = sphere.uniform(5, d, generator=rng(seed)), torch.randn(5, d, generator=rng(seed + 1), dtype=torch.float64)
    t = sphere.tangent(x, v)
    assert torch.allclose((x * t).sum(-1), torch.zeros(5, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(sphere.tangent(x, t), t, atol=1e-14)
    assert torch.allclose(t + (x * v).sum(-1, keepdim=True) * x, v, atol=1e-14)


# Distances


@dtypes
@given(seed=seeds, d=dims, angle=st.one_of(st.floats(0, math.pi), st.floats(-12, 0).map(lambda e: 10**e)))
def test_distance_is_the_angle(dtype, seed, d, angle):
    x, u = frame(seed, d)
    y = math.cos(angle) * x + math.sin(angle) * u
    found = float(sphere.distance(x.to(dtype), y.to(dtype)))
    # Rounding the coordinates moves the points by eps each.
    assert found == pytest.approx(angle, abs=4 * eps(dtype), rel=4 * eps(dtype))


@dtypes
def test_p07_gradient_of_distance_is_zero_at_coincident_and_finite_at_antipodal_points(dtype):
    x = sphere.uniform(1000, 3, generator=rng(0), dtype=dtype).requires_grad_()
    for y, expected in ((x.detach().clone(), 0.0), (-x.detach(), math.pi)):
        y.requires_grad_()
        for d in (sphere.distance(x, y), sphere.pairwise_distance(x, y).diagonal()):
            # Squares of rounding errors are no floor: equal rows are at distance 0, not at 1e-4 (or 2e-8).
            assert torch.allclose(d, torch.full_like(d, expected), atol=4 * eps(dtype), rtol=0)
            for gradient in torch.autograd.grad(d.sum(), (x, y)):
                assert bool(gradient.isfinite().all())
                assert float(gradient.norm(dim=-1).max()) <= 1 + 1e-6
                if expected == 0:
                    assert bool((gradient == 0).all())


@dtypes
@pytest.mark.parametrize("size", [1e-300, 1e-20, 1e-9, 1e-5, 1e-3])
def test_p07_gradient_of_distance_has_length_one_beside_the_ends(dtype, size):
    if size < torch.finfo(dtype).tiny:
        return
    x = torch.tensor([0.0, 0.0, 1.0], dtype=dtype)
    for sign in (1.0, -1.0):
        y = torch.tensor([size, 0.0, sign], dtype=dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(sphere.distance(x, y), y)
        tangential = sphere.tangent(x, gradient)
        assert bool(gradient.isfinite().all())
        if size**2 > torch.finfo(dtype).tiny:
            assert torch.allclose(tangential, torch.tensor([sign, 0.0, 0.0], dtype=dtype), atol=2 * size + 1e-6)


@dtypes
def test_pairwise_distance_is_distance_of_all_pairs(dtype):
    x, y = (sphere.uniform(3, n, 4, generator=rng(n), dtype=dtype) for n in (40, 50))
    y[:, :40] = x
    both = sphere.pairwise_distance(x, y)
    one = sphere.distance(x.unsqueeze(-2), y.unsqueeze(-3))
    assert torch.allclose(both, one, atol=8 * eps(dtype))
    # Above 25 rows the usual shortcut leaves 1e-4 between equal rows.
    assert bool((both.diagonal(dim1=-2, dim2=-1) == 0).all())


# Exponential and logarithm


@given(seeds, dims, st.one_of(st.floats(0, 30), st.floats(-300, 0).map(lambda e: 10**e)))
def test_p09_exp_is_exact_for_any_length(seed, d, length):
    x, u = frame(seed, d)
    found = sphere.exp(x, length * u)
    # Rounding the vector turns the end by an ulp of its length.
    assert torch.allclose(found, math.cos(length) * x + math.sin(length) * u, atol=1e-15 + 4e-16 * length, rtol=0)
    assert float((found.norm() - 1).abs()) < 4e-16


@given(seeds, dims, st.floats(-12, math.log10(3)).map(lambda e: 10**e))
def test_p09_log_undoes_exp(seed, d, length):
    x, u = frame(seed, d)
    back = sphere.log(x, sphere.exp(x, length * u))
    # The end point is written with an absolute precision of 1e-16; near π, 1/sin of the angle more.
    assert torch.allclose(back, length * u, atol=1e-14, rtol=0)


@given(seeds, dims)
def test_exp_undoes_log(seed, d):
    x, y = sphere.uniform(2, 6, d, generator=rng(seed))
    far = sphere.distance(x, -y) > 1e-3  # shorter arcs than that to the antipode lose digits in the direction
    assert torch.allclose(sphere.exp(x, sphere.log(x, y))[far], y[far], atol=1e-12)
    assert torch.allclose(sphere.log(x, y).norm(dim=-1)[far], sphere.distance(x, y)[far], atol=1e-12)


@dtypes
@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-8, 9e-4, 1.1e-3, 1.0, math.pi, 1e3])
def test_gradient_of_exp_is_that_of_its_formula(dtype, length):
    x, u = frame(3, 4, dtype)
    v = (length * u).requires_grad_()
    jacobian = torch.autograd.functional.jacobian(lambda v: sphere.exp(x, v), v)
    # Along u the end moves along the arc, across u by sin(length)/length; scaling to length 1 removes the rest.
    end = -math.sin(length) * x + math.cos(length) * u
    sinc = math.sin(length) / length if length else 1.0
    here = math.cos(length) * x + math.sin(length) * u
    across = torch.eye(4, dtype=dtype) - torch.outer(u, u)
    expected = torch.outer(end, u) + sinc * (across - torch.outer(here, across @ here))
    assert bool(jacobian.isfinite().all())
    atol = (8 + 4 * length) * eps(dtype)
    assert torch.allclose(jacobian, expected if length else expected + torch.outer(u, u) * 0, atol=atol)


@dtypes
@pytest.mark.parametrize("angle", [0.0, 1e-30, 1e-8, 9e-4, 1.1e-3, 1.0, 3.0])
def test_gradient_of_log_is_finite_and_right(dtype, angle):
    x, u = frame(3, 4, dtype)
    y = (math.cos(angle) * x + math.sin(angle) * u).requires_grad_()
    jacobian = torch.autograd.functional.jacobian(lambda y: sphere.log(x, y), y)
    assert bool(jacobian.isfinite().all())
    # In directions tangent at y: along the arc 1, across it angle/sin(angle).
    along = -math.sin(angle) * x + math.cos(angle) * u
    across = torch.linalg.qr(torch.stack([x, u, *torch.eye(4, dtype=dtype)[:2]], dim=1)).Q[:, 2]
    ratio = angle / math.sin(angle) if angle else 1.0
    atol = 100 * eps(dtype) / max(math.sin(angle), 0.05) ** 2 if angle > 1 else 20 * eps(dtype)
    assert torch.allclose(jacobian @ along, u, atol=max(atol, 1e-3 * eps(dtype)))
    assert torch.allclose(jacobian @ across, ratio * across, atol=atol)


@pytest.mark.bad_input
@dtypes
def test_p08_antipodal_points_have_no_log_and_no_geodesic(dtype):
    x = sphere.uniform(2, 5, 3, generator=rng(0), dtype=dtype)
    y = sphere.uniform(2, 5, 3, generator=rng(1), dtype=dtype)
    y[1, 3] = -x[1, 3]
    for call in (sphere.log, lambda x, y: sphere.geodesic(x, y, 0.5)):
        with pytest.raises(ValueError, match="measure 1, row 3: the points are antipodal"):
            call(x, y)
        with pytest.raises(ValueError, match="row 3: the points are antipodal"):
            call(x[1], y[1])
        with pytest.raises(ValueError, match="the only row: the points are antipodal"):
            call(x[1, 3], y[1, 3])


@given(seeds, dims, st.floats(0, 1))
def test_geodesic_divides_the_angle(seed, d, share):
    x, y = sphere.uniform(2, 6, d, generator=rng(seed))
    far = sphere.distance(x, -y) > 1e-3
    x, y = x[far], y[far]
    z, whole = sphere.geodesic(x, y, share), sphere.distance(x, y)
    assert torch.allclose(sphere.distance(x, z), share * whole, atol=1e-12)
    assert torch.allclose(sphere.distance(z, y), (1 - share) * whole, atol=1e-12)
    each = torch.full((len(x),), share, dtype=torch.float64)
    assert torch.equal(sphere.geodesic(x, y, each), z)


def test_p10_places_beside_the_date_line_are_joined_across_it():
    lon = torch.tensor([179.0, -179.0], dtype=torch.float64)
    x, y = sphere.from_lonlat(lon, torch.zeros_like(lon))
    lon, lat = sphere.to_lonlat(sphere.geodesic(x, y, 0.5))
    assert abs(float(lon)) == pytest.approx(180, abs=1e-13)
    assert float(lat) == pytest.approx(0, abs=1e-13)
    assert float(sphere.distance(x, y)) == pytest.approx(math.radians(2), rel=1e-14)


# Drift


@given(seeds, dims, st.floats(-4, 4))
def test_drift_solves_its_equation(seed, d, s):
    x, w = sphere.uniform(2, d, generator=rng(seed))
    w_ = w.numpy()
    solved = solve_ivp(
        lambda _, y: (1 if s > 0 else -1) * (w_ - (y @ w_) * y),
        (0, abs(s)),
        x.numpy(),
        "DOP853",
        rtol=1e-12,
        atol=1e-14,
    )
    np.testing.assert_allclose(sphere.drift(x, w, s).numpy(), solved.y[:, -1], atol=1e-9)


@given(seeds, dims, st.floats(-5, 5), st.floats(-5, 5))
def test_drifts_add_their_times(seed, d, s, t):
    x, w = sphere.uniform(6, d, generator=rng(seed)), sphere.uniform(d, generator=rng(seed + 1))
    twice = sphere.drift(sphere.drift(x, w, s), w, t)
    # Near the point that repels, roundings of the first drift grow by e^|t| in the second.
    atol = 1e-15 * (4 + math.exp(abs(s) + abs(t)) if s * t < 0 else 4 + math.exp(abs(t)))
    assert torch.allclose(twice, sphere.drift(x, w, s + t), atol=4 * atol)
    assert torch.allclose(sphere.drift(sphere.drift(x, w, s), w, -s), x, atol=4e-15 * (1 + math.exp(abs(s))))
    assert torch.allclose(sphere.drift(x, w, 0.0), x, atol=1e-15)


@dtypes
@pytest.mark.parametrize("s", [-40.0, -1.0, 1e-3, 2.0, 40.0])
@pytest.mark.parametrize("r", [1e-12, 1e-3, 1.0, math.pi - 1e-3, math.pi - 1e-6])
def test_drift_changes_the_angle_by_its_law(dtype, r, s):
    w = torch.tensor([0.0, 0.0, 1.0], dtype=dtype)
    x = torch.tensor([math.sin(r), 0.0, math.cos(r)], dtype=dtype)
    if float(sphere.distance(x, w)) < r / 2:
        return  # float32 cannot tell the point from w by its coordinates
    found = sphere.drift(x, w, s)
    # tan(r/2) -> e^{-s} tan(r/2); measured from the nearer pole, so that the law is tested in relative terms.
    ratio = math.tan(float(torch.atan2(x[0].double(), x[2].double())) / 2)
    near = 2 * min(math.atan(math.exp(-s) * ratio), math.atan(math.exp(s) / ratio))
    assert float(torch.atan2(found[0].double(), found[2].double().abs())) == pytest.approx(
        near, rel=50 * eps(dtype) * max(1, 1 / (math.pi - r)), abs=1e-45
    )
    assert float(found.norm()) == pytest.approx(1, abs=8 * eps(dtype))


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_drift_away_from_a_pole_keeps_the_digits_of_small_offsets(side):
    # Offsets of 1e-9 grow by e^20: they have to be right to 1e-16 of themselves, not of the sphere.
    w, u = frame(11, 3)
    x = sphere.project(side * w + 1e-9 * u)
    found = sphere.drift(x, w, -20.0 * side).numpy()
    x_, w_ = x.numpy().astype(np.longdouble), w.numpy().astype(np.longdouble)
    offset = x_ - side * w_
    across = np.linalg.norm(offset - (offset @ w_) / (w_ @ w_) * w_)
    angle = 2 * np.arctan(np.exp(np.longdouble(20)) * np.tan(np.arcsin(across) / 2))
    height = float(found @ w.numpy())
    assert height == pytest.approx(side * float(np.cos(angle)), abs=1e-9)
    # The length of w is off by a rounding, which moves x - w by 1e-16 along w only.
    assert math.hypot(*(found - height * w.numpy())) == pytest.approx(float(np.sin(angle)), rel=1e-13)


@dtypes
def test_drift_for_the_longest_times_ends_at_the_poles(dtype):
    longest = {torch.float32: 43.0, torch.float64: 354.0}[dtype]
    x = sphere.uniform(50, 3, generator=rng(0), dtype=dtype)
    w = torch.tensor([0.0, 0.6, 0.8], dtype=dtype)
    for s in (longest, -longest):
        ends = sphere.drift(x, w, s)
        assert torch.allclose(ends, (math.copysign(1, s) * w).expand(50, 3), atol=8 * eps(dtype))
    poles = torch.stack([w, -w])
    assert torch.allclose(sphere.drift(poles, w, longest), poles, atol=8 * eps(dtype))


def test_drift_is_conformal_and_rotates_with_its_frame():
    g = rng(5)
    x, w = sphere.uniform(4, g_d := 4, generator=g), sphere.uniform(4, generator=g)
    Q = torch.linalg.qr(torch.randn(g_d, g_d, generator=g, dtype=torch.float64)).Q
    assert torch.allclose(sphere.drift(x @ Q.mT, Q @ w, 1.3), sphere.drift(x, w, 1.3) @ Q.mT, atol=1e-14)

    def cross_ratio(p):
        a, b, c, e = p
        return (a - b).norm() * (c - e).norm() / ((a - c).norm() * (b - e).norm())

    assert float(cross_ratio(sphere.drift(x, w, 1.3))) == pytest.approx(float(cross_ratio(x)), rel=1e-13)


def test_drift_takes_batches_of_directions_and_times():
    g = rng(6)
    x, w = sphere.uniform(3, 5, 4, generator=g), sphere.uniform(3, 1, 4, generator=g)
    s = torch.randn(3, 1, generator=g, dtype=torch.float64)
    together = sphere.drift(x, w, s)
    for i in range(3):
        assert torch.allclose(together[i], sphere.drift(x[i], w[i, 0], float(s[i, 0])), atol=1e-15)
    each = torch.randn(3, 5, generator=g, dtype=torch.float64)
    assert torch.allclose(sphere.drift(x, w, each)[1, 2], sphere.drift(x[1, 2], w[1, 0], float(each[1, 2])), atol=1e-15)


@pytest.mark.bad_input
def test_drift_names_a_direction_or_time_that_it_cannot_take():
    x = sphere.uniform(4, 3, generator=rng(0))
    with pytest.raises(ValueError, match="w: expected length 1, off by 1; pass w /"):
        sphere.drift(x, 2 * x[0], 1.0)
    with pytest.raises(ValueError, match=r"s: expected \|s\| < 354 for torch.float64, got 355"):
        sphere.drift(x, x[0], -355.0)
    with pytest.raises(ValueError, match="got nan"):
        sphere.drift(x, x[0], float("nan"))


# Derivatives


def test_derivatives():
    g = rng(7)
    x, y, v = (sphere.uniform(2, 3, generator=g).requires_grad_() for _ in range(3))
    w = sphere.uniform(3, generator=g)
    t = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    assert gradcheck(sphere.distance, (x, y))
    assert gradcheck(sphere.pairwise_distance, (x, y))
    assert gradcheck(sphere.exp, (x, v))
    assert gradcheck(sphere.exp, (x, 1e-4 * v.detach().requires_grad_()))
    assert gradcheck(sphere.log, (x, y))
    assert gradcheck(sphere.geodesic, (x, y, t))
    assert gradcheck(lambda x, t: sphere.drift(x, w, t), (x, t))
    assert gradcheck(sphere.project, (3 * x,))
    assert gradgradcheck(sphere.distance, (x, y))
    assert gradgradcheck(sphere.exp, (x, v))
    assert gradgradcheck(sphere.log, (x, y))
    assert gradgradcheck(lambda x, t: sphere.drift(x, w, t), (x, t))


def test_gradient_of_the_drift_in_its_direction():
    # w keeps length 1, so it is differentiated along the sphere.
    x, w = sphere.uniform(2, 2, 3, generator=rng(8))
    assert gradcheck(lambda a: sphere.drift(x, sphere.project(a), 0.7), (2 * w).requires_grad_())


# Samples


@pytest.mark.parametrize("d", [2, 3, 8])
def test_uniform_points_have_the_moments_of_the_sphere(d):
    n = 40_000
    x = sphere.uniform(n, d, generator=rng(d))
    # E x = 0, E x xᵀ = 1/d, E x1⁴ = 3/(d(d+2)); five standard deviations.
    assert float(x.mean(0).abs().max()) < 5 / math.sqrt(d * n)
    assert torch.allclose(x.mT @ x / n, torch.eye(d, dtype=torch.float64) / d, atol=5 / math.sqrt(n) / d)
    assert float((x[:, 0] ** 4).mean()) == pytest.approx(3 / (d * (d + 2)), abs=5 / math.sqrt(n) / d)


@dtypes
def test_samples_are_repeatable_and_follow_the_dtype(dtype):
    a, b = (sphere.uniform(2, 3, 4, generator=rng(1), dtype=dtype) for _ in range(2))
    assert torch.equal(a, b)
    assert a.dtype == dtype
    mean = torch.tensor([0.6, 0.8], dtype=dtype)
    a, b = (sphere.von_mises_fisher(mean, 3.0, 9, generator=rng(1)) for _ in range(2))
    assert torch.equal(a, b)
    assert a.dtype == dtype
    assert float((a.norm(dim=-1) - 1).abs().max()) <= 4 * eps(dtype)
    assert sphere.von_mises_fisher(mean, 3.0, 0, generator=rng(1)).shape == (0, 2)


@dtypes
@pytest.mark.parametrize("d", [2, 3, 8])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 20.0, 1e6])
def test_von_mises_fisher_has_its_mean_length(d, kappa, dtype):
    n = 20_000
    mean, _ = frame(d, d, dtype)
    x = sphere.von_mises_fisher(mean, kappa, n, generator=rng(1)).double()
    # 1 - <mean, x> from chords, without cancellation; its mean is 1 - I_{d/2}(kappa) / I_{d/2-1}(kappa).
    gap = (x - mean.double()).square().sum(-1) / 2
    ratio = ive(d / 2, kappa) / ive(d / 2 - 1, kappa) if kappa else 0.0
    expected = 1 - ratio if kappa < 1e3 else (d - 1) / (2 * kappa)  # leading term, right to 1e-6
    noise = 5 * float(gap.std()) / math.sqrt(n)
    assert float(gap.mean()) == pytest.approx(expected, abs=noise)
    assert noise < 0.06 * expected
    across = sphere.tangent(mean.double().expand_as(x), x)
    assert float(across.mean(0).norm()) < 6 * float(across.norm(dim=-1).square().mean().sqrt()) / math.sqrt(n)


def test_von_mises_fisher_on_the_two_sphere_has_its_distribution():
    mean, _ = frame(2, 3)
    x = sphere.von_mises_fisher(mean, 5.0, 4000, generator=rng(3))
    # On S² the height is distributed as (e^{kappa z} - e^{-kappa}) / (e^kappa - e^{-kappa}).
    result = kstest((x @ mean).numpy(), lambda z: (np.exp(5 * (z - 1)) - np.exp(-10)) / (1 - np.exp(-10)))
    assert result.pvalue > 1e-3


@dtypes
@pytest.mark.parametrize("kappa", [1e20, 1e60, 1e200, 1e308])
def test_von_mises_fisher_of_any_concentration_ends(dtype, kappa):
    mean, _ = frame(2, 3, dtype)
    x = sphere.von_mises_fisher(mean, kappa, 5, generator=rng(3))
    assert torch.allclose(x, mean.expand(5, 3), atol=1e-9 if dtype == torch.float64 else 1e-6)


@pytest.mark.bad_input
def test_von_mises_fisher_names_what_it_cannot_take():
    mean, _ = frame(2, 3)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"concentration: expected a finite number of at least 0, got {bad}"):
            sphere.von_mises_fisher(mean, bad, 5, generator=rng(3))
    with pytest.raises(ValueError, match="mean: expected length 1, off by 1"):
        sphere.von_mises_fisher(2 * mean, 1.0, 5, generator=rng(3))


# Places on the Earth


@given(st.floats(-1000, 1000), st.floats(-89.999, 89.999))
def test_lonlat_round_trip(lon, lat):
    x = sphere.from_lonlat(torch.tensor(lon, dtype=torch.float64), torch.tensor(lat, dtype=torch.float64))
    assert float(x.norm()) == pytest.approx(1, abs=4e-16)
    back_lon, back_lat = (float(a) for a in sphere.to_lonlat(x))
    assert -180 <= back_lon < 180
    turns = (Fraction(back_lon) - Fraction(lon)) / 360
    off = float(turns - round(turns)) * 360
    # A degree of longitude shrinks as cos(latitude); 1e-13 degrees is a rounding of a thousand degrees.
    assert abs(off) * math.cos(math.radians(lat)) < 4e-13
    assert back_lat == pytest.approx(lat, abs=1e-13)


def test_known_places():
    lon = torch.tensor([0.0, 90.0, 180.0, -180.0, -90.0, 12.0, 77.0], dtype=torch.float64)
    lat = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 90.0, -90.0], dtype=torch.float64)
    expected = [[1, 0, 0], [0, 1, 0], [-1, 0, 0], [-1, 0, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]]
    x = sphere.from_lonlat(lon, lat)
    assert torch.allclose(x, torch.tensor(expected, dtype=torch.float64), atol=2e-16)
    back = sphere.to_lonlat(x)
    assert torch.allclose(back[1], lat, atol=1e-14)
    assert bool((back[0][2:4] == -180).all())
    # Reykjavik to Cape Town by the haversine formula.
    a, b = (math.radians(64.1466), math.radians(-21.9426)), (math.radians(-33.9249), math.radians(18.4241))
    haversine = math.sin((a[0] - b[0]) / 2) ** 2 + math.cos(a[0]) * math.cos(b[0]) * math.sin((a[1] - b[1]) / 2) ** 2
    places = sphere.from_lonlat(
        torch.tensor([-21.9426, 18.4241], dtype=torch.float64), torch.tensor([64.1466, -33.9249], dtype=torch.float64)
    )
    km = float(sphere.distance(*places)) * sphere.EARTH_RADIUS_KM
    assert km == pytest.approx(2 * math.asin(math.sqrt(haversine)) * 6371, rel=1e-13)


@pytest.mark.bad_input
def test_places_off_the_earth_are_named():
    lon, lat = torch.zeros(2, 3), torch.zeros(2, 3)
    lat[1, 2] = 90.5
    with pytest.raises(ValueError, match=r"measure 1, row 2: expected latitude in \[-90, 90\] .*, got .*\(0.0, 90.5\)"):
        sphere.from_lonlat(lon, lat)
    lat[1, 2], lon[0, 1] = float("nan"), float("inf")
    with pytest.raises(ValueError, match="measure 0, row 1: expected latitude"):
        sphere.from_lonlat(lon, lat)


# Lifts of flat data


@given(seeds, st.integers(1, 6), st.floats(-6, 6))
def test_stereographic_lift_is_on_the_sphere_and_undone(seed, k, exponent):
    y = torch.randn(6, k, generator=rng(seed), dtype=torch.float64) * 10**exponent
    x = sphere.lift_stereographic(y, 2.5)
    assert torch.allclose(x.norm(dim=-1), torch.ones(6, dtype=torch.float64), atol=1e-15)
    # Far away the pole is near and distances shrink as |y|²: errors grow by |y|, in relative terms.
    rtol = 1e-14 * (1 + 10**exponent)
    assert torch.allclose(sphere.lower_stereographic(x, 2.5), y, rtol=rtol, atol=1e-14 * 10**exponent)


def test_stereographic_lift_keeps_angles_and_scales_lengths_as_stated():
    y = torch.randn(4, generator=rng(0), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda y: sphere.lift_stereographic(y, 0.7), y)
    gram = jacobian.mT @ jacobian
    factor = 2 / 0.7 / (1 + float(y.square().sum()) / 0.49)
    assert torch.allclose(gram, factor**2 * torch.eye(4, dtype=torch.float64), atol=1e-13)
    origin = sphere.lift_stereographic(torch.zeros(2), 1.0)
    assert origin.tolist() == [0, 0, -1]
    far = sphere.lift_stereographic(torch.tensor([1e300, 0.0], dtype=torch.float64), 1.0)
    assert torch.allclose(far, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))


@given(seeds, st.integers(1, 6), st.floats(-6, 6))
def test_appended_lift_is_on_the_upper_half_and_undone(seed, k, exponent):
    y = torch.randn(6, k, generator=rng(seed), dtype=torch.float64) * 10**exponent
    x = sphere.lift_append(y, 0.3)
    assert torch.allclose(x.norm(dim=-1), torch.ones(6, dtype=torch.float64), atol=4e-16)
    assert bool((x[:, -1] > 0).all())
    assert torch.allclose(sphere.lower_append(x, 0.3), y, rtol=1e-14, atol=0)


def test_appended_lift_takes_lines_to_great_circles():
    a, b = torch.randn(2, 3, generator=rng(0), dtype=torch.float64)
    x = sphere.lift_append(torch.stack([a, 0.3 * a + 0.7 * b, b]), 2.0)
    assert float(torch.linalg.matrix_rank(x)) == 2


@pytest.mark.bad_input
def test_lifts_name_what_they_cannot_take():
    y = torch.zeros(2, 3)
    for lift in (sphere.lift_stereographic, sphere.lift_append):
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"expected a positive number, got {bad}"):
                lift(y, bad)
        y_bad = y.clone()
        y_bad[1, 0] = float("inf")
        with pytest.raises(ValueError, match="row 1: expected a finite vector"):
            lift(y_bad, 1.0)
    for lower in (sphere.lower_stereographic, sphere.lower_append):
        for bad in (0.0, float("nan")):
            with pytest.raises(ValueError, match=f"expected a positive number, got {bad}"):
                lower(torch.eye(3)[:2], bad)
    with pytest.raises(ValueError, match="row 2: the pole of the projection has no flat image"):
        sphere.lower_stereographic(torch.eye(3), 1.0)
    with pytest.raises(ValueError, match=r"row 0: expected a last coordinate above 0, got -0\.8"):
        sphere.lower_append(torch.tensor([[0.6, -0.8]]), 1.0)


@settings(max_examples=20)
@given(seeds)
def test_nothing_leaves_its_dtype(seed):
    g = rng(seed)
    x, y = (sphere.uniform(4, 3, generator=g, dtype=torch.float32) for _ in range(2))
    lon, lat = sphere.to_lonlat(x)
    results = [
        sphere.project(x), sphere.tangent(x, y), sphere.distance(x, y), sphere.pairwise_distance(x, y),
        sphere.exp(x, y), sphere.log(x, y), sphere.geodesic(x, y, 0.3), sphere.drift(x, y, 0.3), lon, lat,
        sphere.from_lonlat(lon, lat), sphere.lift_stereographic(x, 2.0), sphere.lower_stereographic(x, 2.0),
        sphere.lift_append(x, 2.0), sphere.lower_append(sphere.lift_append(x, 2.0), 2.0),
    ]  # fmt: skip
    assert {r.dtype for r in results} == {torch.float32}

"""Geometry of the unit sphere S^{d-1} in R^d.

Tokens are rows `x` of length 1. Angles are in radians; an angle is never taken by `acos`, which has a floor of
2e-8 in float64 and an infinite slope at 0 and π.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow.errors import first_row

EARTH_RADIUS_KM = 6371.0


def project(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Scale each row to length 1.

    Args:
        x: rows of any positive length.

    Raises:
        ValueError: a row is zero or not finite; the row is named.

    >>> project(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    scale = x.detach().abs().amax(-1, keepdim=True)
    bad = ~((scale > 0) & scale.isfinite())[..., 0]
    if bool(bad.any()):
        raise ValueError(f"{first_row(bad)}: expected a finite vector other than zero, got {x[bad][0].tolist()}")
    # Dividing by the largest entry first keeps the square of a length in range from 1e-300 to 1e300.
    x = x / scale
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def tangent(x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Project vectors on the tangent spaces: P_x v = v - <x, v> x.

    >>> tangent(torch.tensor([1.0, 0.0]), torch.tensor([5.0, 2.0]))
    tensor([0., 2.])
    """
    return v - (x * v).sum(-1, keepdim=True) * x


def _angle(chord: Tensor, antichord: Tensor) -> Tensor:
    # The angle between x and y is 2 atan2(|x - y|, |x + y|): exact to rounding on all of [0, π], gradient finite.
    return 2 * torch.atan2(chord, antichord)


def distance(x: Float[Tensor, "*#batch d"], y: Float[Tensor, "*#batch d"]) -> Float[Tensor, "*batch"]:
    """Geodesic distance (angle, radians in [0, π]) between rows.

    The gradient is 0 where the rows coincide and finite where they are antipodal.

    >>> distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor(1.5708)
    """
    return _angle(torch.linalg.vector_norm(x - y, dim=-1), torch.linalg.vector_norm(x + y, dim=-1))


def pairwise_distance(x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
    """Geodesic distances (radians) between all rows of `x` and all rows of `y`; exactly 0 between equal rows.

    >>> pairwise_distance(torch.eye(2), torch.eye(2))
    tensor([[0.0000, 1.5708],
            [1.5708, 0.0000]])
    """
    # The matrix-product shortcut of cdist is off: it leaves 1e-4 between equal rows in float32.
    exact = "donot_use_mm_for_euclid_dist"
    return _angle(torch.cdist(x, y, compute_mode=exact), torch.cdist(x, -y, compute_mode=exact))


def _sinc(t: Tensor) -> Tensor:
    """sin(t)/t with gradients of every order finite at 0."""
    small = t.abs() < 1e-3
    safe = torch.where(small, torch.ones_like(t), t)
    square = torch.where(small, t, torch.zeros_like(t)) ** 2
    return torch.where(small, 1 - square / 6 * (1 - square / 20), torch.sin(safe) / safe)


def exp(x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Follow the great circle from `x` in the tangent direction `v` for the length of `v` (radians).

    >>> exp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, math.pi / 2])).round(decimals=6) + 0.0
    tensor([0., 1.])
    """
    t = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    y = torch.cos(t) * x + _sinc(t) * v
    return y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)


def log(x: Float[Tensor, "*#batch d"], y: Float[Tensor, "*#batch d"]) -> Float[Tensor, "*batch d"]:
    """Tangent vector at `x` (length: the angle) whose great circle arrives at `y`; undoes `exp` up to length π.

    Raises:
        ValueError: a row of `y` is antipodal to `x`, so the direction is not unique; the row is named.

    >>> log(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 1.5708])
    """
    antichord = torch.linalg.vector_norm(x + y, dim=-1)
    bad = antichord.detach() < 8 * torch.finfo(antichord.dtype).eps
    if bool(bad.any()):
        raise ValueError(f"{first_row(bad)}: the points are antipodal, so no shortest path between them is unique")
    chord = torch.linalg.vector_norm(x - y, dim=-1)
    # P_x y, from the shorter of y ∓ x: rounding in the length of x would count twice near the antipode.
    u = tangent(x.expand_as(x + y), torch.where((chord < antichord).unsqueeze(-1), y - x, y + x))
    # sin(angle) = |x - y| |x + y| / 2, without the cancellation of the tangent part near π.
    sine = chord * antichord / 2
    small = chord < 1e-3
    square = torch.where(small, chord, torch.zeros_like(chord)) ** 2
    # angle / sin(angle) = 1 + c²/6 + c⁴/30 + ... in the chord c.
    ratio = torch.where(
        small,
        1 + square / 6 * (1 + square / 5),
        _angle(chord, antichord) / torch.where(small, torch.ones_like(sine), sine),
    )
    return ratio.unsqueeze(-1) * u


def geodesic(
    x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"], t: float | Float[Tensor, "*#batch"]
) -> Float[Tensor, "*batch d"]:
    """Point a share `t` of the way from `x` to `y` along the shorter great-circle arc.

    Raises:
        ValueError: a pair of rows is antipodal; the row is named.

    >>> geodesic(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.5)
    tensor([0.7071, 0.7071])
    """
    share = t.unsqueeze(-1) if isinstance(t, Tensor) else t
    return exp(x, share * log(x, y))


def _check_length(name: str, w: Tensor, advice: str) -> None:
    off = (torch.linalg.vector_norm(w.detach(), dim=-1) - 1).abs().amax()
    if not bool(off < 16 * torch.finfo(w.dtype).eps):
        raise ValueError(f"{name}: expected length 1, off by {float(off):.3g}; {advice}")


def drift(
    x: Float[Tensor, "*batch d"], w: Float[Tensor, "*#batch d"], s: float | Float[Tensor, "*#batch"]
) -> Float[Tensor, "*batch d"]:
    r"""Move tokens for a time `s` under x' = P_x w: a Möbius map of the sphere, in closed form.

        phi_s(x) = [x + (sinh s + (cosh s - 1) <x, w>) w] / (cosh s + <x, w> sinh s)

    computed from |x + w|² and |x - w|², since as printed it is 0/0 near -w for large s. The angle r to `w` obeys
    tan(r/2) -> e^{-s} tan(r/2). `-s` undoes `s`.

    Args:
        x: tokens.
        w: unit vectors; for a drift of speed c pass c·s as the time.
        s: times of any sign, at most 350 in size in float64 (no unit).

    Raises:
        ValueError: `w` is not of length 1, or e^{-2|s|} underflows.

    Source: arXiv 2411.04551, Lemma 3.2 (V = 0, U = 0, b = 1).

    >>> drift(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 1.0]), 1.0)[:, 2]
    tensor([ 0.7616, -1.0000])
    """
    time = torch.as_tensor(s, dtype=x.dtype, device=x.device)
    _check_length("w", w, "pass w / |w|, its speed goes into s")
    longest = -math.log(torch.finfo(x.dtype).tiny) / 2
    if not bool(time.detach().abs().amax() < longest):
        raise ValueError(f"s: expected |s| < {longest:.0f} for {x.dtype}, got {float(time.abs().amax()):.6g}")
    time = time.unsqueeze(-1) if time.ndim else time
    plus, minus = x + w, x - w
    near = torch.exp(time - time.abs()) * plus.square().sum(-1, keepdim=True)
    far = torch.exp(-time - time.abs()) * minus.square().sum(-1, keepdim=True)
    # The part across w, from the nearer of ±w: relative, not only absolute, rounding close to the poles.
    offset = torch.where((x * w).sum(-1, keepdim=True) > 0, minus, plus)
    across = offset - (offset * w).sum(-1, keepdim=True) * w
    return ((near - far) * w + 4 * torch.exp(-time.abs()) * across) / (near + far)


def uniform(
    *shape: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "..."]:
    """Draw uniform points: `uniform(n, d, generator=g)` has shape (n, d), on the generator's device.

    >>> uniform(4, 3, generator=torch.Generator().manual_seed(0)).norm(dim=-1)
    tensor([1., 1., 1., 1.], dtype=torch.float64)
    """
    return project(torch.randn(*shape, generator=generator, dtype=dtype, device=generator.device))


def von_mises_fisher(
    mean: Float[Tensor, " d"], concentration: float, n: int, *, generator: torch.Generator
) -> Float[Tensor, "n d"]:
    """Draw `n` points with density proportional to exp(concentration <mean, x>), any d >= 2.

    Args:
        mean: unit vector.
        concentration: at least 0 (0 is uniform); the spread is about 1/sqrt(concentration) radians a direction.

    Raises:
        ValueError: the concentration is negative or not finite, or the mean is not of length 1.

    Source: Wood (1994), "Simulation of the von Mises Fisher distribution", algorithm VM*, in 1 - <mean, x>.

    >>> m = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    >>> x = von_mises_fisher(m, 100.0, 2000, generator=torch.Generator().manual_seed(0))
    >>> bool(((x @ m).mean() - 0.99).abs() < 1e-3)
    True
    """
    if not (0 <= concentration < math.inf):
        raise ValueError(f"concentration: expected a finite number of at least 0, got {concentration}")
    _check_length("mean", mean, "pass measureflow.sphere.project(mean)")
    d, kappa = mean.shape[-1], concentration
    # All in float64: in float32 the smallest gaps between <mean, x> and 1 would be 0 from concentrations of 1e38 on.
    b = (d - 1) / 2 / (kappa + math.hypot(kappa, (d - 1) / 2))
    gap0 = 2 * b / (1 + b)  # 1 - x0 of the paper
    accepted = mean.new_zeros(0, dtype=torch.float64)
    while len(accepted) < n:
        k = 2 * (n - len(accepted)) + 16
        z = (1 + uniform(k, d, generator=generator)[:, 0]) / 2  # Beta((d-1)/2, (d-1)/2)
        ratio = 2 * z / (1 - (1 - b) * z)  # of gaps: that of the draw is b times this
        gap = b * ratio
        u = torch.rand(k, generator=generator, dtype=torch.float64, device=generator.device)
        # log((1 - x0 x) / (1 - x0²)) with both sides divided by b.
        change = torch.log((ratio * (1 - gap0) + 2 / (1 + b)) / (2 / (1 + b) * (2 - gap0)))
        keep = kappa * b * (2 / (1 + b) - ratio) + (d - 1) * change >= torch.log(u)
        accepted = torch.cat([accepted, gap[keep]])
    gap = accepted[:n]
    across = project(tangent(mean.double().expand(n, d), uniform(n, d, generator=generator)))
    sine = torch.sqrt(gap * (2 - gap))
    return project((1 - gap).unsqueeze(-1) * mean.double() + sine.unsqueeze(-1) * across).to(mean.dtype)


def from_lonlat(lon: Float[Tensor, "*batch"], lat: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch 3"]:
    """Points of S² from longitude and latitude in degrees (latitude in [-90, 90], longitude of any turn).

    Raises:
        ValueError: a latitude is outside [-90, 90] or a value is not finite; the row is named.

    >>> from_lonlat(torch.tensor(90.0), torch.tensor(0.0)).round(decimals=6) + 0.0
    tensor([0., 1., 0.])
    """
    bad = ~((lat.abs() <= 90) & lon.isfinite())
    if bool(bad.any()):
        at = (float(lon[bad][0]), float(lat[bad][0]))
        raise ValueError(
            f"{first_row(bad)}: expected latitude in [-90, 90] and a finite longitude, got lon, lat = {at}"
        )
    lam, phi = torch.deg2rad(lon), torch.deg2rad(lat)
    return torch.stack([torch.cos(phi) * torch.cos(lam), torch.cos(phi) * torch.sin(lam), torch.sin(phi)], dim=-1)


def to_lonlat(x: Float[Tensor, "*batch 3"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Longitude in [-180, 180) and latitude in [-90, 90], in degrees, of points of S².

    >>> lon, lat = to_lonlat(torch.tensor([0.0, 0.0, 1.0]))
    >>> float(lat)
    90.0
    """
    lat = torch.rad2deg(torch.atan2(x[..., 2], torch.hypot(x[..., 0], x[..., 1])))
    lon = torch.rad2deg(torch.atan2(x[..., 1], x[..., 0]))
    return torch.where(lon >= 180, lon - 360, lon), lat


def _check_scale(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value}")


def _check_finite(y: Tensor) -> None:
    bad = ~y.isfinite().all(-1)
    if bool(bad.any()):
        raise ValueError(f"{first_row(bad)}: expected a finite vector, got {y[bad][0].tolist()}")


def lift_stereographic(y: Float[Tensor, "*batch k"], scale: float) -> Float[Tensor, "*batch k+1"]:
    """Lift flat points of R^k to S^k by the inverse stereographic projection from the last axis.

        x = (2 r, |r|² - 1) / (|r|² + 1),  r = y / scale

    The origin goes to the pole opposite to the last axis, |y| = scale to the equator, infinity to the last axis.
    Angles are kept; lengths near the origin grow by 2/scale. Undone by `lower_stereographic`.

    Raises:
        ValueError: `scale` is not positive, or a row is not finite; the row is named.

    >>> lift_stereographic(torch.tensor([1.0, 0.0]), 1.0)
    tensor([1., 0., 0.])
    """
    _check_scale("scale", scale)
    _check_finite(y)
    r = y / scale
    # Written so that far points, whose square is infinite, go to the pole.
    share = 2 / (r.square().sum(-1, keepdim=True) + 1)
    return torch.cat([share * r, 1 - share], dim=-1)


def lower_stereographic(x: Float[Tensor, "*batch d"], scale: float) -> Float[Tensor, "*batch d-1"]:
    """Undo `lift_stereographic`: points of S^{d-1} back to R^{d-1}.

    Raises:
        ValueError: `scale` is not positive, or a row is the pole of the projection, which is the image of infinity;
            the row is named.

    >>> lower_stereographic(torch.tensor([1.0, 0.0, 0.0]), 1.0)
    tensor([1., 0.])
    """
    _check_scale("scale", scale)
    across, last = x[..., :-1], x[..., -1:]
    square = across.square().sum(-1, keepdim=True)
    bad = ((square == 0) & (last > 0))[..., 0]
    if bool(bad.any()):
        raise ValueError(f"{first_row(bad)}: the pole of the projection has no flat image")
    # 1 - last = |across|² / (1 + last): no cancellation near the pole of the projection.
    below = torch.where(last > 0, square / (1 + last.clamp(min=0)), 1 - last)
    return scale * across / below


def lift_append(y: Float[Tensor, "*batch k"], constant: float) -> Float[Tensor, "*batch k+1"]:
    """Lift flat points of R^k to the open upper half of S^k: (y, constant) scaled to length 1.

    Straight lines go to great circles (gnomonic projection). Undone by `lower_append`.

    Raises:
        ValueError: `constant` is not positive, or a row is not finite; the row is named.

    >>> lift_append(torch.tensor([3.0]), 4.0)
    tensor([0.6000, 0.8000])
    """
    _check_scale("constant", constant)
    return project(torch.cat([y, torch.full_like(y[..., :1], constant)], dim=-1))


def lower_append(x: Float[Tensor, "*batch d"], constant: float) -> Float[Tensor, "*batch d-1"]:
    """Undo `lift_append`: points of the open upper half sphere back to R^{d-1}.

    Raises:
        ValueError: `constant` is not positive, or a row is not in the open upper half (last coordinate <= 0); the row
            is named.

    >>> lower_append(torch.tensor([0.6, 0.8]), 4.0)
    tensor([3.])
    """
    _check_scale("constant", constant)
    bad = ~(x[..., -1] > 0)
    if bool(bad.any()):
        raise ValueError(f"{first_row(bad)}: expected a last coordinate above 0, got {float(x[bad][0, -1]):.6g}")
    return constant * x[..., :-1] / x[..., -1:]

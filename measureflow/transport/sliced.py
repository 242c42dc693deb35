"""Spherical sliced Wasserstein distance: transport on many great circles."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow.measures import TokenMeasure
from measureflow.transport.costs import check_problem

BISECTIONS = 50


def circle_power(
    x: Float[Tensor, "*batch n"],
    a: Float[Tensor, "*batch n"],
    y: Float[Tensor, "*batch m"],
    b: Float[Tensor, "*batch m"],
    p: float = 2,
) -> Float[Tensor, "*batch"]:
    """W_p^p on the circle of length 1, the least over θ of ∫ |F⁻¹(q) - G⁻¹(q + θ)|^p dq.

    The integral is convex and piecewise linear in θ; its slope is bisected, to an error below 1e-14 in θ.
    Differentiable in `x` and `y`.

    Args:
        x, y: positions in turns, in [0, 1).
        a, b: weights, summing to 1; atoms of weight 0 change nothing.
        p: power of the distance, at least 1.

    Source: Delon, Salomon and Sobolevski (2010), SIAM Journal on Applied Mathematics 70, 2239-2258.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> circle_power(0.1 * one, one, 0.9 * one, one, p=1)
    tensor(0.2000, dtype=torch.float64)
    """
    (x, rank_x), (y, rank_y) = x.sort(-1), y.sort(-1)
    A, B = a.detach().gather(-1, rank_x).cumsum(-1), b.detach().gather(-1, rank_y).cumsum(-1)
    A, B = A / A[..., -1:], B / B[..., -1:]

    def quantile(values: Tensor, levels: Tensor, q: Tensor) -> Tensor:
        turns = q.floor()
        row = torch.searchsorted(levels, q - turns, right=True).clamp(max=levels.shape[-1] - 1)
        return values.gather(-1, row) + turns

    after = torch.cat([y[..., 1:], y[..., :1] + 1], -1).detach()
    low = -torch.ones_like(B[..., :1])
    high = -low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        here = quantile(x.detach(), A, B - middle)
        slope = ((here - after).abs() ** p - (here - y.detach()).abs() ** p).sum(-1, keepdim=True)
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    shift = (low + high) / 2
    ends, _ = torch.cat([torch.zeros_like(shift), A, (B - shift) % 1], -1).sort(-1)
    q = (ends[..., 1:] + ends[..., :-1]) / 2
    gap = (quantile(x, A, q) - quantile(y, B, q + shift)).abs()
    return (ends.diff(dim=-1) * gap**p).sum(-1)


def sliced(
    mu: TokenMeasure, nu: TokenMeasure, p: float = 2, *, projections: int = 100, seed: int = 0
) -> Float[Tensor, "*batch"]:
    """Spherical sliced Wasserstein distance: the mean of W_p^p over projections to random great circles, to the 1/p.

    x is sent to the nearest point U'x / |U'x| of the circle of a uniform frame U (d, 2), and distances on the circle
    are counted in turns, as Bonet et al. and POT do: 2π times the value is in radians. For d = 2 there is one circle
    and the value is W_p itself. Differentiable in the points, not in the weights; the gradient is 0 where the value
    is. All measures of a batch are projected to the same circles.

    Args:
        mu, nu: measures, matched up by broadcasting of their batches.
        p: power of the distance, at least 1.
        projections: number of circles.
        seed: of their draw.

    Raises:
        ValueError: the measures do not fit together, p < 1, or there are no projections.

    Source: Bonet, Berg, Courty, Septier, Drumetz and Pham (2023), Spherical Sliced-Wasserstein, arXiv 2206.08780.

    >>> east = TokenMeasure(torch.tensor([[1.0, 0.0]]))
    >>> sliced(east, TokenMeasure(torch.tensor([[0.0, 1.0]])))
    tensor(0.2500)
    """
    batch = check_problem(mu, nu, p, "geodesic")
    if projections < 1:
        raise ValueError(f"projections: expected at least 1, got {projections}")
    d = mu.dim
    if d == 2:
        frames = torch.eye(2, dtype=torch.float64).unsqueeze(0)
    else:
        generator = torch.Generator().manual_seed(seed)
        frames, _ = torch.linalg.qr(torch.randn(projections, d, 2, generator=generator, dtype=torch.float64))
    frames = frames.to(mu.points.device)
    angles, weights = [], []
    for side in (mu, nu):
        n = side.weights.shape[-1]
        flat = torch.einsum("...nd,kdc->...knc", side.points.double(), frames)
        turns = (torch.atan2(flat[..., 1], flat[..., 0]) / (2 * math.pi)) % 1
        angles.append(turns.expand(*batch, len(frames), n))
        weights.append(side.weights.double().unsqueeze(-2).expand(*batch, len(frames), n))
    power = circle_power(angles[0], weights[0], angles[1], weights[1], p).mean(-1)
    positive = power > 0
    # The root has an infinite slope at 0, where we take 0; the other branch must not see the 0 either.
    value = torch.where(positive, torch.where(positive, power, 1) ** (1 / p), 0 * power)
    return value.to(torch.promote_types(mu.points.dtype, nu.points.dtype))

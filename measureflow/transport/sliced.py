"""Sliced Wasserstein distance on the sphere: averages over great circles."""

import math
from typing import cast

import torch
from jaxtyping import Float
from ot.lp import wasserstein_circle
from torch import Tensor

from measureflow.measures import TokenMeasure
from measureflow.transport.costs import check_problem


def sliced(
    mu: TokenMeasure, nu: TokenMeasure, p: float = 2, *, projections: int = 50, seed: int = 0
) -> Float[Tensor, "*batch"]:
    r"""Spherical sliced-Wasserstein distance: W_p on random great circles, averaged.

        SSW_p(mu, nu)^p = E_U W_p(P^U_# mu, P^U_# nu)^p,   P^U(x) = U^T x / |U^T x|

    U is uniform on the orthonormal 2-frames of R^d and W_p is that of the circle of length 2π (radians; POT's
    `sliced_wasserstein_sphere` has a circle of length 1, so that its value times 2π is this one). O(n log n) a
    projection, all pairs at once; the same circles for all pairs. In float64.

    Differentiable in the points (where the distance is 0 the gradient is 0); not in the weights, for which POT's
    gradient is wrong: it leaves out that the cut of the circle moves.

    Args:
        mu, nu: measures, matched up by broadcasting of their batches.
        p: power, at least 1.
        projections: number of great circles; the error falls as 1/sqrt(projections).
        seed: of the circles.

    Raises:
        ValueError: the measures do not fit together, p < 1, or there is no projection.

    Source: Bonet, Berg, Courty, Septier, Drumetz, Pham (2023), "Spherical sliced-Wasserstein"; on the circle Delon,
    Salomon, Sobolevski (2010), in POT's implementation.

    >>> north = TokenMeasure(torch.tensor([[0.0, 1.0]]))
    >>> sliced(north, north.with_points(-north.points))  # d = 2: the circle itself
    tensor(3.1416)
    """
    batch = check_problem(mu, nu, p, "geodesic")
    if projections < 1:
        raise ValueError(f"projections: expected at least 1, got {projections}")
    frames = great_circles(mu.dim, projections, seed).to(mu.points.device)
    u, a = _on_circles(mu, frames, batch)
    v, b = _on_circles(nu, frames, batch)
    turned = cast(Tensor, wasserstein_circle(u, v, a, b, p))  # pyright: ignore[reportArgumentType]
    power = turned.reshape(*batch, projections).mean(-1) * (2 * math.pi) ** p
    positive = power > 0
    distance = torch.where(positive, torch.where(positive, power, 1) ** (1 / p), 0 * power)
    return distance.to(torch.promote_types(mu.points.dtype, nu.points.dtype))


def great_circles(d: int, count: int, seed: int) -> Float[Tensor, "count d 2"]:
    """Uniform orthonormal 2-frames of R^d.

    >>> U = great_circles(4, 3, 0)
    >>> bool(torch.allclose(U.mT @ U, torch.eye(2, dtype=torch.float64)))
    True
    """
    normal = torch.randn(count, d, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(normal).Q


def _on_circles(
    measure: TokenMeasure, frames: Float[Tensor, "count d 2"], batch: torch.Size
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Places in turns, and weights, with a column for each pair and circle."""
    flat = torch.einsum("...nd,cdk->...cnk", measure.points.double(), frames)
    turns = (torch.pi + torch.atan2(-flat[..., 1], -flat[..., 0])) / (2 * torch.pi)
    weights = measure.weights.detach().double()
    weights = (weights / weights.sum(-1, keepdim=True)).unsqueeze(-2).expand(turns.shape)
    n = turns.shape[-1]
    turns, weights = (side.expand(*batch, *side.shape[-2:]).reshape(-1, n) for side in (turns, weights))
    return turns.mT, weights.mT

"""Transport with an entropic term (Sinkhorn divergence) and with marginals that may give way (unbalanced)."""

import math

import numpy as np
import ot
import torch
from geomloss import SamplesLoss
from jaxtyping import Float
from torch import Tensor

from measureflow.measures import TokenMeasure
from measureflow.transport.costs import Cost, check_problem, pairwise_cost
from measureflow.transport.exact import Solution


def sinkhorn_divergence(
    mu: TokenMeasure, nu: TokenMeasure, blur: float = 0.05, cost: Cost = "geodesic", *, scaling: float = 0.9
) -> Float[Tensor, "*batch"]:
    """S(mu, nu) = OT(mu, nu) - (OT(mu, mu) + OT(nu, nu)) / 2 in rad² (chordal: squared chords), by geomloss.

        OT(a, b) = min over plans P of <P, d²/2> + blur² KL(P | a b'),

    half the squared distance and the entropy term included, so that S tends to W2²/2 as blur tends to 0. POT's
    `sinkhorn2` with M = d²/2 and reg = blur² gives <P, M> alone. The blur is lowered from the sphere's diameter by
    `scaling` a step and not iterated further: at 0.9 values for a few atoms were seen 1 to 3 % too small, at 0.99 under
    1 %, for ten times the steps. The value may fall below 0 by that error; between a measure and itself it is 0.
    Differentiable in points and weights of both measures, with finite gradients where atoms coincide; the gradient in
    weights is 0 on padding.

    Args:
        mu, nu: measures, matched up by broadcasting of their batches.
        blur: length (radians, or chord) below which atoms are not told apart.
        cost: "geodesic" or "chordal".
        scaling: ratio of successive blurs, in (0, 1) (no unit).

    Raises:
        ValueError: the measures do not fit together, the cost is unknown, or blur or scaling is out of range.

    Source: Feydy, Séjourné, Vialard, Amari, Trouvé and Peyré (2019), AISTATS, arXiv 1810.08278.

    >>> north = TokenMeasure(torch.tensor([[0.0, 0.0, 1.0]]))
    >>> sinkhorn_divergence(north, north.with_points(torch.tensor([[0.0, 1.0, 0.0]])))  # (π/2)²/2
    tensor(1.2337)
    """
    batch = check_problem(mu, nu, 2, cost)
    diameter = math.pi if cost == "geodesic" else 2.0
    if not 0 < blur < diameter:
        raise ValueError(f"blur: expected a length above 0 and below {diameter:.4g}, got {blur}")
    if not 0 < scaling < 1:
        raise ValueError(f"scaling: expected a ratio between 0 and 1, got {scaling}")
    dtype = torch.promote_types(mu.points.dtype, nu.points.dtype)
    (x, a), (y, b) = (_flat(side, batch, dtype) for side in (mu, nu))
    loss = SamplesLoss(
        "sinkhorn",
        p=2,
        blur=blur,
        diameter=diameter,
        scaling=scaling,
        cost=lambda u, v: pairwise_cost(u, v, 2, cost) / 2,
        backend="tensorized",
    )
    return loss(a, x, b, y).reshape(batch)


def _flat(mu: TokenMeasure, batch: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Geomloss gives padding the log-weight -1e5, which potentials of size 1/blur² outgrow. On top of a real atom its
    # potential is that atom's, so that it never counts.
    real = mu.weights > 0
    heaviest = mu.weights.detach().argmax(-1)[..., None, None].expand(*mu.batch_shape, 1, mu.dim)
    points = torch.where(real.unsqueeze(-1), mu.points, mu.points.detach().gather(-2, heaviest))
    weights = torch.where(real, mu.weights, 0)
    n = weights.shape[-1]
    flat = points.expand(*batch, n, mu.dim).reshape(-1, n, mu.dim).to(dtype).contiguous()
    return flat, weights.expand(*batch, n).reshape(-1, n).to(dtype).contiguous()


def unbalanced(mu: TokenMeasure, nu: TokenMeasure, reach: float, cost: Cost = "geodesic") -> Solution:
    """Unbalanced transport, where mass may vanish and appear: min over P >= 0 of

        <P, d²/2> + reach² (KL(P 1 | a) + KL(P' 1 | b)),

    no entropy term, by POT's L-BFGS-B in float64, pair after pair. As reach grows, W2²/2. Not differentiable.

    Args:
        mu, nu: measures, matched up by broadcasting of their batches.
        reach: length (radians, or chord) beyond which mass is rather given up than carried.
        cost: "geodesic" or "chordal".

    Returns:
        The value (rad²), the plan, and potentials f = -reach² log(P 1 / a), g likewise; 0 on padding.

    Raises:
        ValueError: the measures do not fit together, the cost is unknown, or reach is not positive.

    Source: Chapel, Flamary, Wu, Févotte and Gasso (2021), arXiv 2106.04145.

    >>> north = TokenMeasure(torch.tensor([[0.0, 0.0, 1.0]]))
    >>> unbalanced(north, north.with_points(-north.points), reach=0.1).plan.round(decimals=4)
    tensor([[0.]])
    """
    batch = check_problem(mu, nu, 2, cost)
    if not 0 < reach < math.inf:
        raise ValueError(f"reach: expected a finite length above 0, got {reach}")
    (x, a), (y, b) = (_flat(side, batch, torch.float64) for side in (mu, nu))
    table = x.new_zeros(len(x), x.shape[1], y.shape[1])
    value, f, g = x.new_zeros(len(x)), torch.zeros_like(a.detach()), torch.zeros_like(b.detach())
    strength = reach**2
    for pair in range(len(x)):
        i, j = a[pair].nonzero()[:, 0], b[pair].nonzero()[:, 0]
        matrix = (pairwise_cost(x[pair, i], y[pair, j], 2, cost) / 2).detach().cpu().numpy()
        source, target = a[pair, i].detach().cpu().numpy(), b[pair, j].detach().cpu().numpy()
        found = np.asarray(ot.unbalanced.lbfgsb_unbalanced(source, target, matrix, 0.0, strength, numItermax=20_000))
        left, right = found.sum(1), found.sum(0)
        spent = (found * matrix).sum() + strength * (_relative_entropy(left, source) + _relative_entropy(right, target))
        table[pair, i[:, None], j] = torch.from_numpy(found).to(table)
        value[pair] = float(spent)
        f[pair, i] = torch.from_numpy(_potential(left, source, strength)).to(f)
        g[pair, j] = torch.from_numpy(_potential(right, target, strength)).to(g)
    dtype = torch.promote_types(mu.points.dtype, nu.points.dtype)
    (n, m) = table.shape[1:]
    potentials = (f.reshape(*batch, n).to(dtype), g.reshape(*batch, m).to(dtype))
    return Solution(value.reshape(batch).to(dtype), table.reshape(*batch, n, m).to(dtype), potentials)


def _relative_entropy(mass: np.ndarray, given: np.ndarray) -> float:
    ratio = np.where(mass > 0, mass, given) / given
    return float((mass * np.log(ratio) - mass + given).sum())


def _potential(mass: np.ndarray, given: np.ndarray, strength: float) -> np.ndarray:
    return -strength * np.log(np.maximum(mass, np.finfo(float).tiny) / given)

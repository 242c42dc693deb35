r"""Layers whose heads attend evenly (softmax, B = 0): every token of a measure feels one and the same vector.

    x' = P_x v(t),     v = V E_mu[x] + w

moves each measure by a Möbius map, in homogeneous coordinates x = y / y_0 by a linear one: (y, y_0)' = K(v) (y, y_0),
K(v) = [[0, v], [v^T, 0]]. So G' = K(v) G on the Lorentz group SO(d, 1), (d + 1)² numbers a measure whatever its size.
With V = c a a^T the maps are the drifts along a, and one number a measure is left: s' = c E tanh(s + atanh <x, a>).

Both equations are solved by the Gauss method with 8 stages (order 16, by fixed-point iteration). It keeps quadratic
invariants, so G stays in the group and cross ratios are conserved. No error control is needed: as |x| = 1, solutions
are analytic in a disc of radius ln 2 / 2 over the norm of (V, w), whatever the tokens are, and half a stride is less.

Source: arXiv 2411.04551, Lemmas 3.3 and 3.5; Lipton, Mirollo and Strogatz (2021), "The Kuramoto model on a sphere".
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from measureflow.exact_flows.gates import drift_far

_STAGES = 8
# Strides times the norm of the field; twice as long gives the same to rounding, four times as long does not.
_LONGEST_STRIDE = 0.5


def _gauss() -> tuple[Tensor, Tensor]:
    """Runge-Kutta matrix (stages, stages) and weights (stages,) of the Gauss method on [0, 1]."""
    nodes, masses = np.polynomial.legendre.leggauss(_STAGES)
    # In Legendre polynomials ∫ and the interpolation at the nodes are well conditioned.
    basis = np.polynomial.legendre.legvander(nodes, _STAGES - 1)
    integrals = [np.polynomial.legendre.legint(row, lbnd=-1) for row in np.eye(_STAGES)]
    values = np.stack([np.polynomial.legendre.legval(nodes, c) for c in integrals], axis=1)
    return torch.from_numpy(values @ np.linalg.inv(basis) / 2), torch.from_numpy(masses / 2)


_MATRIX, _MASSES = _gauss()


def _strides(speed: float, duration: float) -> tuple[int, float]:
    count = max(1, math.ceil(speed * duration / _LONGEST_STRIDE))
    return count, duration / count


def _settle(step: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The fixed point of a contraction."""
    rounding = 4 * torch.finfo(start.dtype).eps
    value = start
    for _ in range(60):
        new = step(value)
        change = (new - value).detach().abs().amax()
        value = new
        if not bool(change > rounding):
            break
    return value


def flow_along_axis(
    axis: Float[Tensor, " d"],
    c: float,
    points: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"],
    duration: float,
) -> Float[Tensor, "*batch n d"]:
    """Move measures for a time under x' = c P_x a <a, E_mu[x]>, `axis` being the unit vector a."""
    matrix, masses = _MATRIX.to(points.device), _MASSES.to(points.device)
    count, stride = _strides(abs(c), duration)
    # tanh(s + atanh <x, a>) from |x ± a|²: exact near ±a, and smooth there.
    near = (points + axis).square().sum(-1).unsqueeze(-2)
    far = (points - axis).square().sum(-1).unsqueeze(-2)

    def rate(s: Tensor) -> Tensor:
        ahead, behind = torch.exp(s).unsqueeze(-1) * near, torch.exp(-s).unsqueeze(-1) * far
        return c * ((ahead - behind) / (ahead + behind) * weights.unsqueeze(-2)).sum(-1)

    s = points.new_zeros(*points.shape[:-2], 1)
    for _ in range(count):
        stages = _settle(lambda r, s=s: s + stride * rate(r) @ matrix.mT, s.expand(*s.shape[:-1], _STAGES))
        s = s + stride * (rate(stages) @ masses).unsqueeze(-1)
    return drift_far(points, axis, s)


def flow_evenly(
    V: Float[Tensor, "d d"],
    w: Float[Tensor, " d"],
    points: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"],
    duration: float,
) -> Float[Tensor, "*batch n d"]:
    """Move measures for a time under x' = P_x (V E_mu[x] + w)."""
    count, stride = _strides(float(torch.linalg.matrix_norm(V, 2) + torch.linalg.vector_norm(w)), duration)
    for _ in range(count):
        points = _move(points, _lorentz_step(V, w, points, weights, stride))
    return points


def _lorentz_step(V: Tensor, w: Tensor, points: Tensor, weights: Tensor, time: float) -> Float[Tensor, "*batch D D"]:
    """G(time) - 1, one matrix of D = d + 1 rows a measure."""
    matrix, masses = _MATRIX.to(points.device), _MASSES.to(points.device)
    lifted = torch.cat([points, torch.ones_like(points[..., :1])], dim=-1)
    unit = torch.eye(lifted.shape[-1], dtype=points.dtype, device=points.device)

    def rate(offset: Tensor) -> Tensor:
        """K(v) G of the stages (*batch, stages, D, D), G = 1 + offset."""
        G = unit + offset
        # E[x] of the moved measure is that of G (x, 1) / y_0, and G comes out of the sum over tokens.
        share = weights.unsqueeze(-2) / (G[..., -1, :] @ lifted.mT)
        mean = (G[..., :-1, :] @ (share @ lifted).unsqueeze(-1)).squeeze(-1)
        v = mean @ V.mT + w
        return torch.cat([v.unsqueeze(-1) * G[..., -1:, :], v.unsqueeze(-2) @ G[..., :-1, :]], dim=-2)

    def integrate(table: Tensor, offset: Tensor) -> Tensor:
        flat = rate(offset).flatten(-2)
        return time * (table @ flat).unflatten(-1, unit.shape)

    stages = _settle(lambda r: integrate(matrix, r), points.new_zeros(*points.shape[:-2], _STAGES, *unit.shape))
    return integrate(masses.unsqueeze(0), stages).squeeze(-3)


def _move(points: Tensor, offset: Tensor) -> Tensor:
    """The Möbius map of G = 1 + offset, as an increment: in a small cap it is one rounding, not several."""
    lifted = torch.cat([points, torch.ones_like(points[..., :1])], dim=-1) @ offset.mT
    up = lifted[..., -1:]
    step = (lifted[..., :-1] - points * up) / (1 + up)
    # A length off by one rounding would grow like the square of an expansion.
    excess = (points.square().sum(-1, keepdim=True) - 1) + (step * (2 * points + step)).sum(-1, keepdim=True)
    return points + (step - points * excess / 2)

"""Displacement interpolation: the straightest paths between measures."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow import sphere
from measureflow.measures import TokenMeasure
from measureflow.transport.costs import pair_name
from measureflow.transport.exact import plan_atoms, plan_points


def displacement(mu: TokenMeasure, nu: TokenMeasure, t: float | Float[Tensor, "*#batch"]) -> TokenMeasure:
    """The measure a share `t` of the way from mu to nu along a shortest path of W2 (geodesic cost).

    Every atom of the optimal plan moves along its great-circle arc: W2(mu_s, mu_t) = |s - t| W2(mu, nu). Atoms of the
    result are those of the plan, at most n + m - 1 a pair, the rest padding; in order of source rows.

    Differentiable in the points, the plan held fixed; not in the weights.

    Args:
        mu, nu: measures, matched up by broadcasting of their batches.
        t: share, 0 at mu and 1 at nu; one for all pairs, or one a pair.

    Raises:
        ValueError: t is outside [0, 1]; the measures do not fit together; the plan joins antipodal atoms, between
            which no path is shortest (the pair and rows are named).

    Source: McCann (1997), "A convexity principle for interacting gases", on the sphere.

    >>> mu = TokenMeasure(torch.eye(3)[:1])
    >>> displacement(mu, mu.with_points(torch.eye(3)[1:2]), 0.5).points
    tensor([[0.7071, 0.7071, 0.0000]])
    """
    share = torch.as_tensor(t, device=mu.points.device)
    outside = ~((share >= 0) & (share <= 1))
    if bool(outside.any()):
        raise ValueError(f"t: expected a share from 0 to 1, got {float(share[outside].flatten()[0]):g}")
    atoms = plan_atoms(mu, nu)
    dtype = torch.promote_types(mu.points.dtype, nu.points.dtype)
    x, y = plan_points(mu, atoms.source).to(dtype), plan_points(nu, atoms.target).to(dtype)
    carried = atoms.mass > 0
    # sphere.log's own bound on antipodal points, so that its error cannot come first.
    opposite = carried & (torch.linalg.vector_norm((x + y).detach(), dim=-1) < 8 * torch.finfo(dtype).eps)
    if bool(opposite.any()):
        *_, atom = opposite.nonzero()[0].tolist()
        pair = int(opposite.reshape(-1, opposite.shape[-1]).any(-1).nonzero()[0])
        row, col = (int(side.reshape(-1, side.shape[-1])[pair, atom]) for side in (atoms.source, atoms.target))
        raise ValueError(
            f"{pair_name(opposite.shape[:-1], pair)}source row {row} and target row {col} are antipodal "
            f"({math.pi:.4f} rad apart), so no path between them is shortest; move one of them a little"
        )
    first = torch.zeros_like(x).index_fill(-1, torch.tensor(0, device=x.device), 1)
    x, y = (torch.where(carried.unsqueeze(-1), side, first) for side in (x, y))
    points = sphere.geodesic(x, y, share.to(dtype).unsqueeze(-1).expand(carried.shape))
    mass = atoms.mass / atoms.mass.sum(-1, keepdim=True)
    return TokenMeasure(points, mass.to(dtype), mu.globe and nu.globe)

"""Displacement interpolation: the shortest path between two measures."""

import torch

from measureflow import sphere
from measureflow.measures import TokenMeasure
from measureflow.transport.costs import pair_name
from measureflow.transport.exact import plan_atoms, plan_points


def displacement(mu: TokenMeasure, nu: TokenMeasure, t: float) -> TokenMeasure:
    """The measure a share `t` of the way from `mu` to `nu`: each atom of the optimal W2 plan goes along its arc.

    W2(mu_s, mu_t) = |t - s| W2(mu, nu). An atom that the plan splits becomes several, so there are at most n + m - 1,
    in the order of the plan; mu_0 and mu_1 are `mu` and `nu` with atoms in that order. Differentiable in the points,
    with the plan held fixed.

    Args:
        mu, nu: measures, matched up by broadcasting of their batches.
        t: share of the way, 0 to 1 (no unit).

    Raises:
        ValueError: `t` is outside [0, 1], the measures do not fit together, or the plan joins antipodal atoms, between
            which no arc is shortest; the pair and rows are named.

    Source: McCann (1997), Advances in Mathematics 128, 153-179, for the straight line.

    >>> east = TokenMeasure(torch.tensor([[1.0, 0.0]]))
    >>> displacement(east, TokenMeasure(torch.tensor([[0.0, 1.0]])), 0.5).points
    tensor([[0.7071, 0.7071]])
    """
    if not 0 <= t <= 1:
        raise ValueError(f"t: expected a share of the way between 0 and 1, got {t}")
    atoms = plan_atoms(mu, nu)
    real = (atoms.mass > 0).unsqueeze(-1)
    x, y = plan_points(mu, atoms.source), plan_points(nu, atoms.target)
    dtype = torch.promote_types(x.dtype, y.dtype)
    x, y = x.to(dtype), y.to(dtype)
    y = torch.where(real, y, x)
    antipodal = torch.linalg.vector_norm((x + y).detach(), dim=-1) < 8 * torch.finfo(dtype).eps
    if bool(antipodal.any()):
        *batch, k = antipodal.shape
        first = int(antipodal.reshape(-1).nonzero()[0, 0])
        rows = (
            f"source row {int(atoms.source.reshape(-1)[first])} and target row {int(atoms.target.reshape(-1)[first])}"
        )
        raise ValueError(
            f"{pair_name(torch.Size(batch), first // k)}{rows} are antipodal, so no arc between them is shortest; "
            "move one a little"
        )
    return TokenMeasure(sphere.geodesic(x, y, t), atoms.mass.to(dtype), globe=mu.globe and nu.globe)

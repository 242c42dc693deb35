"""Ground costs between tokens, and the checks that every transport problem begins with."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow import sphere
from measureflow.measures import TokenMeasure

Cost = Literal["geodesic", "chordal"]


def paired_cost(
    x: Float[Tensor, "*#batch d"], y: Float[Tensor, "*#batch d"], p: float, cost: Cost
) -> Float[Tensor, "*batch"]:
    """d(x, y)^p row by row: the angle (radians) or the chord |x - y|.

    The gradient is 0 where rows coincide and finite where they are antipodal.

    >>> paired_cost(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 2, "chordal")
    tensor(2.)
    """
    if cost == "chordal":
        return (x - y).square().sum(-1) if p == 2 else torch.linalg.vector_norm(x - y, dim=-1) ** p
    return sphere.distance(x, y) ** p


def pairwise_cost(
    x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"], p: float, cost: Cost
) -> Float[Tensor, "*batch n m"]:
    """d(x_i, y_j)^p between all rows; exactly 0 between equal rows, in float32 too.

    >>> pairwise_cost(torch.eye(2), torch.eye(2), 1, "chordal")
    tensor([[0.0000, 1.4142],
            [1.4142, 0.0000]])
    """
    if cost == "chordal":
        # The matrix-product shortcut of cdist is off: it leaves 1e-4 between equal rows in float32.
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist") ** p
    return sphere.pairwise_distance(x, y) ** p


def check_problem(mu: TokenMeasure, nu: TokenMeasure, p: float, cost: str) -> torch.Size:
    """The batch shape of the pairs (mu, nu), which are matched up by broadcasting.

    Raises:
        TypeError: an argument is not a TokenMeasure.
        ValueError: dimensions, devices or batches do not fit, p < 1, or the cost is unknown.

    >>> mu = TokenMeasure(torch.eye(3).expand(4, 3, 3))
    >>> check_problem(mu, mu[0], 2, "geodesic")
    torch.Size([4])
    """
    for side, measure in (("mu", mu), ("nu", nu)):
        if not isinstance(measure, TokenMeasure):
            raise TypeError(f"{side}: expected a TokenMeasure, got {type(measure).__name__}")
    if cost not in get_args(Cost):
        raise ValueError(f"cost: expected one of {', '.join(get_args(Cost))}, got {cost!r}")
    if not 1 <= p < math.inf:
        raise ValueError(f"p: expected a finite number of at least 1, got {p}")
    if mu.dim != nu.dim:
        raise ValueError(f"expected measures in one dimension, got d = {mu.dim} and d = {nu.dim}")
    if mu.points.device != nu.points.device:
        raise ValueError(f"expected measures on one device, got {mu.points.device} and {nu.points.device}")
    try:
        return torch.broadcast_shapes(mu.batch_shape, nu.batch_shape)
    except RuntimeError:
        shapes = f"{tuple(mu.batch_shape)} and {tuple(nu.batch_shape)}"
        raise ValueError(f"expected as many measures on both sides, or one on one side, got batches {shapes}") from None


def pair_name(batch: torch.Size, flat: int) -> str:
    """Name one pair of a batch for an error message, as the start of a sentence.

    >>> pair_name(torch.Size([2, 3]), 4)
    'pair 1, 1: '
    """
    if not batch:
        return ""
    places = []
    for size in reversed(batch):
        flat, place = divmod(flat, size)
        places.append(str(place))
    return f"pair {', '.join(reversed(places))}: "

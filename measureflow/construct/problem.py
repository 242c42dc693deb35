"""The pairs as a construction needs them: distinct source atoms, and a target atom for each."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from measureflow.measures import MeasurePairs, TokenMeasure


@dataclass(frozen=True)
class Problem:
    """N sources whose atoms are distinct, U different targets, and who goes where.

    Args:
        names: of the pairs.
        points, weights: (N, n, d), (N, n) sources; padding sits on the first atom of its measure.
        target: U different target measures.
        which: (N,) the target of each source.
        slots: (N, n) the target row for each source atom.
        kinds: (N, n) atoms of one measure with the same kind may swap slots.
    """

    names: tuple[str, ...]
    points: Float[Tensor, "N n d"]
    weights: Float[Tensor, "N n"]
    target: TokenMeasure
    which: Int[Tensor, " N"]
    slots: Int[Tensor, "N n"]
    kinds: Int[Tensor, "N n"]


def on_first(measure: TokenMeasure) -> Float[Tensor, "N n d"]:
    """Points with padding moved onto the first atom of its measure, so that radii and gaps need no masks."""
    first = (measure.weights > 0).long().argmax(1).reshape(-1, 1, 1).expand(-1, 1, measure.dim)
    return torch.where((measure.weights > 0).unsqueeze(-1), measure.points, measure.points.gather(1, first))


def pose(pairs):
    n=pairs.source.points.shape[1]; N=len(pairs); m=pairs.target.points.shape[1]
    real=pairs.source.weights>0
    k=pairs.source.counts//pairs.target.counts
    slots=torch.zeros(N,n,dtype=torch.long)
    for i in range(N):
        c=int(pairs.source.counts[i]); slots[i,:c]=torch.arange(c)//int(k[i])
    return Problem(pairs.names, on_first(pairs.source), pairs.source.weights, pairs.target, torch.arange(N), slots, torch.where(real,0,-1))

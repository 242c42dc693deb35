"""The pairs as a construction needs them: distinct atoms, different targets, and who goes where."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from measureflow.measures import TokenMeasure
from measureflow.transport.maps import SAME_WEIGHT, distinct_atoms, same_measure


@dataclass(frozen=True)
class Problem:
    """N sources and U different targets, all of distinct atoms, and who goes where.

    Args:
        points, weights: (N, n, d), (N, n) sources; padding sits on the first atom of its measure.
        goals, goal_weights: (U, m, d), (U, m) targets, padded likewise.
        which: (N,) the target of each source.
        slots: (N, n) the target row for each source atom.
        kinds: (N, n) atoms of one measure with the same kind may swap slots; -1 marks padding.
    """

    points: Float[Tensor, "N n d"]
    weights: Float[Tensor, "N n"]
    goals: Float[Tensor, "U m d"]
    goal_weights: Float[Tensor, "U m"]
    which: Int[Tensor, " N"]
    slots: Int[Tensor, "N n"]
    kinds: Int[Tensor, "N n"]


@dataclass(frozen=True)
class Distinct:
    """A batch of measures with coincident atoms made one, and the new row of each old one (-1 on padding)."""

    measure: TokenMeasure
    rows: tuple[Int[Tensor, " n"], ...]


def distinct(measures: TokenMeasure) -> Distinct:
    """Make coincident atoms of each measure one atom of their summed weight, in order of first appearance."""
    points, weights, rows = zip(*(distinct_atoms(one) for one in measures), strict=True)
    return Distinct(TokenMeasure.from_ragged(points, weights, measures.globe), rows)


def on_first(measure: TokenMeasure) -> Float[Tensor, "N n d"]:
    """Points with padding moved onto the first atom of its measure, so that radii and gaps need no masks."""
    return torch.where((measure.weights > 0).unsqueeze(-1), measure.points, measure.points[:, :1])


def weight_kinds(weights: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Number the weights of a measure by size, equal ones alike."""
    order = weights.argsort()
    ordered = weights[order]
    step = (ordered[1:] - ordered[:-1]) > SAME_WEIGHT * ordered[1:]
    kinds = torch.empty_like(order)
    kinds[order] = torch.cat([step.new_zeros(1), step]).long().cumsum(0)
    return kinds


def pose(maps: list[Int[Tensor, " n"]], sources: Distinct, targets: Distinct, *, free: bool) -> Problem:
    """Put distinct measures and the map of each pair (a target row for each source row) into one batch.

    Pairs that are equal on both sides are built once, and targets that several sources share are disentangled once.

    Args:
        free: atoms of equal weight may swap goals.
    """
    source, target = sources.measure, targets.measure
    device = source.points.device
    first = torch.tensor(sorted(set(same_measure(source))), device=device)
    same_target = torch.tensor(same_measure(target), device=device)[first]
    unique, which = torch.unique(same_target, return_inverse=True)
    n = source.points.shape[1]
    slots = torch.zeros(len(first), n, dtype=torch.long, device=device)
    kinds = torch.full_like(slots, -1)
    for row, i in enumerate(first.tolist()):
        count = len(maps[i])
        rows_of_first = _rows_in(target, i, int(same_target[row]))
        slots[row, :count] = rows_of_first[maps[i]]
        slots[row, count:] = slots[row, 0]
        kinds[row, :count] = weight_kinds(source.weights[i, :count]) if free else torch.arange(count, device=device)
    return Problem(
        on_first(source)[first],
        source.weights[first],
        on_first(target)[unique],
        target.weights[unique],
        which,
        slots,
        kinds,
    )


def _rows_in(target: TokenMeasure, i: int, first: int) -> Int[Tensor, " m"]:
    """Row, in the first of two equal targets, of each atom of the other."""
    a, b = target.points[i][target.weights[i] > 0], target.points[first][target.weights[first] > 0]
    return (a.unsqueeze(1) == b.unsqueeze(0)).all(-1).long().argmax(1)

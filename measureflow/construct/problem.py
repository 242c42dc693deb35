"""The pairs as a construction needs them: distinct atoms, different targets, and who goes where."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from measureflow.measures import MeasurePairs, TokenMeasure

SAME_WEIGHT = 1e-9
"""Weights that differ by less, relatively, are one weight: a file may give them with ten digits."""


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
    points, weights, rows = [], [], []
    for points_i, weights_i in zip(measures.points, measures.weights, strict=True):
        real = weights_i > 0
        _, inverse = torch.unique(points_i[real], dim=0, return_inverse=True)
        # Number the groups by first appearance, so that measures without coincident atoms keep their order.
        first = torch.full((int(inverse.max()) + 1,), len(inverse), dtype=torch.long)
        first.scatter_reduce_(0, inverse, torch.arange(len(inverse)), "amin")
        rank = torch.empty_like(first)
        rank[first.argsort()] = torch.arange(len(first))
        row = rank[inverse]
        points.append(points_i[real][first.sort().values])
        weights.append(torch.zeros(len(first), dtype=weights_i.dtype).index_add_(0, row, weights_i[real]))
        rows.append(torch.full_like(real, -1, dtype=torch.long).masked_scatter_(real, row))
    return Distinct(TokenMeasure.from_ragged(points, weights, measures.globe), tuple(rows))


def on_first(measure: TokenMeasure) -> Float[Tensor, "N n d"]:
    """Points with padding moved onto the first atom of its measure, so that radii and gaps need no masks."""
    return torch.where((measure.weights > 0).unsqueeze(-1), measure.points, measure.points[:, :1])


def same_measure(points: Float[Tensor, "N n d"], weights: Float[Tensor, "N n"]) -> Int[Tensor, " N"]:
    """The first measure that equals each one (exactly, in any order of atoms)."""
    keys: dict[bytes, int] = {}
    first = []
    for i, (p, w) in enumerate(zip(points, weights, strict=True)):
        table = torch.cat([p, w.unsqueeze(-1)], dim=-1)[w > 0]
        ordered = torch.unique(table, dim=0)
        first.append(keys.setdefault(ordered.detach().cpu().numpy().tobytes(), i))
    return torch.tensor(first, device=points.device)


def weight_kinds(weights: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Number the weights of a measure by size, equal ones alike."""
    order = weights.argsort()
    ordered = weights[order]
    step = (ordered[1:] - ordered[:-1]) > SAME_WEIGHT * ordered[1:]
    kinds = torch.empty_like(order)
    kinds[order] = torch.cat([step.new_zeros(1), step]).long().cumsum(0)
    return kinds


def pose(pairs: MeasurePairs, maps: list[Int[Tensor, " n"]], sources: Distinct, targets: Distinct) -> Problem:
    """Put distinct measures and the map of each pair (a target row for each source row) into one batch.

    Pairs that are equal on both sides are built once, and targets that several sources share are disentangled once.
    """
    source, target = sources.measure, targets.measure
    same_source = same_measure(source.points, source.weights)
    first = (same_source == torch.arange(len(pairs), device=same_source.device)).nonzero()[:, 0]
    same_target = same_measure(target.points, target.weights)[first]
    unique, which = torch.unique(same_target, return_inverse=True)
    n = source.points.shape[1]
    slots = torch.zeros(len(first), n, dtype=torch.long, device=source.points.device)
    kinds = torch.full_like(slots, -1)
    for row, i in enumerate(first.tolist()):
        count = len(maps[i])
        rows_of_first = _rows_in(target, i, int(same_target[row]))
        slots[row, :count] = rows_of_first[maps[i]]
        slots[row, count:] = slots[row, 0]
        kinds[row, :count] = weight_kinds(source.weights[i, :count])
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


def simple_map(source: Float[Tensor, " n"], target: Float[Tensor, " m"]) -> Int[Tensor, " n"] | None:
    """A target row for each source row, where weights alone decide it; None where it takes a search.

    That is when all source weights are equal and target weights are multiples of them, or when both sides have the
    same weights in another order.
    """
    share = source.mean()
    if bool(((source - share).abs() <= SAME_WEIGHT * share).all()):
        times = (target / share).round()
        if bool(((target - times * share).abs() <= SAME_WEIGHT * share * times.clamp(min=1)).all()):
            return torch.repeat_interleave(torch.arange(len(target), device=target.device), times.long())
        return None
    if len(source) != len(target):
        return None
    a, b = source.argsort(), target.argsort()
    if not bool(((source[a] - target[b]).abs() <= SAME_WEIGHT * source[a]).all()):
        return None
    rows = torch.empty_like(a)
    rows[a] = b
    return rows


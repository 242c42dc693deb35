"""What can be asked of one transformer: a target row for each distinct source atom, or a reason why not."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from measureflow.construct.problem import Distinct, distinct
from measureflow.errors import NoTransportMapError
from measureflow.measures import MeasurePairs, TokenMeasure
from measureflow.transport.maps import MapCheck, can_map, find_conflicts


@dataclass(frozen=True)
class Settled:
    """Distinct sources and targets, the target row of each source atom per pair, and the least W2 per pair."""

    sources: Distinct
    targets: Distinct
    maps: list[Int[Tensor, " n"]]
    best_w2: tuple[float, ...]
    given: bool


def settle(pairs: MeasurePairs, *, follow_coupling: bool, allow_inexact: bool) -> Settled:
    """Find the map of each pair.

    Raises:
        NoTransportMapError: a pair has no map, or one source measure has two targets; pairs, rows and the least W2
            are named.
        ValueError: the coupling is to be followed and there is none.
    """
    conflicts = find_conflicts(pairs.source, pairs.target, pairs.names)
    if conflicts:
        raise NoTransportMapError("; ".join(str(c) for c in conflicts[:5]))
    if follow_coupling:
        return _settle_given(pairs)
    checks = [can_map(source, target) for source, target in zip(pairs.source, pairs.target, strict=True)]
    impossible = [i for i, check in enumerate(checks) if check.exists is not True]
    if impossible and not allow_inexact:
        raise NoTransportMapError("; ".join(_refusal(pairs.names[i], checks[i]) for i in impossible[:8]))
    best = tuple(check.w2 for check in checks)
    target = pairs.target
    if impossible:
        images = [_image(pairs, check, i) for i, check in enumerate(checks)]
        target = TokenMeasure.from_ragged([m.points for m in images], [m.weights for m in images], target.globe)
        checks = [can_map(one, image) for one, image in zip(pairs.source, target, strict=True)]
    sources, targets = distinct(pairs.source), distinct(target)
    maps = [
        _over_places(sources.rows[i], targets.rows[i], check.rows)
        for i, check in enumerate(checks)
        if check.rows is not None
    ]
    return Settled(sources, targets, maps, best, given=False)


def _image(pairs: MeasurePairs, check: MapCheck, i: int) -> TokenMeasure:
    """What the best map makes of a source: the target itself where it is reached."""
    if check.exists:
        return pairs.target[i]
    return replace(pairs.source[i], points=check.images)


def _refusal(name: str, check: MapCheck) -> str:
    least = f"{check.w2:.6g} rad"
    if check.lower < check.w2 * (1 - 1e-9):
        least = f"between {check.lower:.6g} and {check.w2:.6g} rad"
    return f"pair {name!r}: no map exists: {check.reason}; the least W2 of any map is {least}"


def _settle_given(pairs: MeasurePairs) -> Settled:
    if pairs.coupling is None:
        raise ValueError("match='given': these pairs have no coupling; give MeasurePairs(..., coupling=...)")
    sources, targets = distinct(pairs.source), distinct(pairs.target)
    maps = []
    for i, name in enumerate(pairs.names):
        rows, coupling = sources.rows[i], pairs.coupling[i]
        over = _over_places(rows, targets.rows[i], coupling)
        split = (rows >= 0) & (targets.rows[i][coupling.clamp(min=0)] != over[rows.clamp(min=0)])
        if bool(split.any()):
            row = int(split.nonzero()[0, 0])
            twin = int(((rows == rows[row]) & ~split).nonzero()[0, 0])
            raise NoTransportMapError(
                f"pair {name!r}: source rows {twin} and {row} are one point and are coupled to different target atoms"
            )
        carried = torch.zeros_like(targets.measure.weights[i])
        carried.index_add_(0, over, sources.measure.weights[i, : len(over)])
        off = (carried - targets.measure.weights[i]).abs().max()
        if float(off) > 1e-9:
            raise NoTransportMapError(
                f"pair {name!r}: the coupling does not carry the weights; off by {float(off):.3g}"
            )
        maps.append(over)
    return Settled(sources, targets, maps, tuple(0.0 for _ in maps), given=True)


def _over_places(
    source_rows: Int[Tensor, " n"], target_rows: Int[Tensor, " m"], rows: Int[Tensor, " n"]
) -> Int[Tensor, " k"]:
    """A map of rows as a map of distinct atoms."""
    real = source_rows >= 0
    over = source_rows.new_zeros(int(source_rows.max()) + 1)
    # In reverse, so that of coincident source atoms the first decides.
    order = real.nonzero()[:, 0].flip(0)
    for row in order.tolist():
        over[source_rows[row]] = target_rows[rows[row]]
    return over

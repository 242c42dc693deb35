"""What simple rules, which have learned nothing, would score: the figures that a transformer has to beat."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from measureflow import sphere
from measureflow.measures import MeasurePairs, TokenMeasure

BASELINES = {
    "identity": "every atom stays where it is",
    "mean target": "every atom goes to the projected barycentre of the training targets",
    "climatology": "every atom goes to a place drawn from the training targets, each target alike",
    "nearest": "every atom goes where the training atom born nearest to it went (mean of k of them: projected)",
}
"""Name and rule of each baseline, in the order of a report."""

NO_MEAN = 1e-9
"""A barycentre shorter than this has no direction; that of 10⁴ points is rounded at 1e-14."""

BLOCK = 2**24
"""Distances that are held at once: 128 MiB in float64."""


def baseline_measures(
    pairs: MeasurePairs, train: MeasurePairs | None, *, neighbours: int, generator: torch.Generator
) -> tuple[dict[str, TokenMeasure], list[str]]:
    """Where each rule carries the sources, by name; and a sentence for each rule that says nothing here.

    Weights stay with their atoms. Atoms of weight 0 take no part, and draw nothing.

    Args:
        pairs: N pairs.
        train: the pairs that the rules may look at; None: for each pair all the others.
        neighbours: training atoms whose targets "nearest" takes the mean of.
        generator: of the draws of climatology.

    Raises:
        ValueError: there are fewer than `neighbours` training atoms.

    >>> pairs = MeasurePairs(mu := TokenMeasure(torch.eye(3).expand(2, 3, 3)), mu)
    >>> rules, notes = baseline_measures(pairs, None, neighbours=1, generator=torch.Generator().manual_seed(0))
    >>> list(rules), notes
    (['identity', 'mean target', 'climatology'], ['nearest: left out, the training pairs have no known coupling'])
    """
    found, notes = {"identity": pairs.source}, []
    alone = train is None
    past = pairs if train is None else train
    if alone and len(pairs) == 1:
        others = ", ".join(name for name in BASELINES if name != "identity")
        return found, [f"{others}: left out, there is one pair and no train to learn them from"]
    allowed = torch.ones(len(pairs), len(past), dtype=torch.bool, device=past.source.points.device)
    if alone:
        allowed.fill_diagonal_(False)
    centre = _centres(past.target, allowed)
    flat = torch.linalg.vector_norm(centre, dim=-1) < NO_MEAN
    if bool(flat.any()):
        name = pairs.names[int(flat.nonzero()[0, 0])]
        notes.append(f"mean target: left out, for pair {name!r} the training targets have no mean direction")
    else:
        places = sphere.project(centre).unsqueeze(1).expand_as(pairs.source.points)
        found["mean target"] = pairs.source.with_points(places)
    found["climatology"] = pairs.source.with_points(_draws(pairs.source, past.target, alone, generator))
    if past.coupling is None:
        notes.append("nearest: left out, the training pairs have no known coupling")
    else:
        found["nearest"] = pairs.source.with_points(_nearest(pairs.source, past, allowed, neighbours))
    return found, notes


def _centres(target: TokenMeasure, allowed: Bool[Tensor, "N P"]) -> Float[Tensor, "N d"]:
    share = allowed.to(target.points.dtype)
    return (share / share.sum(-1, keepdim=True)) @ target.barycentre


def _draws(
    source: TokenMeasure, target: TokenMeasure, alone: bool, generator: torch.Generator
) -> Float[Tensor, "N n d"]:
    """An atom of an allowed target for each source atom: the target evenly, then its atom by weight."""
    real = source.weights > 0
    pair = real.nonzero()[:, 0]
    u = torch.rand(2, len(pair), generator=generator, dtype=torch.float64).to(pair.device)
    chosen = (u[0] * (len(target) - alone)).long()
    if alone:
        chosen += chosen >= pair
    # All distribution functions end to end: that of target p rises from p to p + 1.
    mass = target.weights.double().cumsum(-1)
    rising = (mass / mass[:, -1:] + torch.arange(len(target), device=mass.device).unsqueeze(-1)).flatten()
    row = torch.searchsorted(rising, chosen + u[1], right=True)
    row = torch.minimum(row, last_rows(target)[chosen] + chosen * target.weights.shape[-1])
    points = source.points.clone()
    points[real] = target.points.flatten(0, 1)[row]
    return points


def last_rows(measure: TokenMeasure) -> Int[Tensor, " N"]:
    """The last row of each measure that is not padding.

    >>> last_rows(TokenMeasure.from_ragged([torch.eye(3), torch.eye(3)[:1]]))
    tensor([2, 0])
    """
    rows = torch.arange(measure.weights.shape[-1], device=measure.weights.device)
    return torch.where(measure.weights > 0, rows, 0).amax(-1)


def _nearest(
    source: TokenMeasure, past: MeasurePairs, allowed: Bool[Tensor, "N P"], neighbours: int
) -> Float[Tensor, "N n d"]:
    assert past.coupling is not None
    real = past.source.weights > 0
    born = past.source.points[real]
    went = past.target.points.gather(1, past.coupling.clamp(min=0).unsqueeze(-1).expand_as(past.source.points))[real]
    owner = real.nonzero()[:, 0]
    most = int((allowed.double() @ past.source.counts.double()).min())
    if not 1 <= neighbours <= most:
        raise ValueError(f"neighbours: expected 1 to {most}, the training atoms that every pair has, got {neighbours}")
    points = source.points.clone()
    for i in range(len(source)):
        rows = (source.weights[i] > 0).nonzero()[:, 0]
        for block in rows.split(max(1, BLOCK // len(born))):
            # Chords order points as angles do. No matrix product: it could not tell points 1e-8 apart.
            far = torch.cdist(source.points[i, block], born, compute_mode="donot_use_mm_for_euclid_dist")
            near = far.masked_fill(~allowed[i, owner], torch.inf).topk(neighbours, dim=-1, largest=False).indices
            points[i, block] = went[near[:, 0]]
            if neighbours > 1:
                mean = went[near].mean(1)
                flat = torch.linalg.vector_norm(mean, dim=-1, keepdim=True) < NO_MEAN
                # Where the k places cancel out, that of the nearest alone.
                points[i, block] = sphere.project(torch.where(flat, points[i, block], mean))
    return points

"""Construct: one transformer, written down in closed form, that carries N measures to N targets."""

import time

import torch

from measureflow.construct.certificate import Certificate, Construction
from measureflow.construct.compact import build
from measureflow.construct.possible import Settled, settle
from measureflow.construct.problem import pose
from measureflow.errors import NotConvergedError
from measureflow.flow import push_forward
from measureflow.measures import MeasurePairs
from measureflow.progress import progress_over
from measureflow.transformer import Transformer, balanced
from measureflow.transport import wasserstein

__all__ = ["MODES", "STAGES", "Certificate", "Construction", "construct"]

MODES = ("compact",)
STAGES = ("gather", "disentangle", "route", "resize", "match", "merge", "restore")
"""What the layers of a construction are for, in this order."""


STEPS = 24
"""Steps that progress counts with: the stages, and about as many slices as matching usually takes."""

ATTEMPTS = 3
"""Constructions tried, with other random neurons, until the check is passed; the best one is kept."""

ENOUGH = 2e-8
"""W2 (radians) above the least possible at which a construction is taken at once. Where atoms nearly touch, the
matching of some seeds amplifies rounding more than that of others."""


def construct(
    pairs: MeasurePairs,
    *,
    mode: str = "compact",
    match: str = "free",
    allow_inexact: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Construction:
    """One transformer that carries every source of the pairs to its target.

    Sources and targets may differ in size from pair to pair; weights may differ wherever a map exists; several atoms
    may go to one. Everything is done in float64; float32 pairs are converted.

    Args:
        pairs: N pairs of measures on S^{d-1}, d >= 2. On the circle (d = 2) tokens cannot pass each other, so fewer
            pairs can be carried.
        mode: "compact".
        match: "free" lets atoms of one weight go to whichever target atoms are nearest on the way; "given" follows
            `pairs.coupling`.
        allow_inexact: build the best map where no map is exact, instead of raising.
        seed: of the random choices; the same seed gives the same transformer on one machine.
        progress: show the stages when it takes more than a second.

    Returns:
        The transformer, with `.certificate`.

    Raises:
        NoTransportMapError: a pair has no map, or one source measure has two targets; pairs, rows and the least W2
            that a map can reach are named.
        NotSeparatedError: the measures could not be moved apart.
        NotConvergedError: matching stopped short.
        ValueError: an argument is not one of those listed.

    Source: arXiv 2411.04551, Theorem 1.2.

    >>> from measureflow.datasets import clusters
    >>> theta = construct(clusters(2, 4, 3, seed=0))
    >>> theta.certificate.worst < 1e-7
    True
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if match not in ("free", "given"):
        raise ValueError(f"match: expected 'free' or 'given', got {match!r}")
    pairs = pairs.to(torch.float64)
    began = time.perf_counter()
    settled = settle(pairs, follow_coupling=match == "given", allow_inexact=allow_inexact)
    problem = pose(settled.maps, settled.sources, settled.targets, free=not settled.given)
    best: tuple[Transformer, Certificate] | None = None
    with progress_over("construct", STEPS, shown=progress) as advance_bar, torch.no_grad():
        for attempt in range(ATTEMPTS):
            try:
                layers, separation = build(problem, seed=seed + 1000 * attempt, on_stage=advance_bar)
            except NotConvergedError:
                if best is None and attempt == ATTEMPTS - 1:
                    raise
                continue
            theta = Transformer([balanced(layer) for layer in layers])
            advance_bar("check")
            certificate = _certify(theta, pairs, settled, separation, began, seed)
            if best is None or certificate.above_best < best[1].above_best:
                best = theta, certificate
            if certificate.above_best <= ENOUGH:
                break
    assert best is not None
    theta, certificate = best
    metadata = {"made_by": "measureflow.construct", "mode": mode, "match": match, "certificate": certificate.to_dict()}
    return Construction(theta.layers, metadata, certificate=certificate)


def _certify(
    theta: Transformer,
    pairs: MeasurePairs,
    settled: Settled,
    separation: dict[str, float],
    began: float,
    seed: int,
) -> Certificate:
    built = time.perf_counter() - began
    exact = wasserstein(push_forward(theta, pairs.source), pairs.target)
    independent = wasserstein(push_forward(theta, pairs.source, solver="dopri8"), pairs.target)
    checked = time.perf_counter() - began - built
    return Certificate(
        names=tuple(pairs.names),
        w2=tuple(independent.tolist()),
        w2_exact=tuple(exact.tolist()),
        best_w2=tuple(settled.best_w2),
        stages=theta.stages,
        switches=theta.switches,
        layers=len(theta.layers),
        parameters=theta.num_parameters,
        norm=theta.norm,
        separation=separation,
        seconds={"construct": round(built, 3), "check": round(checked, 3)},
        seed=seed,
    )

"""Disentangle: shrink every measure to a small cap, the caps far apart, by one set of layers for all measures.

Gather (a drift away from a direction that no token is near), then V = I, B = 0: within one measure every token sees
the same vector, the barycentre, so each measure moves by a Möbius map towards its own centre, keeps its shape, and
V -> -V undoes it (arXiv 2411.04551, sections 3.1 to 3.3; compact form).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow import sphere
from measureflow.errors import NotSeparatedError
from measureflow.solvers import Tally, choose_solver
from measureflow.solvers import advance as integrate
from measureflow.transformer import Head, Layer, constant_drift, merge, saturating_gate

Points = Float[Tensor, "N n d"]
Weights = Float[Tensor, "N n"]

# Time given to attention before the search for a separation is called off: the return error grows like e^time.
LONGEST = 14.0
STEP = 0.25

APART = 0.3
"""Cap radius over gap from which on a gate can hold one cap and leave out all others."""


@dataclass(frozen=True)
class Caps:
    """Measures that have been shrunk to caps.

    Args:
        layers: what was done.
        points: (N, n, d) where the tokens are now.
        centres: (N, d) unit barycentres.
        radii: (N,) largest angle of a token from its centre, radians.
        gap: smallest angle between two centres, radians; 1 for a single measure.
    """

    layers: tuple[Layer, ...]
    points: Points
    centres: Float[Tensor, "N d"]
    radii: Float[Tensor, " N"]
    gap: float


POINT = 1e-12
"""Radius (radians) below which a cap is one point, up to rounding."""


def advance(layers: Sequence[Layer], points: Points, weights: Weights) -> Points:
    """Carry tokens through layers, by the exact flow where a layer has one."""
    solver = choose_solver("exact", points.dtype, rtol=1e-12, atol=1e-13)
    for layer in layers:
        tally = Tally(points)
        points = integrate(
            layer, points, weights, layer.duration, solver, padded=False, place=lambda t: f"time {t:.3g}", tally=tally
        )
    return points


def caps(layers: Sequence[Layer], points: Points, weights: Weights) -> Caps:
    """Centres, radii and gap of measures where they are.

    Raises:
        NotSeparatedError: a barycentre is (nearly) zero, so that the measure has no centre.
    """
    mean = (weights.unsqueeze(-1) * points).sum(-2)
    length = torch.linalg.vector_norm(mean, dim=-1)
    if bool((length < 1e-9).any()):
        raise NotSeparatedError(f"measure {int(length.argmin())} has its barycentre at 0, so no centre")
    centres = mean / length.unsqueeze(-1)
    radii = sphere.distance(points, centres.unsqueeze(1)).amax(-1)
    return Caps(tuple(layers), points, centres, radii, smallest_gap(centres))


def smallest_gap(centres: Float[Tensor, "N d"]) -> float:
    """Smallest angle between two of the centres (radians); 1 for a single one."""
    if len(centres) == 1:
        return 1.0
    between = sphere.pairwise_distance(centres, centres)
    return float(between.fill_diagonal_(torch.inf).min())


def far_direction(points: Float[Tensor, "k d"], generator: torch.Generator, candidates: int = 2000) -> Tensor:
    """The one of many random directions that is farthest from every token (the rule of gathering, same for a seed)."""
    tries = sphere.uniform(candidates, points.shape[-1], generator=generator, dtype=points.dtype)
    nearest = (tries @ points.T).amax(-1)
    return tries[nearest.argmin()]


def _shrink(points: Points, weights: Weights, time: float, steps: int) -> Points:
    # A quick look at where the flow of V = I leads, good to 1e-4: only for comparing ways to start.
    def field(x: Tensor) -> Tensor:
        return sphere.tangent(x, (weights.unsqueeze(-1) * x).sum(-2, keepdim=True).expand_as(x))

    h = time / steps
    for _ in range(steps):
        half = points + h / 2 * field(points)
        points = points + h * field(half)
        points = points / torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    return points


def _prospect(points: Points, weights: Weights) -> float:
    """Gap between the centres that V = I leads to (radians); 0 where some measure does not shrink."""
    end = _shrink(points, weights, time=8.0, steps=60)
    mean = (weights.unsqueeze(-1) * end).sum(-2)
    length = torch.linalg.vector_norm(mean, dim=-1, keepdim=True)
    if float(length.min()) < 0.9:
        return 0.0
    return smallest_gap(mean / length)


def _starts(points: Points, weights: Weights, generator: torch.Generator) -> list[list[Layer]]:
    """Ways to begin: no gathering, or a drift away from a far direction, for several times."""
    flat = points.reshape(-1, points.shape[-1])
    starts: list[list[Layer]] = [[]]
    for _ in range(3):
        away = far_direction(flat, generator)
        starts += [[Layer((), constant_drift(-away), time, "gather")] for time in (0.4, 0.8, 1.5)]
    return starts


def _separators(points: Points, generator: torch.Generator) -> list[Layer]:
    """Layers that move measures of equal barycentre apart: heads with a generic B (the log-Laplace transform tells
    any two measures apart) and gates on a ball (arXiv 2411.04551, Lemma 3.4, sign corrected: active inside the ball).
    """
    d = points.shape[-1]
    flat = points.reshape(-1, d)
    layers = []
    for strength in (2.0, 4.0, 8.0):
        for _ in range(4):
            normal = torch.randn(2, d, d, generator=generator, dtype=points.dtype)
            B, V = strength * normal[0] / d**0.5, normal[1] / d**0.5
            layers.append(Layer((Head(V, B),), None, 1.0, "disentangle"))
    for _ in range(12):
        pick = torch.randint(len(flat), (2,), generator=generator)
        centre = flat[pick[0]]
        radius = float(torch.rand(1, generator=generator, dtype=points.dtype)) + 0.1
        # (<z, x> - cos R)_+ / (1 - cos R): 1 at the centre of the ball, 0 outside it.
        height = 1 - torch.cos(torch.tensor(radius, dtype=points.dtype))
        gate = constant_drift(2 * flat[pick[1]] / height)
        perceptron = replace(gate, U=centre.unsqueeze(0), b=(height - 1).reshape(1))
        layers.append(Layer((), perceptron, 1.0, "disentangle"))
    return layers


def disentangle(points: Points, weights: Weights, *, seed: int, vary: bool = False, enough: float = 1e-3) -> Caps:
    """Find a start from which V = I leads the measures to caps with distinct centres, and take it.

    Args:
        points, weights: distinct measures; padding sits on a real atom.
        seed: of the candidates.
        vary: begin with a random head, so that another seed leads the centres to other places in another order.
        enough: a gap (radians) that needs no further search.

    Raises:
        NotSeparatedError: no candidate moves all measures apart.
    """
    generator = torch.Generator(device=points.device).manual_seed(seed)
    best, gap = [], -1.0
    for start in _starts(points, weights, generator):
        found = _prospect(advance(start, points, weights), weights)
        if found > 1.05 * gap:
            best, gap = start, found
    if vary:
        first = _separators(points, generator)[:1]
        best, gap = first, _prospect(advance(first, points, weights), weights)
    if gap < enough:
        for separator in _separators(points, generator):
            for start in (*_starts(points, weights, generator)[:3], best):
                layers = [*start, separator]
                found = _prospect(advance(layers, points, weights), weights)
                if found > 1.05 * gap:
                    best, gap = layers, found
    if gap < 1e-7:
        raise NotSeparatedError(f"no start separates the {len(points)} measures: the best gap is {gap:.2g} rad")
    return caps(best, advance(best, points, weights), weights)


def shrink(start: Caps, weights: Weights, *, ratio: float, gap: float) -> Caps:
    """Add attention V = I, B = 0 until the caps are apart, then local drifts that bring all to one radius.

    Attention alone shrinks some measures far more than others, and what is shrunk by a factor amplifies rounding by
    that factor on the way back. So attention stops at the first time when gates can tell the caps apart.

    Args:
        ratio: radius to reach, as a share of the gap, and of `gap`.

    Raises:
        NotSeparatedError: not reached in the longest time that keeps the flow invertible in float64.
    """
    eye = torch.eye(start.points.shape[-1], dtype=start.points.dtype, device=start.points.device)
    attention = Layer((Head(eye, torch.zeros_like(eye)),), None, STEP, "disentangle")
    now, steps = start, 0
    while float(now.radii.max()) > APART * now.gap:
        steps += 1
        if steps * STEP > LONGEST:
            raise NotSeparatedError(
                f"caps of radius {float(now.radii.max()):.2g} rad stay too large for a gap of {now.gap:.2g} rad"
            )
        now = caps(start.layers, advance([attention], now.points, weights), weights)
    if steps > 0:
        layer = replace(attention, duration=steps * STEP)
        now = caps((*start.layers, layer), advance([layer], start.points, weights), weights)
    layers = resize(now, torch.full_like(now.radii, ratio * min(now.gap, gap)), now.gap, "disentangle")
    return caps((*now.layers, *layers), advance(layers, now.points, weights), weights)


def resize(now: Caps, radii: Float[Tensor, " N"], room: float, stage: str) -> list[Layer]:
    """One layer of local drifts that brings each cap to its radius; a cap sees only its own gate, at full drift.

    Args:
        now: caps of radius below 0.3 `room` whose centres are `room` apart, before and after.
        radii: to reach; caps that are one point stay.
    """
    outer, inner = math.cos(0.48 * room), math.cos(0.35 * room)
    gates = []
    for centre, have, want in zip(now.centres, now.radii.tolist(), radii.tolist(), strict=True):
        if have > POINT:
            time = math.log(math.tan(have / 2) / math.tan(want / 2))
            gates.append(saturating_gate(centre, outer, inner - outer, time * centre))
    return [Layer((), merge(gates), 1.0, stage)] if gates else []

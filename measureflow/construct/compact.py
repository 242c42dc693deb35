"""The compact construction: theta = restore ∘ merge ∘ match ∘ resize ∘ route ∘ disentangle.

Sources and targets are disentangled each by their own layers; between, the source caps are carried onto the target
caps, atom by atom; the targets' layers inverted restore them. Source: arXiv 2411.04551, Theorem 1.2, with wide
perceptrons and the exact flows of `measureflow.exact_flows`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from measureflow import sphere
from measureflow.construct.assign import assign, nearest_other, rows
from measureflow.construct.circle import crossing, route_on_circle, stations_in_order
from measureflow.construct.disentangle import POINT, Caps, advance, caps, disentangle, resize, shrink, smallest_gap
from measureflow.construct.match import match
from measureflow.construct.problem import Problem
from measureflow.construct.route import leg_layers, route, spread_points
from measureflow.errors import NoTransportMapError, NotSeparatedError
from measureflow.transformer import Layer, merge, saturating_gate

RATIOS = (0.05, 0.0125, 0.003)
"""Cap radius over gap while caps are routed, tried in turn: smaller caps leave more room, and cost accuracy."""

STARTS = 40
"""Starts tried on the circle until sources and targets stand in one cyclic order."""

MATCH_RATIO = 0.2
"""Cap radius over gap while atoms are matched: as large as the neurons' caps allow, for accuracy."""

SPACIOUS = 0.5
"""A gap (as a share of what evenly spread centres would have) that is enough for matching where the targets are."""

DIRAC_SIZE = 0.02
"""Radius, as a share of the gap, to which a cap that becomes a single atom is brought before it is merged."""

SPREAD = 0.2
"""Atoms that share a goal are matched to places around it, this share of the way to the nearest other goal."""

MERGED = 1e-12
"""Angle (radians, as seen in the target) within which atoms that share a goal end."""


def build(problem: Problem, *, seed: int, on_stage: Callable[[str], None]) -> tuple[list[Layer], dict[str, float]]:
    """Layers that carry every source to its target, and the separation reached.

    Raises:
        NotSeparatedError: the measures cannot be moved apart, or routing finds no way.
        NotConvergedError: matching stops short.
    """
    on_stage("disentangle")
    failure: NotSeparatedError | None = None
    for attempt in range(STARTS if problem.points.shape[-1] == 2 else 1):
        source_start = disentangle(problem.points, problem.weights, seed=seed + 2 * attempt, vary=attempt > 0)
        target_start = disentangle(problem.goals, problem.goal_weights, seed=seed + 2 * attempt + 1, vary=attempt > 1)
        for ratio in RATIOS:
            try:
                goal = shrink(target_start, problem.goal_weights, ratio=ratio, gap=math.inf)
                on_stage("route")
                goal = _give_room(goal, problem.goal_weights, seed)
                places, room = _places(problem.which, goal)
                source = shrink(source_start, problem.weights, ratio=ratio, gap=room)
                routing = _route(source, places, seed)
            except NotSeparatedError as error:
                failure = error
                continue
            return _carry(problem, source, goal, room, routing, seed, on_stage)
    raise failure or NotSeparatedError("no ratio of cap radius to gap left room to route")


def _route(now: Caps, places: Float[Tensor, "N d"], seed: int) -> list[Layer]:
    if now.centres.shape[-1] == 2:
        return route_on_circle(now.centres, now.radii, places)
    legs = route(now.centres, now.radii, places, seed=seed)
    return [layer for leg in legs for layer in leg_layers(leg)]


def _give_room(goal: Caps, weights: Float[Tensor, "U m"], seed: int) -> Caps:
    """Bring the target caps to a size at which matching is accurate, after moving them apart if they are crowded.

    What is matched in a cap of radius r is off by rounding over r in the end. Crowded targets, whose caps are small,
    are routed to stations spread over the sphere first; restoring them undoes that too.
    """
    layers = list(goal.layers)
    on_circle = goal.centres.shape[-1] == 2
    stations = stations_in_order(goal.centres) if on_circle else spread_points(len(goal.centres), goal.centres, seed)
    if goal.gap < SPACIOUS * smallest_gap(stations):
        layers += _route(goal, stations, seed)
        goal = caps(layers, advance(layers[len(goal.layers) :], goal.points, weights), weights)
    layers += resize(goal, torch.full_like(goal.radii, MATCH_RATIO * goal.gap), goal.gap, "disentangle")
    return caps(layers, advance(layers[len(goal.layers) :], goal.points, weights), weights)


def _places(which: Int[Tensor, " N"], goal: Caps) -> tuple[Float[Tensor, "N d"], float]:
    """Where each source cap goes: its target's centre, or places around it where several sources share a target."""
    places, d = goal.centres[which].clone(), goal.centres.shape[-1]
    generator = torch.Generator(device=which.device).manual_seed(0)
    shared = torch.bincount(which, minlength=len(goal.centres))
    for u in (shared > 1).nonzero()[:, 0].tolist():
        members = (which == u).nonzero()[:, 0]
        tries = sphere.tangent(goal.centres[u], sphere.uniform(256, d, generator=generator, dtype=places.dtype))
        tries = sphere.exp(goal.centres[u].expand_as(tries), 0.15 * goal.gap * sphere.project(tries))
        chosen = [0]
        while len(chosen) < len(members):
            chosen.append(int(sphere.pairwise_distance(tries, tries[chosen]).amin(-1).argmax()))
        places[members] = tries[chosen]
    return places, smallest_gap(places)


def _carry(
    problem: Problem,
    source: Caps,
    goal: Caps,
    room: float,
    routing: list[Layer],
    seed: int,
    on_stage: Callable[[str], None],
) -> tuple[list[Layer], dict[str, float]]:
    weights = problem.weights
    points = advance(routing, source.points, weights)

    on_stage("match")
    # A cap that becomes one atom has no shape to reach: it is brought to a small size and merged there.
    radii = goal.radii[problem.which]
    radii = torch.where(radii > POINT, radii, DIRAC_SIZE * room).clamp(max=MATCH_RATIO * room)
    resizing = resize(caps((), points, weights), radii, room, "resize")
    points = advance(resizing, points, weights)

    goals = rows(goal.points[problem.which], problem.slots)
    slots = problem.slots.gather(1, assign(points, goals, problem.kinds))
    slots = torch.where(problem.kinds < 0, slots[:, :1], slots)
    cap = _gather_caps(problem, points, slots, goal)
    places_around, gates = _spread(cap, goal)
    if cap.points.shape[-1] == 2:
        _check_order(cap, places_around)
    matching, _ = match(cap.points, places_around, cap.kinds, goal.gap, seed=seed, tolerance=1e-12, on_slice=on_stage)
    on_stage("restore")
    restore = [replace(layer.inverse(), stage="restore") for layer in reversed(goal.layers)]
    separation = {
        "source gap": source.gap,
        "source radius": float(source.radii.max()),
        "target gap": goal.gap,
        "target radius": float(goal.radii.max()),
    }
    return [*source.layers, *routing, *resizing, *matching, *gates, *restore], separation


def _check_order(cap: "_CapAtoms", goals: Float[Tensor, "U k 2"]) -> None:
    for u, kinds in enumerate(cap.kinds):
        real = kinds >= 0
        rows_crossed = crossing(cap.points[u][real], goals[u][real], real.nonzero()[:, 0])
        if rows_crossed is not None:
            raise NoTransportMapError(
                f"target {u}: on the circle tokens cannot pass each other, and source atoms {rows_crossed[0]} and "
                f"{rows_crossed[1]} would have to"
            )


@dataclass(frozen=True)
class _CapAtoms:
    """All atoms that go to one target, whatever source they are from: (U, k, d), padded with copies of the first."""

    points: Float[Tensor, "U k d"]
    slots: Int[Tensor, "U k"]
    kinds: Int[Tensor, "U k"]


def _gather_caps(problem: Problem, points: Float[Tensor, "N n d"], slots: Int[Tensor, "N n"], goal: Caps) -> _CapAtoms:
    n = points.shape[1]
    # Kinds of different sources never mix.
    kinds = torch.where(problem.kinds < 0, -1, problem.kinds + n * torch.arange(len(points)).unsqueeze(1))
    members = [(problem.which == u).nonzero()[:, 0] for u in range(len(goal.centres))]
    real = [problem.kinds[m] >= 0 for m in members]
    longest = max(int(r.sum()) for r in real)
    parts = []
    for m, r in zip(members, real, strict=True):
        order = torch.arange(longest)
        index = torch.where(order < int(r.sum()), order, 0)
        kind = torch.where(order < int(r.sum()), kinds[m][r][index], -1)
        parts.append((points[m][r][index], slots[m][r][index], kind))
    return _CapAtoms(*(torch.stack(part) for part in zip(*parts, strict=True)))


def _spread(cap: _CapAtoms, goal: Caps) -> tuple[Float[Tensor, "U k d"], list[Layer]]:
    """Where atoms are matched to, and the layer that then merges those which share a goal.

    An invertible flow cannot merge two atoms; it can bring them as close as one likes. Atoms that share a goal are
    matched to places around it, in the arrangement they have, and a local drift towards the goal contracts these.
    """
    places = rows(goal.points, cap.slots)
    gates = []
    stretch = sum(layer.duration for layer in goal.layers)
    for u in range(len(places)):
        real = cap.kinds[u] >= 0
        used, times = torch.unique(cap.slots[u][real], return_counts=True)
        apart = nearest_other(goal.points[u][used]).clamp(max=goal.gap)
        for slot, count, clear in zip(used.tolist(), times.tolist(), apart.tolist(), strict=True):
            if count == 1:
                continue
            at, centre = cap.slots[u] == slot, goal.points[u, slot]
            here = cap.points[u][at]
            offset = sphere.tangent(centre.expand_as(here), here - here.mean(0))
            reach = float(torch.linalg.vector_norm(offset, dim=-1).max())
            around = min(SPREAD * clear, reach)
            places[u, at] = sphere.exp(centre.expand_as(here), offset * (around / reach))
            time = max(1.0, math.log(around / MERGED) + stretch)
            outer, inner = math.cos(0.6 * clear), math.cos(max(0.3 * clear, 1.5 * around))
            gates.append(saturating_gate(centre, outer, inner - outer, time * centre))
    return places, [Layer((), merge(gates), 1.0, "merge")] if gates else []

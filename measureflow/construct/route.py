r"""Route: carry caps to their target centres one at a time, with saturating gates; all others return exactly.

For a leg from x to y take gamma orthogonal to both and omega = -(x+y)/|x+y|. Park: a gate on +<gamma, .> drifts to
omega+ = cos(π/8) omega + sin(π/8) gamma, one on -<gamma, .> to omega-; everything but the active cap, which lies where
both are 0, ends within 3π/16 of omega. Move: a gate on -<omega, .>, 0 on the parking place, drifts the active cap along
the great circle through x and y. Restore: the parking layer inverted.

Source: arXiv 2411.04551, Proposition 4.2, corrected: gamma must be orthogonal to both x and y, and gates must saturate
(an unsaturated gate contracts its fast points by e^{-100} while slow ones still move).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from measureflow import sphere
from measureflow.errors import NotSeparatedError
from measureflow.transformer import Layer, merge, saturating_gate

PARK_TIME = 4.0
"""Long enough for a point at angle π - π/8 from omega± to end 3π/16 from omega: 2 atan(e^{-4} tan(7π/16)) < π/16."""

CLOSED = math.cos(3.3 * math.pi / 16)
"""Cosine of the angle from omega within which the moving gate is 0; a little more than 3π/16."""

Vector = Float[Tensor, " d"]


@dataclass(frozen=True)
class Leg:
    """One move of one cap on a great circle: from x to y with the gate direction gamma and its clearance."""

    cap: int
    x: Vector
    y: Vector
    gamma: Vector
    clearance: float


def leg_layers(leg: Leg) -> list[Layer]:
    """Layers of a leg: park, move, restore."""
    x, y, gamma, clear = leg.x, leg.y, leg.gamma, leg.clearance
    omega = -sphere.project(x + y)
    gates = []
    for side in (gamma, -gamma):
        park_at = sphere.project(math.cos(math.pi / 8) * omega + math.sin(math.pi / 8) * side)
        gates.append(saturating_gate(side, 0.4 * clear, 0.3 * clear, park_at))
    park = Layer((), merge(gates), PARK_TIME, "route")

    angle = float(sphere.distance(x, y))
    beyond = min(0.5, (math.pi - angle) / 3)
    z = sphere.exp(x, (1 + beyond / angle) * sphere.log(x, y))
    time = math.log(math.tan((angle + beyond) / 2)) - math.log(math.tan(beyond / 2))
    move = Layer((), saturating_gate(-omega, -CLOSED, 0.2, z), time, "route")
    return [park, move, park.inverse()]


def _clearances(
    x: Float[Tensor, "k d"], y: Float[Tensor, "k d"], others: Float[Tensor, "k m d"], radii: Float[Tensor, "k m"]
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k d"]]:
    """For k legs x -> y, the gamma that keeps the other caps farthest off its zero plane, and how far that is.

    In d = 3 gamma is x × y up to sign; in higher d it is chosen among directions orthogonal to x and y.
    """
    k, d = x.shape
    if d == 3:
        normal = torch.linalg.cross(x, y)
        length = torch.linalg.vector_norm(normal, dim=-1, keepdim=True)
        gammas = (normal / length.clamp(min=1e-12)).unsqueeze(1)
        usable = (length > 1e-6).expand(k, 1)
    else:
        gammas = _orthogonal(x, y, candidates=64)
        usable = torch.ones(k, gammas.shape[1], dtype=torch.bool, device=x.device)
    if others.shape[1] == 0:
        clear = torch.full((k, gammas.shape[1]), 0.5, dtype=x.dtype, device=x.device)
    else:
        heights = torch.einsum("kgd,kmd->kgm", gammas, others).abs()
        # The distance of a cap from the plane <gamma, .> = 0 is at least its centre's height less its radius.
        clear = (heights - radii.unsqueeze(1)).amin(-1)
    best, pick = clear.masked_fill(~usable, -torch.inf).max(-1)
    return best, gammas[torch.arange(k, device=x.device), pick]


def _orthogonal(x: Float[Tensor, "k d"], y: Float[Tensor, "k d"], candidates: int) -> Float[Tensor, "k g d"]:
    """The same random directions for all legs, made orthogonal to x and y."""
    generator = torch.Generator(device=x.device).manual_seed(0)
    free = sphere.uniform(candidates, x.shape[-1], generator=generator, dtype=x.dtype).expand(len(x), -1, -1)
    basis = torch.linalg.qr(torch.stack([x, y], dim=-1)).Q
    for _ in range(2):
        free = free - (free @ basis) @ basis.mT
    return sphere.project(free)


def _others(centres: Tensor, radii: Tensor, movers: Tensor) -> tuple[Tensor, Tensor]:
    """For each mover the centres and radii of all the other caps."""
    n = len(centres)
    keep = torch.arange(n, device=centres.device) != movers.unsqueeze(1)
    rows = torch.arange(n, device=centres.device).expand(len(movers), n)[keep].reshape(len(movers), n - 1)
    return centres[rows], radii[rows]


def _direct(centres: Tensor, radii: Tensor, goals: Tensor, movers: Tensor) -> tuple[Tensor, Tensor]:
    others, sizes = _others(centres, radii, movers)
    clear, gamma = _clearances(centres[movers], goals[movers], others, sizes)
    # Nearly antipodal ends have no middle to put omega behind.
    wide = sphere.distance(centres[movers], goals[movers]) > math.pi - 0.05
    return clear.masked_fill(wide, -torch.inf), gamma


def _via(
    centres: Tensor, radii: Tensor, goals: Tensor, mover: int, waypoints: Float[Tensor, "k d"]
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k d"], Float[Tensor, " k"], Float[Tensor, "k d"]]:
    """Clearance and gamma of the two legs through each waypoint."""
    k = len(waypoints)
    index = torch.full((k,), mover, device=centres.device)
    others, sizes = _others(centres, radii, index)
    x, y = centres[index], goals[index]
    first, gamma1 = _clearances(x, waypoints, others, sizes)
    second, gamma2 = _clearances(waypoints, y, others, sizes)
    for ends, clear in (((x, waypoints), first), ((waypoints, y), second)):
        angle = sphere.distance(*ends)
        clear[(angle > math.pi - 0.05) | (angle < 1e-3)] = -torch.inf
    return first, gamma1, second, gamma2


def route(
    centres: Float[Tensor, "N d"],
    radii: Float[Tensor, " N"],
    goals: Float[Tensor, "N d"],
    *,
    seed: int,
    room: float = 4.0,
    waypoints: int = 512,
) -> list[Leg]:
    """Choose the order of moves, and waypoints where no direct move has room.

    A leg has room when its clearance is `room` times the radius of every cap. Direct moves go first, the one with most
    clearance at each turn; then moves through one of `waypoints` random points; then a cap that stands in the way is
    sent to a free place. Each turn costs O(N² d) for direct moves and O(N² · waypoints · d) with waypoints.

    Args:
        centres, radii: of the caps (radians).
        goals: where the centres go, distinct.

    Raises:
        NotSeparatedError: no order was found; the cap and its best clearance are named.
    """
    generator = torch.Generator(device=centres.device).manual_seed(seed)
    now, legs = centres.clone(), []
    # A cap that is where it should be stays; what is left of the way is the matching's.
    left = sphere.distance(now, goals) > 0.5 * radii.clamp(min=1e-9)
    need = room * float(radii.max())
    patience = 2 * len(centres)
    while bool(left.any()):
        movers = left.nonzero()[:, 0]
        clear, gamma = _direct(now, radii, goals, movers)
        best = int(clear.argmax())
        if float(clear[best]) >= need:
            mover = int(movers[best])
            legs.append(Leg(mover, now[mover].clone(), goals[mover], gamma[best], min(float(clear[best]), 0.5)))
            now[mover] = goals[mover]
            left[mover] = False
            continue
        tries = sphere.uniform(waypoints, now.shape[-1], generator=generator, dtype=now.dtype)
        found = _best_detour(now, radii, goals, left, tries)
        if found is not None and found[-1].clearance >= need and found[0].clearance >= need:
            legs += found
            now[found[0].cap] = goals[found[0].cap]
            left[found[0].cap] = False
            continue
        patience -= 1
        step = _make_way(now, radii, goals, left, tries, need) if patience > 0 else None
        if step is None:
            mover = int(movers[best])
            raise NotSeparatedError(
                f"routing: cap {mover} finds no way with a clearance of {need:.2g} rad; "
                f"the best direct one has {float(clear[best]):.2g}"
            )
        legs.append(step)
        now[step.cap] = step.y
    return legs


def _best_detour(
    now: Tensor, radii: Tensor, goals: Tensor, left: Bool[Tensor, " N"], tries: Tensor
) -> list[Leg] | None:
    best: tuple[float, list[Leg]] | None = None
    for mover in left.nonzero()[:16, 0].tolist():
        first, gamma1, second, gamma2 = _via(now, radii, goals, mover, tries)
        worst = torch.minimum(first, second)
        pick = int(worst.argmax())
        if best is None or float(worst[pick]) > best[0]:
            legs = [
                Leg(mover, now[mover].clone(), tries[pick], gamma1[pick], min(float(first[pick]), 0.5)),
                Leg(mover, tries[pick], goals[mover], gamma2[pick], min(float(second[pick]), 0.5)),
            ]
            best = (float(worst[pick]), legs)
    return None if best is None else best[1]


def _make_way(
    now: Tensor, radii: Tensor, goals: Tensor, left: Bool[Tensor, " N"], tries: Tensor, need: float
) -> Leg | None:
    """Send the unfinished cap that is nearest to another one's goal to a place far from all goals and caps."""
    blocked = sphere.pairwise_distance(now, goals)
    blocked.fill_diagonal_(torch.inf)
    blocked[~left] = torch.inf
    blocked[:, ~left] = torch.inf
    for mover in blocked.amin(-1).argsort().tolist():
        if not bool(left[mover]):
            return None
        first, gamma, _, _ = _via(now, radii, goals, mover, tries)
        others = torch.cat([goals, now])
        free = sphere.pairwise_distance(tries, others).amin(-1)
        score = torch.where(first >= need, free, -torch.inf)
        pick = int(score.argmax())
        if float(score[pick]) > 2 * need:
            return Leg(mover, now[mover].clone(), tries[pick], gamma[pick], min(float(first[pick]), 0.5))
    return None


def spread_points(count: int, near: Float[Tensor, "N d"], seed: int) -> Float[Tensor, "N d"]:
    """As many points as there are centres, spread over the sphere, each given to a centre so that ways are short."""
    generator = torch.Generator(device=near.device).manual_seed(seed)
    points = sphere.uniform(count, near.shape[-1], generator=generator, dtype=near.dtype)
    # Repulsion, enough steps for an even spread, not for an optimum. Points are also kept off each other's antipodes:
    # every great circle to y passes -y, so that a cap waiting there would leave no clearance.
    for step in range(200):
        force = _push(points, points) + 0.3 * _push(points, -points)
        force = sphere.tangent(points, force)
        size = torch.linalg.vector_norm(force, dim=-1, keepdim=True).clamp(min=1e-12)
        points = sphere.project(points + 0.3 * 0.98**step * count ** (-1 / (near.shape[-1] - 1)) * force / size)
    cost = sphere.pairwise_distance(near, points).square()
    return points[torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(near.device)]


def _push(points: Float[Tensor, "N d"], others: Float[Tensor, "N d"]) -> Float[Tensor, "N d"]:
    apart = points.unsqueeze(1) - others
    return (apart / apart.square().sum(-1, keepdim=True).clamp(min=1e-12) ** 1.5).sum(1)

"""Routing on the circle (d = 2), where tokens cannot pass each other: caps keep their cyclic order."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from measureflow.errors import NotSeparatedError
from measureflow.transformer import Layer, saturating_gate

MOST_MOVES = 2000


def angles(points: Float[Tensor, "*batch 2"]) -> Float[Tensor, "*batch"]:
    """Angle of points of the circle, in (-π, π]."""
    return torch.atan2(points[..., 1], points[..., 0])


def same_order(centres: Float[Tensor, "N 2"], goals: Float[Tensor, "N 2"]) -> bool:
    """Whether the goals stand around the circle in the order of the centres."""
    a, b = angles(centres).argsort(), angles(goals).argsort()
    start = int((b == a[0]).nonzero()[0, 0])
    return bool((b.roll(-start) == a).all())


def stations_in_order(centres: Float[Tensor, "N 2"]) -> Float[Tensor, "N 2"]:
    """Evenly spaced places in the order of the centres, turned to be near them."""
    n = len(centres)
    order = angles(centres).argsort()
    step = 2 * math.pi * torch.arange(n, dtype=centres.dtype, device=centres.device) / n
    lag = angles(centres)[order] - step
    turn = torch.atan2(lag.sin().mean(), lag.cos().mean())
    places = torch.empty_like(centres)
    places[order] = torch.stack([(step + turn).cos(), (step + turn).sin()], dim=-1)
    return places


def route_on_circle(
    centres: Float[Tensor, "N 2"], radii: Float[Tensor, " N"], goals: Float[Tensor, "N 2"]
) -> list[Layer]:
    """Layers that carry caps to their goals, each by gates over the free arc before it, in turns.

    Raises:
        NotSeparatedError: the goals stand in another cyclic order, or the caps are too large to move.
    """
    if not same_order(centres, goals):
        raise NotSeparatedError("on the circle caps keep their cyclic order, and the targets stand in another one")
    now, left, layers = angles(centres).tolist(), _ways(centres, goals), []
    size = float(radii.max())
    for _ in range(MOST_MOVES):
        if max(map(abs, left)) < 1e-12:
            return layers
        steps = [_free(now, left[i], i, size) for i in range(len(now))]
        i = max(range(len(now)), key=lambda k: abs(steps[k]))
        if abs(steps[i]) < 1e-3 * size:
            break
        layers.append(_move(now[i], steps[i], size, _gap(now, i, steps[i])))
        now[i] += steps[i]
        left[i] -= steps[i]
    raise NotSeparatedError(f"routing on the circle: caps of radius {size:.2g} rad are in each other's way")


def _ways(centres: Float[Tensor, "N 2"], goals: Float[Tensor, "N 2"]) -> list[float]:
    """Signed angle each cap has to go, all with one winding, so that nobody has to pass."""
    order = angles(centres).argsort()
    here = angles(centres)[order]
    there = angles(goals)[order]
    # Unwind the goals into increasing angles, then turn all by whole circles to be nearest.
    turns = torch.cat([there.new_zeros(1), (there[1:] < there[:-1]).to(there.dtype).cumsum(0)])
    way = there + 2 * math.pi * turns - here
    way = way - 2 * math.pi * torch.round(way.mean() / (2 * math.pi))
    ways = torch.empty_like(way)
    ways[order] = way
    return ways.tolist()


def _gap(now: list[float], i: int, step: float) -> float:
    """Angle to the next cap on that side; a full turn for a single cap."""
    side = math.copysign(1.0, step)
    others = [side * (a - now[i]) % (2 * math.pi) for k, a in enumerate(now) if k != i]
    return min(others, default=2 * math.pi)


def _free(now: list[float], left: float, i: int, size: float) -> float:
    """How far cap i may go in one move: not past the next cap, nor more than a right angle."""
    room = _gap(now, i, left) - 8 * size
    return math.copysign(max(0.0, min(abs(left), room, math.pi / 2)), left)


def _move(start: float, step: float, size: float, gap: float) -> Layer:
    """A drift over the arc of the move, at full strength on the cap and 0 on all others."""
    side = math.copysign(1.0, step)
    # Beyond the end there is room for the point that attracts, and for the gate's edge.
    beyond = min(0.5, (min(gap, math.pi) - abs(step)) / 3)
    middle, half = start + step / 2, abs(step) / 2
    toward = start + step + side * beyond
    inner, outer = half + 1.5 * size, half + min(3 * size, 2.5)
    z = torch.tensor([math.cos(toward), math.sin(toward)], dtype=torch.float64)
    m = torch.tensor([math.cos(middle), math.sin(middle)], dtype=torch.float64)
    time = math.log(math.tan((abs(step) + beyond) / 2)) - math.log(math.tan(beyond / 2))
    low = math.cos(min(outer, math.pi))
    return Layer((), saturating_gate(m, low, math.cos(inner) - low, z), time, "route")


def crossing(
    points: Float[Tensor, "n 2"], goals: Float[Tensor, "n 2"], rows: Int[Tensor, " n"]
) -> tuple[int, int] | None:
    """Two rows whose goals stand in the other order than they do, on an arc; None where there are none."""
    mean = points.mean(0)
    goal_mean = goals.mean(0)
    here = points[:, 1] * mean[0] - points[:, 0] * mean[1]
    there = goals[:, 1] * goal_mean[0] - goals[:, 0] * goal_mean[1]
    order = here.argsort()
    back = (there[order][1:] < there[order][:-1] - 1e-12).nonzero()[:, 0]
    if not len(back):
        return None
    k = int(back[0])
    return int(rows[order[k]]), int(rows[order[k + 1]])

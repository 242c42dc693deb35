"""Match: carry the atoms of every cap to their goals, all measures at once, by perceptrons in closed form.

A slice of time is one layer: random caps as neurons (<u, x> - cos rho)_+ whose rim cuts the tokens' cap and whose
radius is below the gap to the other caps, so that other measures see exactly zero; W solves the linear system that
gives each atom the velocity of its geodesic, with the least norm. Each slice plans anew from where the atoms are
(closed loop), so errors do not add up: from slice to slice they fall quadratically.

Rims are chosen so that no atom crosses one during the slice. Then the velocity along every path is smooth, and any
integrator of high order reproduces the flow to rounding; with kinks on the paths it would not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchdiffeq import odeint

from measureflow import sphere
from measureflow.construct.assign import assign, rows
from measureflow.errors import NotConvergedError
from measureflow.transformer import Layer, Perceptron

NEURONS_PER_ATOM = 8
"""Two conditions an atom (velocity at both ends of its path) leave room for a small W."""

FEWEST_NEURONS_PER_ATOM = 5
CANDIDATES_PER_ATOM = 64
SMALLEST_SHARE = 1 / 256
MARGIN = 0.1
"""A rim keeps clear of a path by this share of the path's length."""

STIFFNESS = 0.1
"""Weight of the conditions that the velocity does not change across an atom's path: they keep the flow's derivative
at the atoms near the identity, so that rounding is not amplified by the shear between near atoms."""

MOST_SIDES = 3
"""Directions across the path that get such a condition (all of them up to d = 5)."""

ROUNDING = 2e-14
"""Angle (radians) below which a slice no longer improves: a coordinate's rounding, times what W makes of it."""

ENOUGH = 1e-9
"""Share of a cap's radius left between atoms and goals with which matching that no longer improves is accepted."""

PATIENCE = 12
"""Slices without halving what is left, after which matching no longer improves."""

CALM = 4.0
"""Amplification (Frobenius norm) of a slice with which no smaller ridge is tried."""

CHOICES = 4
"""How often rims that turn out to be crossed are replaced by others before the slice is made shorter."""

RIDGES = (1e-5, 1e-7, 1e-9, 1e-11, 1e-13)
"""Tried in turn on a measure until its atoms go where they should: a large one gives up on atoms that nearly touch."""


Points = Float[Tensor, "N n d"]


@dataclass(frozen=True)
class Rims:
    """Neurons of one slice: (<u, x> - cos rho) / (scale sin rho), one row of neurons per measure."""

    U: Float[Tensor, "N m d"]
    b: Float[Tensor, "N m"]

    def activations(self, points: Float[Tensor, "N k d"]) -> Float[Tensor, "N k m"]:
        """Values before the relu."""
        return points @ self.U.mT + self.b.unsqueeze(1)


def _candidate_rims(
    points: Float[Tensor, "N n d"], scale: Float[Tensor, " N"], rho: float, count: int, generator: torch.Generator
) -> Rims:
    """Rims through places between atoms: half at a random distance from an atom, half between two near atoms."""
    N, n, d = points.shape
    dtype, half = points.dtype, (count + 1) // 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=points.device)

    def gather(index: Int[Tensor, "N k"]) -> Tensor:
        return points.gather(1, index.unsqueeze(-1).expand(-1, -1, d))

    atom = torch.randint(n, (N, half), generator=generator, device=points.device)
    reach = scale.unsqueeze(1) * torch.exp(
        -4 * torch.rand(N, half, generator=generator, dtype=dtype, device=points.device)
    )
    base = gather(atom)
    free = sphere.project(
        sphere.exp(base, reach.unsqueeze(-1) * sphere.project(sphere.tangent(base, normal(N, half, d))))
    )
    free_side = sphere.tangent(free, normal(N, half, d))

    k = half
    first = torch.randint(n, (N, k), generator=generator, device=points.device)
    between = sphere.pairwise_distance(points, points)
    near = between.argsort(-1)[..., 1 : max(2, min(n, 9))] if n > 1 else torch.zeros_like(between, dtype=torch.long)
    # The nearest neighbour half of the time, the next a quarter, ...
    chance = 0.5 ** torch.arange(near.shape[-1], dtype=dtype, device=points.device)
    which = torch.multinomial(chance.expand(N, -1), k, replacement=True, generator=generator)
    second = near.gather(1, first.unsqueeze(-1).expand(-1, -1, near.shape[-1])).gather(2, which.unsqueeze(-1))[..., 0]
    a, b = gather(first), gather(second)
    share = 0.2 + 0.6 * torch.rand(N, k, 1, generator=generator, dtype=dtype, device=points.device)
    middle = sphere.project(a + share * (b - a))
    step = b - a
    length = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
    pair_side = sphere.tangent(middle, step + 0.5 * length * normal(N, k, d) + 1e-12 * normal(N, k, d))

    # In turn, so that the first few are of both sorts.
    through = torch.stack([free, middle], dim=2).flatten(1, 2)
    side = sphere.project(torch.stack([free_side, pair_side], dim=2).flatten(1, 2))
    sign = torch.where(torch.rand(N, 2 * half, 1, generator=generator, dtype=dtype, device=points.device) < 0.5, -1, 1)
    centre = math.cos(rho) * through + math.sin(rho) * sign * side
    size = (scale * math.sin(rho)).reshape(N, 1, 1)
    return Rims(centre / size, -math.cos(rho) / size[..., 0].expand(N, 2 * half))


def _hits(pool: Rims, start: Points, end: Points) -> Int[Tensor, "N p"]:
    """How many paths cross each rim, or pass it nearer than a share of their length."""
    ahead, behind = pool.activations(start), pool.activations(end)
    clear = torch.where(ahead * behind > 0, torch.minimum(ahead.abs(), behind.abs()), 0.0)
    return (clear <= MARGIN * (ahead - behind).abs()).sum(1)


def _choose(pool: Rims, hits: Int[Tensor, "N p"], n: int) -> tuple[Rims, Int[Tensor, "N m"]] | None:
    """As many rims as no path crosses, the same number for every measure; None where too few."""
    free = int((hits == 0).sum(-1).min())
    if free < FEWEST_NEURONS_PER_ATOM * n + 8:
        return None
    order = torch.argsort(hits, dim=-1, stable=True)[:, : min(free, NEURONS_PER_ATOM * n + 16)]
    d = pool.U.shape[-1]
    return Rims(pool.U.gather(1, order.unsqueeze(-1).expand(-1, -1, d)), pool.b.gather(1, order)), order


def _least_norm(F: Float[Tensor, "N k m"], target: Float[Tensor, "N k d"], ridge: float) -> Float[Tensor, "N m d"]:
    """W of least norm with F W = target, up to a ridge relative to the mean of the diagonal of F F^T."""
    gram = F @ F.mT
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1).reshape(-1, 1, 1)
    eye = torch.eye(gram.shape[-1], dtype=F.dtype, device=F.device)
    # Where rounding makes the matrix indefinite the factor is not finite, and the next ridge is tried.
    factor, _ = torch.linalg.cholesky_ex(gram + ridge * scale * eye)
    solution = F.mT @ torch.cholesky_solve(target, factor)
    # One step of refinement wins back what squaring the condition number lost.
    return solution + F.mT @ torch.cholesky_solve(target - F @ solution, factor)


def _conditions(
    rims: Rims, start: Points, end: Points, velocity: Points, scale: Float[Tensor, " N"], generator: torch.Generator
) -> tuple[Float[Tensor, "N k m"], Float[Tensor, "N k d"]]:
    """The linear system for W: velocities at both ends of each path, and (weakly) no change across it."""
    n, d = start.shape[1:]
    sides = min(d - 2, MOST_SIDES)
    rows_of = [torch.relu(rims.activations(torch.cat([start, end], dim=1)))]
    wanted = [velocity, _transport(start, end, velocity)]
    if sides > 0:
        free = torch.randn(*start.shape, sides, generator=generator, dtype=start.dtype, device=start.device)
        frame = torch.linalg.qr(torch.cat([torch.stack([start, velocity], dim=-1), free], dim=-1)).Q[..., 2:]
        on = rims.activations(start) > 0
        between = sphere.pairwise_distance(start, start)
        nearest = between.masked_fill(between == 0, torch.inf).amin(-1, keepdim=True)
        stiffness = STIFFNESS * torch.minimum(nearest, scale.reshape(-1, 1, 1))
        for k in range(sides):
            slope = on * (frame[..., k] @ rims.U.mT)
            rows_of.append(stiffness * slope)
        wanted.append(start.new_zeros(len(start), n * sides, d))
    return torch.cat(rows_of, dim=1), torch.cat(wanted, dim=1)


def _transport(start: Points, end: Points, velocity: Points) -> Points:
    """Velocity at `end` of the geodesic that left `start` with the given velocity."""
    onward = sphere.tangent(end, velocity)
    speed = torch.linalg.vector_norm(velocity, dim=-1, keepdim=True)
    size = torch.linalg.vector_norm(onward, dim=-1, keepdim=True)
    return onward * (speed / size.clamp(min=torch.finfo(size.dtype).tiny))


def _glance(
    rims: Rims, W: Float[Tensor, "N m d"], points: Points, time: float, steps: int = 4
) -> tuple[Points, Bool[Tensor, "N m"]]:
    """Where W leads, by a few steps of RK4, and which rims an atom crosses on the way."""
    h = time / steps
    inside = rims.activations(points) > 0
    crossed = torch.zeros_like(rims.b, dtype=torch.bool)

    def field(x: Tensor) -> Tensor:
        nonlocal crossed
        active = rims.activations(x)
        crossed = crossed | ((active > 0) != inside).any(1)
        return sphere.tangent(x, torch.relu(active) @ W)

    for _ in range(steps):
        k1 = field(points)
        k2 = field(points + h / 2 * k1)
        k3 = field(points + h / 2 * k2)
        k4 = field(points + h * k3)
        points = points + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    field(points)
    return points / torch.linalg.vector_norm(points, dim=-1, keepdim=True), crossed


def _flow(rims: Rims, W: Float[Tensor, "N m d"], points: Points, time: float) -> Points:
    """Carry each measure by its own neurons, to rounding (the neurons of the others are exactly zero on it)."""

    def field(_: Tensor, x: Tensor) -> Tensor:
        return sphere.tangent(x, torch.relu(rims.activations(x)) @ W)

    def norm(error: Tensor) -> Tensor:
        return error.square().mean((-1, -2)).amax().sqrt()

    ends = points.new_tensor([0.0, time])
    # A step ends at the end: torchdiffeq would otherwise pass it and interpolate, at order 4.
    options = {"norm": norm, "step_t": ends[1:]}
    moved: Any = odeint(field, points, ends, method="dopri8", rtol=0.0, atol=1e-13, options=options)
    return sphere.project(moved[-1])


def _growth(rims: Rims, W: Float[Tensor, "N m d"], points: Points, time: float) -> Float[Tensor, " N"]:
    """By how much the slice stretches a small error at an atom, at worst: |e^{time D}|, D the derivative of the field.

    D is constant along a path that crosses no rim.
    """
    on = (rims.activations(points) > 0).to(points.dtype)
    N, n, d = points.shape
    pairs = (rims.U.unsqueeze(-1) * W.unsqueeze(-2)).flatten(-2)
    D = (on @ pairs).reshape(N, n, d, d).mT
    D = D - points.unsqueeze(-1) * (points.unsqueeze(-2) @ D)
    wild = ~(time * torch.linalg.matrix_norm(D) < 50)
    stretch = torch.matrix_exp(torch.where(wild[..., None, None], 0.0, time * D))
    return torch.where(wild, torch.inf, torch.linalg.matrix_norm(stretch)).amax(-1)


@dataclass(frozen=True)
class _Slice:
    rims: Rims
    W: Float[Tensor, "N m d"]
    share: float
    rate: float


def _rms(points: Points, goals: Points) -> Float[Tensor, " N"]:
    return sphere.distance(points, goals).square().mean(-1).sqrt()


def _plan(
    points: Points,
    goals: Points,
    scale: Float[Tensor, " N"],
    pool: Rims,
    share: float,
    generator: torch.Generator,
) -> _Slice | None:
    """The layer that covers a share of what is left, or None where rims that no path crosses are too few."""
    left = sphere.log(points, goals)
    end = sphere.exp(points, share * left)
    before = _rms(points, goals).clamp(min=torch.finfo(points.dtype).tiny)
    # A measure that has arrived, to rounding, is not judged.
    arrived = before <= 1e-13 * scale.clamp(min=1e-2)
    hits = _hits(pool, points, end)
    best: _Slice | None = None
    for _ in range(CHOICES):
        choice = _choose(pool, hits, points.shape[1])
        if choice is None:
            return best
        rims, order = choice
        F, velocity = _conditions(rims, points, end, left, scale, generator)
        W, rate = torch.zeros(0), torch.full_like(before, torch.inf)
        badness = torch.full_like(before, torch.inf)
        crossed = torch.zeros_like(order, dtype=torch.bool)
        for ridge in RIDGES:
            trial = _least_norm(F, velocity, ridge)
            ends, over = _glance(rims, trial, points, share)
            reached = torch.nan_to_num(_rms(ends, goals) / before, nan=torch.inf) + 1e3 * over.any(-1)
            # Of those that cover most of the share the one that amplifies least, else the one that covers most.
            good = reached <= (1 - 0.7 * share if share < 1 else 0.05)
            amplified = torch.nan_to_num(_growth(rims, trial, points, share), nan=torch.inf)
            measure = torch.where(good, 1 - 1 / (1 + amplified), 1 + reached)
            better = measure < badness
            W = torch.where(better.reshape(-1, 1, 1), trial, W) if len(W) else trial
            badness = torch.where(better, measure, badness)
            rate = torch.where(arrived, 0.0, torch.where(better, reached, rate))
            crossed = torch.where(better.unsqueeze(-1), over, crossed)
            if bool((arrived | (good & (amplified < CALM))).all()):
                break
        if float(rate.max()) < 1:
            return _Slice(rims, W, share, float(rate.max()))
        # A rim that was crossed after all is not taken again.
        hits = hits.scatter_add(1, order, crossed.long())
    return best


def match(
    points: Points,
    goals: Points,
    kinds: Int[Tensor, "N n"],
    gap: float,
    *,
    seed: int,
    tolerance: float,
    on_slice: Callable[[str], None] = lambda stage: None,
    slices: int = 100,
) -> tuple[list[Layer], Points]:
    """Layers that carry every atom to its goal, and where the atoms end.

    Args:
        points, goals: (N, n, d) row by row; all of a measure lie in one cap, small against the gap.
        kinds: atoms of one measure with the same kind may swap goals; -1 marks padding, which sits on the first atom.
        gap: smallest angle between the centres of two caps (radians).
        tolerance: largest angle left between an atom and its goal, as a share of its cap's radius.
        on_slice: called after each slice, to show progress.

    Raises:
        NotConvergedError: the tolerance is not reached; the measure and what is left are named.
    """
    generator = torch.Generator(device=points.device).manual_seed(seed)
    n, d = points.shape[1:]
    layers: list[Layer] = []
    share, best_reached, since, reached = 0.25, math.inf, 0, math.inf
    for _ in range(slices):
        if share < 1:
            goals = rows(goals, assign(points, goals, kinds))
            # Padding sits on the first atom and follows it.
            goals = torch.where((kinds < 0).unsqueeze(-1), goals[:, :1], goals)
        centre = sphere.project((points + goals).mean(1, keepdim=True))
        scale = sphere.distance(torch.cat([points, goals], dim=1), centre).amax(-1)
        left = sphere.distance(points, goals).amax(-1)
        reached = float((left / torch.clamp(scale, min=ROUNDING / tolerance)).max())
        if reached <= tolerance:
            return layers, points
        since = 0 if reached < 0.5 * best_reached else since + 1
        best_reached = min(best_reached, reached)
        if since > PATIENCE:
            break
        rho = min(0.5, 0.45 * (gap - 2 * float(scale.max())))
        pool = _candidate_rims(points, scale.clamp(min=1e-12), rho, CANDIDATES_PER_ATOM * n + 64, generator)
        share = min(1.0, 2 * share)
        best: _Slice | None = None
        while share >= SMALLEST_SHARE:
            plan = _plan(points, goals, scale, pool, share, generator)
            if plan is not None and (best is None or plan.rate < best.rate):
                best = plan
            if best is not None and (best.rate <= 1 - 0.5 * best.share or share < best.share / 4):
                break
            share /= 2
        if best is None or (best.rate >= 1 and since > 0):
            break
        share = best.share
        points = _flow(best.rims, best.W, points, share)
        perceptron = Perceptron(best.W.reshape(-1, d).T, best.rims.U.reshape(-1, d), best.rims.b.reshape(-1))
        layers.append(Layer((), perceptron, share, "match"))
        on_slice("match")
    if reached <= ENOUGH:
        # Atoms that nearly touch keep a slice from getting all the way to rounding.
        return layers, points
    left = sphere.distance(points, goals).amax(-1)
    measure = int(left.argmax())
    raise NotConvergedError(f"matching: measure {measure} stays {float(left[measure]):.2g} rad from its goals")

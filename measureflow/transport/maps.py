"""Is there a map? A map sends an atom to one place, so it can merge atoms but never split one."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor

from measureflow import sphere
from measureflow.measures import TokenMeasure
from measureflow.transport.exact import MAX_ITERATIONS, network_simplex

SAME_WEIGHT = 1e-9
"""Weights that differ by less, relatively, are one weight: a file may give them with ten digits."""

SEARCH = 200_000
"""Steps of the search for a partition of the weights before it is left undecided."""

MATCHING_SECONDS = 20.0


@dataclass(frozen=True)
class MapCheck:
    """Whether a map carries one measure to another, and the best one.

    Args:
        exists: True or False; None where the search for a partition of the weights was not finished.
        images: (n, d) where the best map found sends each source row (padding stays).
        rows: (n,) the target row that each source row goes to, where a map exists; else None. -1 on padding.
        w2: W2 (radians) between the image of the source under that map and the target.
        lower: a bound that no map gets below (radians); equal to w2 where the best map is known.
        reason: one sentence.
    """

    exists: bool | None
    images: Float[Tensor, "n d"]
    rows: Int[Tensor, " n"] | None
    w2: float
    lower: float
    reason: str


def distinct_atoms(mu: TokenMeasure) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"], Int[Tensor, " n"]]:
    """Points and weights of the different places of one measure in order of appearance, and the place of each row
    (-1 on padding)."""
    real = mu.weights > 0
    points = mu.points[real]
    _, inverse = torch.unique(points, dim=0, return_inverse=True)
    first = inverse.new_full((int(inverse.max()) + 1,), len(inverse))
    first.scatter_reduce_(0, inverse, torch.arange(len(inverse), device=inverse.device), "amin")
    rank = torch.empty_like(first)
    rank[first.argsort()] = torch.arange(len(first), device=first.device)
    place = rank[inverse]
    weights = mu.weights.new_zeros(len(first)).index_add_(0, place, mu.weights[real])
    rows = torch.full_like(real, -1, dtype=torch.long).masked_scatter(real, place)
    return points[first.sort().values], weights, rows


def can_map(mu: TokenMeasure, nu: TokenMeasure) -> MapCheck:
    """Decide whether a map carries `mu` to `nu`, and find the map that comes nearest.

    Atoms at the same place are one atom, of their summed weight. A map exists exactly when the atoms of `mu` fall
    into groups whose weights are those of the atoms of `nu`. Where none exists, a map still chooses the place of
    every atom freely; the least W2 is exact when target weights are equal and no source atom weighs more than two of
    them (a matching of the target atoms that share a source atom), and bracketed otherwise.

    Raises:
        ValueError: these are batches, or dimensions differ.

    >>> two = TokenMeasure(torch.eye(2, dtype=torch.float64))
    >>> check = can_map(TokenMeasure(torch.eye(2, dtype=torch.float64)[:1]), two)
    >>> check.exists, round(check.w2, 4)  # one atom at the middle of two, π/4 from each
    (False, 0.7854)
    """
    if mu.batch_shape or nu.batch_shape:
        raise ValueError("expected two measures, got batches; index first")
    if mu.dim != nu.dim:
        raise ValueError(f"expected one dimension, got d = {mu.dim} and d = {nu.dim}")
    points, weights, place = distinct_atoms(mu)
    goals, goal_weights, goal_place = distinct_atoms(nu)
    a, b = weights.double().cpu().numpy(), goal_weights.double().cpu().numpy()
    groups = partition(a / a.sum(), b / b.sum())
    if groups is not None and groups.exact:
        row_of = torch.tensor([int((goal_place == g).nonzero()[0, 0]) for g in range(len(goals))])
        group = torch.from_numpy(groups.group)
        rows = torch.where(place < 0, -1, row_of[group[place]])
        images = torch.where((place >= 0).unsqueeze(-1), goals[group[place]], mu.points)
        return MapCheck(True, images, rows, 0.0, 0.0, "the source's weights make up the target's")
    images, w2, lower = _nearest(points, a / a.sum(), goals, b / b.sum())
    exists = False if groups is None else None
    spread = torch.where((place >= 0).unsqueeze(-1), images[place], mu.points)
    return MapCheck(exists, spread, None, w2, lower, _reason(mu, place, a / a.sum(), b / b.sum(), exists))


def _reason(mu: TokenMeasure, place: Tensor, a: np.ndarray, b: np.ndarray, exists: bool | None) -> str:
    if exists is None:
        return "it was not decided whether the source's weights can make up the target's"
    repeated = [g for g in range(len(a)) if int((place == g).sum()) > 1 and a[g] > b.min() * (1 + SAME_WEIGHT)]
    if repeated:
        rows = (place == repeated[0]).nonzero()[:, 0].tolist()
        return f"source rows {', '.join(map(str, rows))} are one point, and one atom cannot become several"
    if len(a) < len(b):
        return f"{len(a)} source atoms cannot become {len(b)} target atoms: one atom cannot become two"
    return "no groups of source weights make up the target's weights: one atom cannot be split"


@dataclass(frozen=True)
class Groups:
    """A target atom for each source atom; `exact` is False where the search gave up."""

    group: np.ndarray
    exact: bool


def partition(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " m"]) -> Groups | None:
    """Groups of source weights `a` that sum to the target weights `b`; None where there are none.

    Weights alone decide the usual cases (equal source weights; the same weights in another order); else it is a depth
    first search, heaviest atoms first, which is left undecided after SEARCH steps.
    """
    share = a.mean()
    if np.all(np.abs(a - share) <= SAME_WEIGHT * share):
        times = np.round(b / share)
        if np.all(np.abs(b - times * share) <= SAME_WEIGHT * np.maximum(b, share)):
            return Groups(np.repeat(np.arange(len(b)), times.astype(int)), True)
        return None
    slack = SAME_WEIGHT * a.max()
    if len(a) < len(b) or a.max() > b.max() + slack or a.min() > b.min() + slack:
        return None
    rank_a, rank_b = np.argsort(a), np.argsort(b)
    group = np.zeros(len(a), dtype=np.int64)
    if len(a) == len(b) and np.all(np.abs(a[rank_a] - b[rank_b]) <= SAME_WEIGHT * a[rank_a]):
        group[rank_a] = rank_b
        return Groups(group, True)
    return _search(a, b)


def _search(a: np.ndarray, b: np.ndarray) -> Groups | None:
    order = np.argsort(-a)
    room, group = b.copy(), np.zeros(len(a), dtype=np.int64)
    slack = SAME_WEIGHT * max(a.max(), b.max())
    # An explicit stack of (depth, choices left), so that a thousand atoms do not overrun Python's own.
    stack: list[list[int]] = []
    steps, depth = 0, 0
    while True:
        if depth == len(a):
            return Groups(group, True)
        weight = a[order[depth]]
        if len(stack) == depth:
            fits = np.nonzero(room >= weight - slack)[0]
            _, kept = np.unique(np.round(room[fits] / slack), return_index=True)  # equal rooms are one choice
            exactly_first = sorted(fits[kept], key=lambda j: (abs(room[j] - weight) > slack, room[j]), reverse=True)
            stack.append([int(j) for j in exactly_first])
        if not stack[depth]:
            stack.pop()
            depth -= 1
            if depth < 0:
                return None
            room[group[order[depth]]] += a[order[depth]]
            continue
        steps += 1
        if steps > SEARCH:
            return Groups(group, False)
        choice = stack[depth].pop()
        group[order[depth]] = choice
        room[choice] -= weight
        depth += 1


def _nearest(
    points: Float[Tensor, "n d"], a: np.ndarray, goals: Float[Tensor, "m d"], b: np.ndarray
) -> tuple[Float[Tensor, "n d"], float, float]:
    """Images of the source atoms, W2 reached, and a lower bound on it."""
    share = b.mean()
    times = np.round(a / share).astype(int)
    slack = SAME_WEIGHT * share
    whole = np.all(np.abs(b - share) <= slack) and np.all(np.abs(a - times * share) <= slack)
    if whole and times.min() >= 1 and times.max() == 2 and (matched := _by_matching(points, times, goals)):
        return matched
    images, w2 = _by_alternation(points, a, goals, b)
    lower = max(_spread_bound(a, goals, b), _neighbour_bound(times, goals) if whole and times.min() >= 1 else 0.0)
    return images, w2, min(lower, w2)


def _by_matching(
    points: Float[Tensor, "n d"], times: np.ndarray, goals: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "n d"], float, float] | None:
    """Equal target weights 1/m, source atoms of weight 1/m or 2/m: choose the pairs of target atoms that share an
    image, the middle of the two, at the cost of half their squared distance. None if the time does not suffice."""
    m, doubles = len(goals), np.nonzero(times == 2)[0]
    between = sphere.pairwise_distance(goals, goals).cpu().numpy()
    i, j = np.triu_indices(m, 1)
    if len(doubles) <= 8 and m > 40:
        # A cheapest set of k disjoint pairs touches at most 2(k-1) other atoms, so few of the pairs matter.
        keep = np.argsort(between[i, j], kind="stable")[: max(2000, 4 * m * len(doubles))]
        i, j = i[keep], j[keep]
    cost = between[i, j] ** 2 / 2
    pair = np.arange(len(i))
    row, col = np.concatenate([i, j, np.full(len(i), m)]), np.concatenate([pair, pair, pair])
    incidence = coo_array((np.ones(len(row)), (row, col)), shape=(m + 1, len(i))).tocsr()
    limits = np.concatenate([np.ones(m), [len(doubles)]])
    lower = np.concatenate([np.zeros(m), [len(doubles)]])
    solved = milp(
        cost,
        constraints=LinearConstraint(incidence, lower, limits),  # pyright: ignore[reportArgumentType]  # arrays serve
        integrality=np.ones(len(i)),
        bounds=Bounds(0, 1),
        options={"time_limit": MATCHING_SECONDS, "mip_rel_gap": 0.0},
    )
    if solved.x is None:
        return None
    chosen = np.nonzero(solved.x > 0.5)[0]
    images = points.clone()
    pair_rows = [(int(i[k]), int(j[k])) for k in chosen]
    used = {row for pair in pair_rows for row in pair}
    for atom, (p, q) in zip(doubles, pair_rows, strict=True):
        images[atom] = sphere.geodesic(goals[p], goals[q], 0.5)
    singles = [row for row in range(m) if row not in used]
    images[torch.from_numpy(np.nonzero(times == 1)[0])] = goals[singles]
    value = float(cost[chosen].sum())
    bound = min(value, float(solved.mip_dual_bound)) if solved.mip_dual_bound is not None else value
    return images, (value / m) ** 0.5, (max(bound, 0.0) / m) ** 0.5


def _spread_bound(a: np.ndarray, goals: Float[Tensor, "m d"], b: np.ndarray) -> float:
    """A bound on W2 for any weights, from chords: an atom that weighs more than a target atom serves others too.

    An atom of weight a whose mass goes to the goals in amounts s_j costs at least Σ_jk s_j s_k |y_j - y_k|² / 2a,
    the spread around their mean in R^d. Given j, the sum over k is least, m_j(a), where mass a fills the goals
    nearest to y_j; what remains, Σ_j s_j m_j(a) / 2a, is a transport problem.
    """
    chord = torch.cdist(goals, goals, compute_mode="donot_use_mm_for_euclid_dist").square().double().cpu().numpy()
    order = np.argsort(chord, axis=1, kind="stable")
    near, room = np.take_along_axis(chord, order, axis=1), b[order]
    before = np.cumsum(room, axis=1) - room
    cost = np.array([(np.clip(mass - before, 0, room) * near).sum(1) / (2 * mass) for mass in a])
    plan, _ = network_simplex(cost, a, b, MAX_ITERATIONS, "")
    return float((plan * cost).sum()) ** 0.5


def _neighbour_bound(times: np.ndarray, goals: Float[Tensor, "m d"]) -> float:
    """Equal target weights 1/m; a source atom of weight k/m > 1/m serves k target atoms from one image.

    For any two of them d_i² + d_j² >= δ_ij²/2, so a group costs at least Σ δ_i²/4 with δ_i the distance to the
    nearest other target atom; the least that so many atoms can cost is taken over all target atoms.
    """
    shared = int(times[times > 1].sum())
    between = sphere.pairwise_distance(goals, goals).fill_diagonal_(torch.inf)
    nearest = between.amin(-1).square().sort().values / 4
    return float((nearest[:shared].sum() / len(goals)).sqrt())


def _by_alternation(
    points: Float[Tensor, "n d"], a: np.ndarray, goals: Float[Tensor, "m d"], b: np.ndarray
) -> tuple[Float[Tensor, "n d"], float]:
    """Plan, then move each image to the mean of what it serves, until nothing changes; from several starts."""
    generator = torch.Generator().manual_seed(0)
    best, least = points, float("inf")
    for start in range(8):
        if start == 0:
            images = points
        else:
            pick = torch.randint(len(goals), (len(points),), generator=generator)
            images = goals[pick.to(goals.device)]
        value = float("inf")
        for _ in range(100):
            cost = sphere.pairwise_distance(images, goals).square()
            plan, _ = network_simplex(cost.double().cpu().numpy(), a, b, MAX_ITERATIONS, "")
            now = float((plan * cost.cpu().numpy()).sum())
            if now >= value * (1 - 1e-12):
                break
            value = now
            images = _frechet_means(images, goals, torch.from_numpy(plan).to(goals))
        if value < least:
            best, least = images, value
    return best, least**0.5


def _frechet_means(
    start: Float[Tensor, "n d"], goals: Float[Tensor, "m d"], plan: Float[Tensor, "n m"]
) -> Float[Tensor, "n d"]:
    """Mean on the sphere of the goals each row serves, by a few fixed-point steps from the projected mean."""
    share = plan / plan.sum(-1, keepdim=True)
    mean = share @ goals
    length = torch.linalg.vector_norm(mean, dim=-1, keepdim=True)
    images = torch.where(length > 1e-9, mean / length.clamp(min=1e-9), start)
    for _ in range(30):
        near = sphere.distance(images.unsqueeze(1), -goals.unsqueeze(0)) < 1e-9
        towards = torch.where(near.unsqueeze(-1), images.unsqueeze(1), goals.unsqueeze(0))
        images = sphere.exp(images, (share.unsqueeze(-1) * sphere.log(images.unsqueeze(1), towards)).sum(1))
    return images


@dataclass(frozen=True)
class Conflict:
    """Two pairs with the same source measure and different targets."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"pairs {self.first!r} and {self.second!r} have the same source measure and different targets"


def same_measure(mu: TokenMeasure) -> list[int]:
    """For each measure of a batch the first that equals it exactly, in any order of atoms and with any padding."""
    keys: dict[bytes, int] = {}
    first = []
    for i, one in enumerate(mu):
        points, weights, _ = distinct_atoms(one)
        table = torch.unique(torch.cat([points, weights.unsqueeze(-1)], dim=-1), dim=0)
        first.append(keys.setdefault(table.detach().cpu().numpy().tobytes(), i))
    return first


def find_conflicts(source: TokenMeasure, target: TokenMeasure, names: Sequence[str]) -> list[Conflict]:
    """Pairs that no transformer can tell apart: equal sources with different targets."""
    sources, targets = same_measure(source), same_measure(target)
    groups: dict[int, list[int]] = {}
    for i, s in enumerate(sources):
        groups.setdefault(s, []).append(i)
    return [
        Conflict(names[i], names[j])
        for members in groups.values()
        for i, j in itertools.pairwise(members)
        if targets[i] != targets[j]
    ]

"""The parts of the construction, each by what it promises."""

import itertools
import math

import pytest
import torch

from measureflow import sphere
from measureflow.construct.assign import assign, rows
from measureflow.construct.circle import route_on_circle, same_order, stations_in_order
from measureflow.construct.disentangle import advance, caps, disentangle, resize, shrink
from measureflow.construct.match import match
from measureflow.construct.route import leg_layers, route, spread_points
from measureflow.errors import NotSeparatedError


def uniform(*shape: int, seed: int) -> torch.Tensor:
    return sphere.uniform(*shape, generator=torch.Generator().manual_seed(seed))


def caps_around(centres: torch.Tensor, n: int, radius: float, seed: int) -> torch.Tensor:
    noise = torch.randn(len(centres), n, centres.shape[-1], generator=torch.Generator().manual_seed(seed))
    v = sphere.tangent(centres.unsqueeze(1).expand_as(noise), noise.double())
    return sphere.exp(
        centres.unsqueeze(1).expand_as(v), radius * v / v.norm(dim=-1, keepdim=True).amax(1, keepdim=True)
    )


def even(points: torch.Tensor) -> torch.Tensor:
    return points.new_full(points.shape[:-1], 1 / points.shape[-2])


@pytest.mark.parametrize("d", [2, 3, 5])
def test_disentangling_makes_small_caps_far_apart_and_is_undone(d: int) -> None:
    points = uniform(3, 10, d, seed=1)
    start = disentangle(points, even(points), seed=0)
    end = shrink(start, even(points), ratio=0.05, gap=math.inf)
    # A cap's barycentre shifts a little when it is resized, by about its radius squared.
    assert float(end.radii.max()) <= 0.05 * end.gap * 1.02
    back = advance([layer.inverse() for layer in reversed(end.layers)], end.points, even(points))
    # Rounding, stretched by what was shrunk.
    assert float((back - points).abs().max()) < 1e-10


def test_resize_brings_each_cap_to_its_radius() -> None:
    points = caps_around(torch.eye(3, dtype=torch.float64), 8, 0.2, seed=1)
    now = caps((), points, even(points))
    wanted = torch.tensor([0.01, 0.1, 0.3], dtype=torch.float64)
    moved = advance(resize(now, wanted, now.gap, "resize"), points, even(points))
    torch.testing.assert_close(sphere.distance(moved, now.centres.unsqueeze(1)).amax(-1), wanted)


@pytest.mark.parametrize("d", [3, 4, 8])
def test_a_leg_moves_one_cap_and_returns_the_others(d: int) -> None:
    centres = uniform(6, d, seed=2)
    goals = uniform(6, d, seed=3)
    points = caps_around(centres, 5, 1e-3, seed=4)
    now = caps((), points, even(points))
    for leg in route(now.centres, now.radii, goals, seed=0):
        moved = advance(leg_layers(leg), points, even(points))
        others = torch.arange(6) != leg.cap
        # Parking contracts by e^4 and restoring undoes it: rounding times e^8 or so.
        assert float((moved - points)[others].abs().max()) < 1e-12
        assert float(sphere.distance(moved[leg.cap], leg.y).max()) < 0.01
        points = moved
    assert float(sphere.distance(caps((), points, even(points)).centres, goals).max()) < 1e-4


def test_caps_change_places() -> None:
    # Each goal is taken by another cap, so that one has to make way first.
    centres = uniform(4, 3, seed=5)
    legs = route(centres, torch.full((4,), 1e-3, dtype=torch.float64), centres.roll(1, 0), seed=0)
    place = centres.clone()
    for leg in legs:
        torch.testing.assert_close(leg.x, place[leg.cap])
        place[leg.cap] = leg.y
    torch.testing.assert_close(place, centres.roll(1, 0))


def test_spread_points_keep_off_each_other_and_their_antipodes() -> None:
    points = spread_points(12, uniform(12, 3, seed=1), seed=0)
    apart = sphere.pairwise_distance(points, points).fill_diagonal_(math.pi)
    assert float(apart.min()) > 0.7  # the best twelve are 1.1 apart
    assert float(sphere.pairwise_distance(points, -points).min()) > 0.2


def test_matching_arrives_and_other_measures_feel_nothing() -> None:
    centres = torch.eye(3, dtype=torch.float64)
    points, goals = caps_around(centres, 12, 0.2, seed=1), caps_around(centres, 12, 0.2, seed=2)
    kinds = torch.zeros(3, 12, dtype=torch.long)
    layers, ends = match(points, goals, kinds, 1.5, seed=0, tolerance=1e-12)
    chosen = rows(goals, assign(ends, goals, kinds))
    assert float(sphere.distance(ends, chosen).max()) < 1e-12
    assert float((advance(layers, points, even(points)) - ends).abs().max()) < 1e-9
    for layer in layers:
        active = (points @ layer.perceptron.U.T + layer.perceptron.b) > 0
        own = len(layer.perceptron.b) // 3
        for i, j in itertools.permutations(range(3), 2):
            assert not bool(active[i, :, j * own : (j + 1) * own].any())
        points = advance([layer], points, even(points))
        # Nobody crosses a rim, so the flow is smooth where the atoms are.
        assert torch.equal((points @ layer.perceptron.U.T + layer.perceptron.b) > 0, active)


def test_assignment_is_the_best_of_all_permutations_within_kinds() -> None:
    points, goals = uniform(2, 5, 3, seed=1), uniform(2, 5, 3, seed=2)
    kinds = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])

    def standard(cloud: torch.Tensor) -> torch.Tensor:
        cloud = cloud - cloud.mean(0)
        return cloud / cloud.square().sum(-1).mean().sqrt()

    for i in range(2):
        a, b = standard(points[i]), standard(goals[i])
        allowed = [p for p in itertools.permutations(range(5)) if torch.equal(kinds[i][list(p)], kinds[i])]
        best = min(allowed, key=lambda p: float((a - b[list(p)]).square().sum()))
        assert assign(points, goals, kinds)[i].tolist() == list(best)


def test_on_the_circle_order_is_kept_and_goals_are_reached() -> None:
    angle = torch.tensor([0.1, 0.9, 2.0, -2.0], dtype=torch.float64)
    centres = torch.stack([angle.cos(), angle.sin()], dim=-1)
    turn = angle + 2.2
    goals = torch.stack([turn.cos(), turn.sin()], dim=-1)
    points = caps_around(centres, 3, 0.01, seed=1)
    layers = route_on_circle(centres, torch.full((4,), 0.01, dtype=torch.float64), goals)
    moved = advance(layers, points, even(points))
    assert float(sphere.distance(moved, goals.unsqueeze(1)).max()) < 0.05
    assert same_order(centres, stations_in_order(centres))
    with pytest.raises(NotSeparatedError, match="cyclic order"):
        route_on_circle(centres, torch.full((4,), 0.01, dtype=torch.float64), goals[[1, 0, 2, 3]])

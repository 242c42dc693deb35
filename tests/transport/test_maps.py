import itertools
import math

import pytest
import torch

from measureflow import sphere
from measureflow.datasets import storms
from measureflow.measures import TokenMeasure
from measureflow.transport.exact import wasserstein
from measureflow.transport.maps import can_map, find_conflicts
from tests.problems import random_measures


def drawn(n: int, seed: int, weights: list[float] | None = None) -> TokenMeasure:
    points = sphere.uniform(n, 3, generator=torch.Generator().manual_seed(seed))
    return TokenMeasure(points, torch.tensor(weights or [1 / n] * n, dtype=torch.float64))


def groups_exist(a: list[float], b: list[float]) -> bool:
    """Try every function from source atoms to target atoms."""
    for function in itertools.product(range(len(b)), repeat=len(a)):
        sums = [sum(w for w, j in zip(a, function, strict=True) if j == k) for k in range(len(b))]
        if all(abs(s - w) < 1e-12 for s, w in zip(sums, b, strict=True)):
            return True
    return False


def best_doubling(goals: torch.Tensor) -> float:
    """The least W2 from n free atoms to 2n equal ones: every way to pair the targets, each pair met halfway."""

    def pairings(rows: list[int]):
        if not rows:
            yield []
            return
        for k in range(1, len(rows)):
            for rest in pairings(rows[1:k] + rows[k + 1 :]):
                yield [(rows[0], rows[k]), *rest]

    angle = torch.acos((goals @ goals.mT).clamp(-1, 1))
    return min(
        float(sum(angle[i, j] ** 2 / 2 for i, j in pairing) / len(goals)) ** 0.5
        for pairing in pairings(list(range(len(goals))))
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([0.25] * 4, [0.25] * 4),
        ([0.25] * 4, [0.5] * 2),
        ([0.5] * 2, [0.25] * 4),
        ([0.1, 0.2, 0.3, 0.4], [0.5, 0.5]),
        ([0.1, 0.2, 0.3, 0.4], [0.3, 0.7]),
        ([0.1, 0.2, 0.3, 0.4], [0.35, 0.65]),
        ([0.4, 0.1, 0.3, 0.2], [0.2, 0.3, 0.1, 0.4]),
        ([0.1, 0.45, 0.45], [0.5, 0.5]),
        ([0.15, 0.15, 0.2, 0.25, 0.25], [0.3, 0.3, 0.4]),
        ([0.15, 0.15, 0.2, 0.25, 0.25], [0.35, 0.25, 0.4]),
    ],
)
def test_a_map_exists_exactly_when_brute_force_finds_one(a, b):
    mu, nu = drawn(len(a), 0, a), drawn(len(b), 1, b)
    check = can_map(mu, nu)
    assert check.exists == groups_exist(a, b)
    assert check.lower <= check.w2
    # W2 of what is returned, solved anew; masses off by a rounding carried a distance of 1 are 1e-8 in W2.
    assert float(wasserstein(mu.with_points(check.images), nu)) == pytest.approx(check.w2, abs=1e-7)
    if check.exists:
        assert check.w2 == 0
        assert check.rows is not None
        assert torch.equal(check.images, nu.points[check.rows])


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_doubling_reaches_the_least_that_brute_force_finds(n, seed):
    nu = drawn(2 * n, seed)
    check = can_map(drawn(n, seed + 100), nu)
    assert check.exists is False
    # acos in the brute force is good to 1e-8 only at small angles; these are not small.
    assert check.w2 == pytest.approx(best_doubling(nu.points), rel=1e-9)
    assert check.lower == pytest.approx(check.w2, rel=1e-6)
    assert "one atom cannot become two" in check.reason


@pytest.mark.parametrize(("year", "least"), [("1997", 8.01005e-05), ("2000", 5.15692e-04)])
def test_seasons_with_a_repeated_birthplace(year, least):
    pairs = storms(years=int(year))
    mu, nu = pairs.source[0], pairs.target[0]
    check = can_map(mu, nu)
    # One atom serves two deaths, met halfway: brute force over all pairs, δ²/2 each, of m deaths of weight 1/m.
    goals = torch.unique(nu.atoms(), dim=0)
    assert len(goals) == len(nu.atoms())
    chord = (goals[:, None] - goals[None]).norm(dim=-1)
    angle = 2 * torch.asin(chord / 2)
    i, j = torch.triu_indices(len(goals), len(goals), 1)
    brute = float((angle[i, j].min() ** 2 / 2 / len(goals)).sqrt())
    assert brute == pytest.approx(least, rel=1e-5)
    assert check.exists is False
    assert check.w2 == pytest.approx(brute, rel=1e-9)
    assert "are one point" in check.reason


@pytest.mark.parametrize("seed", range(6))
def test_the_bracket_holds_and_is_reached(seed):
    mu, nu = random_measures(n=2 + seed % 3, d=3, seed=seed), random_measures(n=5, d=3, seed=seed + 50)
    check = can_map(mu, nu)
    assert check.exists is False
    assert 0 <= check.lower <= check.w2
    assert float(wasserstein(mu.with_points(check.images), nu)) == pytest.approx(check.w2, rel=1e-9)
    # Leaving all atoms where they are is a map too.
    assert check.w2 <= float(wasserstein(mu, nu)) * (1 + 1e-9)


def test_three_targets_an_atom_have_a_bracket():
    check = can_map(drawn(2, 0), drawn(6, 1))
    assert check.exists is False
    assert 0 < check.lower <= check.w2


def test_halves_to_a_third_and_two_thirds_are_within_a_closed_bracket():
    gap = 1e-3
    points = torch.tensor([[1.0, 0, 0], [math.cos(gap), math.sin(gap), 0]], dtype=torch.float64)
    check = can_map(drawn(2, 0), TokenMeasure(points, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)))
    assert check.exists is False
    # One half goes to the heavier target; the other serves 1/3 and 1/6 from their mean: 1/3 1/6 / (1/2) gap² = gap²/9.
    assert check.w2 == pytest.approx(gap / 3, rel=1e-6)
    # The bound lets mass fill the lighter target first, at (1/6) gap² a unit of its 1/3.
    assert check.lower == pytest.approx(gap / 18**0.5, rel=1e-6)


def test_a_bound_for_unequal_weights_is_below_every_map_tried():
    generator = torch.Generator().manual_seed(0)
    mu, nu = random_measures(n=3, d=3, seed=1), random_measures(n=7, d=3, seed=2)
    check = can_map(mu, nu)
    assert check.lower > 0.1  # three atoms cannot stand in for seven all over the sphere
    for _ in range(200):
        images = sphere.uniform(3, 3, generator=generator)
        assert float(wasserstein(mu.with_points(images), nu)) >= check.w2 > check.lower


def test_p11_padding_and_order_change_nothing():
    mu, nu = drawn(3, 4), drawn(6, 5)
    padded = TokenMeasure(
        torch.cat([torch.full((2, 3), torch.nan, dtype=torch.float64), mu.points.flip(0)]),
        torch.cat([torch.zeros(2, dtype=torch.float64), mu.weights]),
    )
    plain = can_map(mu, nu)
    for source, target in ((padded, nu), (mu, TokenMeasure(nu.points[[3, 1, 5, 0, 4, 2]]))):
        check = can_map(source, target)
        assert check.exists == plain.exists
        assert check.w2 == pytest.approx(plain.w2, rel=1e-12)
    merged = can_map(padded, drawn(3, 6))
    assert merged.exists
    assert merged.rows is not None
    assert merged.rows[:2].tolist() == [-1, -1]


def test_conflicts_name_the_pairs():
    first, second, third = drawn(3, 0), drawn(3, 1), drawn(3, 2)
    shuffled = TokenMeasure(
        torch.cat([first.points[[2, 0, 1]], second.points[:1]]),
        torch.tensor([1 / 3, 1 / 3, 1 / 3, 0], dtype=torch.float64),
    )
    source = TokenMeasure.from_ragged(
        [m.points for m in (first, second)] + [shuffled.points], [first.weights] * 2 + [shuffled.weights]
    )
    target = TokenMeasure.from_ragged([m.points for m in (second, second, third)])
    (conflict,) = find_conflicts(source, target, ["a", "b", "c"])
    assert str(conflict) == "pairs 'a' and 'c' have the same source measure and different targets"
    assert find_conflicts(source, TokenMeasure(second.points.expand(3, 3, 3)), ["a", "b", "c"]) == []


@pytest.mark.bad_input
def test_batches_are_an_error():
    mu = random_measures(2, n=3, d=3, seed=0)
    with pytest.raises(ValueError, match="expected two measures, got batches"):
        can_map(mu, mu)

import inspect
import math

import pytest
import torch

from measureflow import datasets, sphere
from measureflow.datasets import clusters, diracs, letters, rings, shared_atoms, spirals

GENERATORS = [clusters, shared_atoms, diracs, rings, spirals, letters]
bad_input = pytest.mark.bad_input


def distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sphere.pairwise_distance(x, y)


@pytest.mark.parametrize("generate", GENERATORS)
def test_same_seed_same_pairs(generate):
    one, two, other = generate(seed=3), generate(seed=3), generate(seed=4)
    assert torch.equal(one.source.points, two.source.points)
    assert torch.equal(one.target.points, two.target.points)
    assert not torch.equal(one.source.points, other.source.points)


@pytest.mark.parametrize("generate", GENERATORS)
def test_float64_equal_weights_and_no_two_equal_sources(generate):
    p = generate()
    assert p.source.points.dtype == torch.float64
    assert torch.equal(p.source.weights, torch.full_like(p.source.weights, 1 / p.source.weights.shape[-1]))
    for points in p.source.points:
        apart = distances(points, points) + torch.eye(len(points))
        assert float(apart.min()) > 0


@pytest.mark.parametrize("generate", GENERATORS)
def test_the_global_generator_is_left_alone(generate):
    before = torch.random.get_rng_state()
    generate()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("generate", GENERATORS)
def test_sizes_are_those_of_the_docstring(generate):
    p = generate()
    default = {name: value.default for name, value in inspect.signature(generate).parameters.items()}
    count = default.get("pairs", len(default.get("sources", ())))
    assert len(p) == count
    assert p.source.points.shape == (count, default["atoms"], 3)
    assert f"{count} pairs of {default['atoms']} atoms" in inspect.getdoc(generate) or generate is shared_atoms


@pytest.mark.parametrize("generate", [clusters, shared_atoms, diracs])
@pytest.mark.parametrize("d", [2, 3, 8])
def test_clusters_in_any_dimension(generate, d):
    p = generate(3, 12, d)
    assert p.dim == d
    assert len(p) == 3


def test_clusters_have_the_spread_that_their_concentration_says():
    concentration = 400.0
    p = clusters(50, 100, source_clusters=1, target_clusters=2, concentration=concentration)
    # E <mean, x> = coth κ - 1/κ for von Mises-Fisher on S²; 5000 draws of spread 1/κ, five standard deviations.
    expected = 1 / math.tanh(concentration) - 1 / concentration
    radius = p.source.barycentre.norm(dim=-1).mean()
    assert abs(float(radius) - expected) < 5 / concentration / math.sqrt(5000) + 1 / (100 * concentration)
    halves = p.target.points.reshape(50, 2, 50, 3).mean(-2)
    assert abs(float(halves.norm(dim=-1).mean()) - expected) < 5 / concentration / math.sqrt(5000) + 1 / (
        50 * concentration
    )


def test_atoms_are_shared_as_evenly_as_they_can():
    p = clusters(1, 10, target_clusters=4, concentration=1e6)
    near = distances(p.target.points[0], p.target.points[0]) < 0.05
    assert sorted(near.sum(1).tolist()) == [2, 2, 2, 2, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(("atoms", "share", "common"), [(64, 0.5, 32), (10, 0.25, 2), (9, 0.5, 4)])
def test_the_shared_part_is_in_every_source_and_nothing_else_is(atoms, share, common):
    p = shared_atoms(4, atoms, share=share)
    first = p.source.points[0]
    for other in p.source.points[1:]:
        equal = distances(first, other) == 0
        assert equal.diagonal().tolist() == [True] * common + [False] * (atoms - common)
        assert int(equal.sum()) == common


def test_all_atoms_of_a_source_belong_to_its_dirac():
    p = diracs(5, 20, 4)
    assert p.target.points.shape == (5, 1, 4)
    assert p.coupling.eq(0).all()


@pytest.mark.parametrize("d", [3, 5])
def test_rings_are_circles_of_evenly_spaced_atoms(d):
    p = rings(6, 30, d, radius=(0.3, 0.4))
    for points in torch.cat([p.source.points, p.target.points]):
        centre = sphere.project(points.mean(0))
        radius = sphere.distance(points, centre.expand_as(points))
        assert float(radius.max() - radius.min()) < 1e-14
        assert 0.3 <= float(radius.mean()) <= 0.4
        step = sphere.distance(points, points.roll(1, 0))
        # Chord of a regular polygon: sin(step/2) = sin(radius) sin(π/30).
        expected = 2 * torch.asin(radius.sin() * math.sin(math.pi / 30))
        assert torch.allclose(step, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("generate", [rings, spirals])
def test_centres_are_uniform(generate):
    p = generate(2000, 8)
    for mu in (p.source, p.target):
        # Each coordinate of a uniform direction has variance 1/3; five standard deviations of the mean of 2000.
        centre = sphere.project(mu.barycentre) if generate is rings else mu.points[:, 0]
        assert float(centre.mean(0).abs().max()) < 5 / math.sqrt(3 * 2000)


def test_spirals_keep_their_pace_and_turn_against_each_other():
    p = spirals(3, 200, radius=0.5, turns=3.0)
    for points in torch.cat([p.source.points, p.target.points]):
        steps = sphere.distance(points[1:], points[:-1])
        # Evenly spaced but for the innermost turn, where the curve leaves the centre.
        outer = steps[100:]
        assert float(outer.max() / outer.min()) < 1.1
        assert float(distances(points, points).max()) < 1.0

    assert p.coupling[0].tolist() == list(range(200))


def test_seen_from_outside_sources_unwind_counterclockwise_and_targets_clockwise():
    p = spirals(20, 400, radius=0.5, turns=1.0)
    for mu, hand in ((p.source, 1), (p.target, -1)):
        centre, a, b = mu.points[:, 0], mu.points[:, 200], mu.points[:, 201]
        assert torch.linalg.det(torch.stack([centre, a, b], dim=1)).sign().tolist() == [hand] * 20


def flat(points: torch.Tensor, k: int, count: int, size: float) -> torch.Tensor:
    """Back to the plane: turn to the first axis and undo the stereographic projection by hand."""
    turn = -2 * math.pi * k / count
    x = points[:, 0] * math.cos(turn) - points[:, 1] * math.sin(turn)
    y = points[:, 0] * math.sin(turn) + points[:, 1] * math.cos(turn)
    return torch.stack([y, points[:, 2]], dim=-1) / (1 + x).unsqueeze(-1) / math.tan(size / 2)


def test_letters_are_upright_and_have_the_stated_size():
    p = letters("LT", "IO", 2000, size=0.4)
    assert p.names == ("L to I", "T to O")
    for k in range(2):
        for mu in (p.source, p.target):
            y = flat(mu.points[k], k, 2, 0.4)
            # 2000 even points come within 0.05 of the ends.
            assert 0.95 < float(y[:, 1].max()) <= 1
            assert -1 <= float(y[:, 1].min()) < -0.95
            centre = torch.tensor([math.cos(math.pi * k), math.sin(math.pi * k), 0], dtype=torch.float64)
            # The corner of a square is farther off than its sides: tan(angle/2) = sqrt(2) tan(size/2).
            limit = 2 * math.atan(math.sqrt(2) * math.tan(0.2))
            assert float(sphere.distance(mu.points[k], centre.expand(2000, 3)).max()) <= limit
    ell, tee = flat(p.source.points[0], 0, 2, 0.4), flat(p.source.points[1], 1, 2, 0.4)
    # L: the stem on the left (west), the foot below. T: the bar above, nothing low on the sides.
    assert bool((ell[ell[:, 1] > 0, 0] < 0).all())
    assert bool((ell[ell[:, 0] > 0, 1] < 0).all())
    assert bool((tee[tee[:, 0].abs() > 0.4, 1] > 0).all())


def test_holes_of_letters_are_empty():
    p = letters("O", "A", 3000, size=0.4)
    y = flat(p.source.points[0], 0, 1, 0.4)
    assert float(y.norm(dim=-1).min()) > 0.3


def test_letters_are_evenly_filled():
    y = flat(letters("I", "I", 4000, size=0.4).source.points[0], 0, 1, 0.4)
    counts = torch.histc(y[:, 1].float(), bins=10, min=-1, max=1)
    # A rectangle: each tenth holds 400, and a Sobol sequence strays far less than the sqrt(400) of random points.
    assert float((counts - 400).abs().max()) < 20


@bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clusters(0), "pairs: expected at least 1, got 0"),
        (lambda: clusters(d=1), "d: expected at least 2, got 1"),
        (lambda: clusters(atoms=3), "clusters: expected 1 to 3 for 3 atoms, got 4"),
        (lambda: clusters(concentration=-1.0), "concentration: expected a finite number of at least 0"),
        (lambda: shared_atoms(atoms=1), "share: expected a part of 1 atoms that is neither none nor all, got 0.5"),
        (lambda: shared_atoms(share=1.0), "share: expected a part of 64 atoms"),
        (lambda: diracs(clusters=0), "clusters: expected 1 to 64 for 64 atoms, got 0"),
        (lambda: rings(d=2), "d: expected at least 3, got 2"),
        (lambda: rings(radius=(0.5, 0.4)), "radius: expected 0 < least <= largest < π"),
        (lambda: spirals(radius=4.0), "radius: expected an angle in"),
        (lambda: spirals(turns=0.0), "turns: expected a number above 0, got 0.0"),
        (lambda: spirals(atoms=0), "atoms: expected at least 1, got 0"),
        (lambda: letters("", ""), "as many targets as sources, at least one"),
        (lambda: letters("AB", "C"), "expected as many targets as sources, at least one, got 'AB' and 'C'"),
        (lambda: letters("A ", "BC"), "letters: expected signs that DejaVu Sans draws, got ' '"),
        (lambda: letters("A\U00012000", "BC"), "letters: expected signs that DejaVu Sans draws"),
        (lambda: letters(size=2.0), "size: expected an angle in"),
        (lambda: letters(atoms=0), "atoms: expected at least 1, got 0"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_public_name_exists_and_says_what_it_is():
    for name in datasets.__all__:
        assert inspect.getdoc(getattr(datasets, name))

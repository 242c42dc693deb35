import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from measureflow import sphere
from measureflow.measures import MeasurePairs, TokenMeasure, length_tolerance, sum_tolerance

F32, F64 = torch.float32, torch.float64
bad_input = pytest.mark.bad_input


def points(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return sphere.uniform(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def pairs(count: int = 3, n: int = 4, m: int = 5) -> MeasurePairs:
    coupling = torch.arange(n).expand(count, n)
    names = [f"pair {i}" for i in range(count)]
    return MeasurePairs(TokenMeasure(points(count, n, 3)), TokenMeasure(points(count, m, 3, seed=1)), names, coupling)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_default_weights_are_uniform(dtype):
    mu = TokenMeasure(points(2, 7, 4, dtype=dtype))
    assert mu.weights.dtype == dtype
    assert torch.equal(mu.weights, torch.full((2, 7), 1 / 7, dtype=dtype))


def test_weights_of_the_points_dtype_stay_to_the_last_bit():
    weights = torch.tensor([0.1, 0.2, 0.7 + 2e-16], dtype=F64)
    assert torch.equal(TokenMeasure(points(3, 3), weights).weights, weights)


@pytest.mark.parametrize("n", [3, 7, 1000])
def test_p21_float32_weights_with_float64_points_sum_to_one_in_float64(n):
    weights = torch.full((n,), 1 / n, dtype=F32)
    mu = TokenMeasure(points(n, 3), weights)
    assert mu.weights.dtype == F64
    # n roundings of 1/n each.
    assert abs(float(mu.weights.sum()) - 1) < n * 2**-52
    assert torch.allclose(mu.weights, weights.double(), rtol=1e-6, atol=0)
    # What was accepted once is accepted again.
    assert torch.equal(mu.with_points(mu.points).weights, mu.weights)


def test_p21_pairs_of_mixed_dtypes_become_float64():
    source, target = TokenMeasure(points(2, 4, 3, dtype=F32)), TokenMeasure(points(2, 4, 3))
    for both in (MeasurePairs(source, target), MeasurePairs(target, source)):
        assert both.source.points.dtype == both.target.points.dtype == F64
    assert torch.equal(MeasurePairs(source, target).target.points, target.points)


@pytest.mark.parametrize("n", [1, 10, 100_000])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_sum_tolerance_admits_rounding_and_no_more(n, dtype):
    weights = torch.rand(n, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 0.1
    weights = weights / weights.sum()
    tolerance = float(sum_tolerance(torch.tensor(n), dtype))
    assert abs(float(weights.double().sum()) - 1) <= tolerance
    assert tolerance <= (1e-9 if dtype == F64 else 5e-7 * n)


@bad_input
@pytest.mark.parametrize("dtype", [F32, F64])
def test_off_sphere_is_judged_by_dtype(dtype):
    x = points(3, 3, dtype=dtype)
    TokenMeasure(x * (1 + 0.5 * length_tolerance(dtype)))
    with pytest.raises(ValueError, match=r"row 0: expected a unit vector"):
        TokenMeasure(x * (1 + 2 * length_tolerance(dtype)))


@pytest.mark.parametrize("filling", [float("nan"), float("inf"), 1e10, 0.0])
def test_p11_padding_may_hold_anything(filling):
    x = points(2, 4, 3).requires_grad_()
    weights = torch.tensor([[0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]], dtype=F64)
    clean = TokenMeasure(x, weights)
    dirty = torch.where((weights == 0).unsqueeze(-1), torch.full_like(x, filling), x)
    mu = TokenMeasure(dirty, weights)
    assert torch.equal(mu.points, clean.points)
    assert torch.equal(mu.barycentre, clean.barycentre)
    (gradient,) = torch.autograd.grad(mu.barycentre.square().sum(), x)
    (expected,) = torch.autograd.grad(clean.barycentre.square().sum(), x)
    assert torch.equal(gradient, expected)
    assert bool((gradient[0, 2:] == 0).all())


def test_padding_changes_neither_counts_nor_barycentre_nor_atoms():
    parts = [points(k, 3, seed=k) for k in (1, 4, 2)]
    mu = TokenMeasure.from_ragged(parts)
    assert mu.counts.tolist() == [1, 4, 2]
    for i, part in enumerate(parts):
        assert torch.equal(mu[i].atoms(), part)
        # The mean over atoms and the sum with weights 1/n differ by a few roundings of numbers below 1.
        assert torch.allclose(mu.barycentre[i], part.mean(0), rtol=0, atol=1e-15)


def test_from_ragged_keeps_given_weights():
    weights = [torch.tensor([0.25, 0.75], dtype=F64), torch.ones(1, dtype=F64)]
    mu = TokenMeasure.from_ragged([points(2, 3), points(1, 3)], weights, globe=True)
    assert mu.globe
    assert torch.equal(mu.weights, torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=F64))


@bad_input
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_p31_a_coordinate_that_is_not_finite_is_named(value):
    x = points(3, 4, 3)
    x[2, 1, 0] = value
    with pytest.raises(ValueError, match=r"^measure 2, row 1: expected a unit vector, got [^\n]*$"):
        TokenMeasure(x)


@bad_input
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.25])
def test_p31_a_weight_that_is_not_finite_or_negative_is_named(value):
    weights = torch.full((3, 4), 0.25, dtype=F64)
    weights[1, 3] = value
    with pytest.raises(ValueError, match=r"^measure 1, row 3: expected a weight of at least 0, got [^\n]*$"):
        TokenMeasure(points(3, 4, 3), weights)


@bad_input
def test_p02_a_row_of_zeros_is_named():
    x = points(3, 4, 3)
    x[1, 2] = 0
    with pytest.raises(ValueError, match=r"^measure 1, row 2: expected a unit vector, got a length of 0;"):
        TokenMeasure(x)
    with pytest.raises(ValueError, match=r"^measure 1, row 2: expected a finite vector other than zero"):
        sphere.project(x)


@bad_input
@pytest.mark.parametrize("given", [torch.eye(3, dtype=torch.int64), torch.eye(3, dtype=torch.bool)])
def test_p22_whole_numbers_are_refused_with_the_remedy(given):
    with pytest.raises(TypeError, match=r"points: expected a floating-point tensor, got torch.\w+; call .double\(\)"):
        TokenMeasure(given)
    with pytest.raises(TypeError, match=r"weights: expected a floating-point tensor, .* call .double\(\)"):
        TokenMeasure(torch.eye(3), given[0])


@bad_input
@pytest.mark.parametrize(
    ("x", "weights", "message"),
    [
        (points(3), None, r"points: expected shape \(\*batch, n >= 1, d >= 2\), got \(3,\)"),
        (points(2, 3)[:0], None, r"points: expected shape .* got \(0, 3\)"),
        (torch.ones(2, 1), None, r"points: expected shape .* got \(2, 1\)"),
        (points(2, 3), torch.ones(3, dtype=F64) / 3, r"weights: expected shape \(2,\), got \(3,\)"),
        (points(2, 3), torch.tensor([0.5, 0.4], dtype=F64), "sum to 1, got a sum of 0.9; divide by the sum"),
        (points(2, 2, 3), torch.tensor([[0.5, 0.5], [0, 0]], dtype=F64), "measure 1: .* the measure is empty"),
    ],
)
def test_measure_errors(x, weights, message):
    with pytest.raises(ValueError, match=message):
        TokenMeasure(x, weights)


@bad_input
def test_lists_and_the_globe_in_other_dimensions_are_refused():
    with pytest.raises(TypeError, match=r"points: expected a floating-point tensor, got list; use torch.tensor"):
        TokenMeasure([[1.0, 0.0]])
    with pytest.raises(ValueError, match="globe: places on the Earth have d = 3, got d = 4"):
        TokenMeasure(points(2, 4), globe=True)


@bad_input
@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ([], None, "at least one measure, got none"),
        ([points(2, 3), points(2, 4)], None, r"measure 1: expected points of shape \(n >= 1, 3\), got \(2, 4\)"),
        ([points(2, 3), points(2, 3)[:0]], None, r"measure 1: expected points of shape .* got \(0, 3\)"),
        ([points(3)], None, r"measure 0: expected points of shape \(n >= 1, d\), got \(3,\)"),
        (
            [points(2, 3), points(2, 3, dtype=F32)],
            None,
            "measure 1: expected points in torch.float64 .* got torch.float32",
        ),
        ([points(2, 3)], [], "weights: expected 1 vectors, one per measure, got 0"),
        ([points(2, 3)], [torch.ones(1)], r"measure 0: expected weights of shape \(2,\), got \(1,\)"),
    ],
)
def test_from_ragged_errors(parts, weights, message):
    with pytest.raises(ValueError, match=message):
        TokenMeasure.from_ragged(parts, weights)


def test_indexing_and_iterating_give_the_measures():
    mu = TokenMeasure(points(3, 4, 3), globe=True)
    assert [torch.equal(one.points, mu.points[i]) for i, one in enumerate(mu)] == [True] * 3
    assert torch.equal(mu[[2, 0]].points, mu.points[[2, 0]])
    assert mu[1:].batch_shape == (2,)
    assert mu[0].globe


@bad_input
def test_one_measure_is_no_batch_and_a_batch_has_no_atoms():
    mu = TokenMeasure(points(3, 4, 3))
    with pytest.raises(TypeError, match="one measure"):
        len(mu[0])
    with pytest.raises(ValueError, match="index first"):
        mu.atoms()


def test_dtype_round_trip_restores_lengths_and_sums():
    mu = TokenMeasure.from_ragged([points(5, 3), points(3, 3)], globe=True)
    there = mu.to(F32)
    assert there.points.dtype == there.weights.dtype == F32
    back = there.to(F64)
    assert back.globe
    # Scaled in float64: lengths and sums are off by a few roundings of that dtype, places by those of float32.
    assert torch.allclose(back.points.norm(dim=-1), torch.ones(2, 5, dtype=F64), rtol=0, atol=1e-15)
    assert torch.allclose(back.weights.sum(-1), torch.ones(2, dtype=F64), rtol=0, atol=1e-15)
    assert torch.allclose(back.points, mu.points, rtol=0, atol=2e-7)
    assert mu.to("cpu").points is mu.points or torch.equal(mu.to("cpu").points, mu.points)


def test_summaries_are_one_line():
    mu = TokenMeasure.from_ragged([points(5, 3), points(3, 3)], globe=True)
    assert repr(mu) == "TokenMeasure(2, atoms=3..5, d=3, float64, globe)"
    assert repr(mu[0]) == "TokenMeasure(atoms=5, d=3, float64, globe)"
    assert repr(pairs()) == "MeasurePairs(3, 'pair 0' to 'pair 2', atoms=4 -> 5, d=3, float64, coupled)"
    assert repr(pairs()[0]) == "MeasurePairs(1, 'pair 0', atoms=4 -> 5, d=3, float64, coupled)"


def test_resampling_equal_weights_repeats_no_atom(generator):
    mu = TokenMeasure(points(6, 20, 3))
    for n in (1, 10, 20):
        drawn = mu.resample(n, generator=generator)
        distinct = (sphere.pairwise_distance(drawn.points, drawn.points) == 0).sum((-1, -2))
        assert distinct.tolist() == [n] * 6
        assert torch.equal(drawn.weights, torch.full((6, n), 1 / n, dtype=F64))


def test_resampling_all_atoms_is_a_permutation(generator):
    mu = TokenMeasure(points(20, 3))
    drawn = mu.resample(20, generator=generator)
    assert torch.equal(drawn.points.sort(0).values, mu.points.sort(0).values)


def test_each_measure_is_resampled_on_its_own_terms(generator):
    mu = TokenMeasure.from_ragged([points(8, 3), points(3, 3)])
    drawn = mu.resample(8, generator=generator)
    assert torch.equal(drawn.points[0].sort(0).values, mu.points[0].sort(0).values)
    nearest = sphere.pairwise_distance(drawn.points[1], mu[1].atoms()).amin(-1)
    assert bool((nearest == 0).all())


def test_resampling_follows_unequal_weights_and_never_draws_padding(generator):
    weights = torch.tensor([0.0, 0.1, 0.6, 0.0, 0.3], dtype=F64)
    mu = TokenMeasure(torch.eye(5, dtype=F64), weights)
    count = 20_000
    share = mu.resample(count, generator=generator).barycentre
    assert share[0] == share[3] == 0
    # Five standard deviations of a binomial share.
    assert torch.allclose(share, weights, rtol=0, atol=5 * (0.25 / count) ** 0.5)


def test_resampling_is_seeded():
    mu = TokenMeasure(points(2, 9, 3))
    one, two, other = (mu.resample(4, generator=torch.Generator().manual_seed(seed)).points for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@bad_input
def test_resampling_to_nothing_is_refused(generator):
    with pytest.raises(ValueError, match="n: expected at least 1, got 0"):
        TokenMeasure(points(4, 3)).resample(0, generator=generator)


def test_pairs_by_position_and_name():
    p = pairs()
    assert p["pair 1"].names == p[1].names == p[-2].names == ("pair 1",)
    assert p[["pair 2", "pair 0"]].names == ("pair 2", "pair 0")
    assert p[1:].names == ("pair 1", "pair 2")
    assert [one.names[0] for one in p] == list(p.names)
    assert torch.equal(p["pair 2"].target.points[0], p.target.points[2])
    assert torch.equal(p["pair 2"].coupling[0], p.coupling[2])
    assert MeasurePairs(p.source, p.target).names == ("0", "1", "2")


def test_pairs_to_another_dtype_keep_coupling_and_names():
    p = pairs().to(F32)
    assert p.source.points.dtype == p.target.weights.dtype == F32
    assert torch.equal(p.coupling, pairs().coupling)
    assert p.names == pairs().names


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.int16])
def test_coupling_of_any_whole_numbers(kind):
    p = pairs()
    again = MeasurePairs(p.source, p.target, p.names, p.coupling.to(kind))
    assert torch.equal(again.coupling, p.coupling)


def test_coupling_with_padding():
    source = TokenMeasure.from_ragged([points(3, 3), points(1, 3)])
    target = TokenMeasure.from_ragged([points(1, 3), points(2, 3)])
    coupling = torch.tensor([[0, 0, 0], [1, -1, -1]])
    assert torch.equal(MeasurePairs(source, target, coupling=coupling).coupling, coupling)


@bad_input
@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        ((0, 2), 1, r"coupling: pair 'a', row 2: expected a row of the target, got 1"),
        ((0, 0), 5, r"coupling: pair 'a', row 0: expected a row of the target, got 5"),
        ((1, 0), -1, r"coupling: pair 'b', row 0: expected a row of the target, got -1"),
        ((1, 2), 0, r"coupling: pair 'b', row 2: expected -1 \(the source atom is padding\), got 0"),
    ],
)
def test_coupling_that_points_nowhere(row, value, message):
    source = TokenMeasure.from_ragged([points(3, 3), points(1, 3)])
    target = TokenMeasure.from_ragged([points(1, 3), points(2, 3)])
    coupling = torch.tensor([[0, 0, 0], [1, -1, -1]])
    coupling[row] = value
    with pytest.raises(ValueError, match=message):
        MeasurePairs(source, target, ["a", "b"], coupling)


@bad_input
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"source": TokenMeasure(points(4, 3))}, ValueError, r"source: expected a batch .* shape \(4, 3\)"),
        ({"target": TokenMeasure(points(2, 4, 3))}, ValueError, "got 3 sources and 2 targets"),
        ({"target": TokenMeasure(points(3, 4, 4))}, ValueError, "sources in d = 3 and targets in d = 4"),
        ({"target": TokenMeasure(points(3, 4, 3), globe=True)}, ValueError, "source: expected places on the globe"),
        ({"names": "abc"}, TypeError, "names: expected 3 texts, got the single text 'abc'"),
        ({"names": ["a", "b"]}, ValueError, "names: expected 3, got 2"),
        ({"names": ["a", "b", "a"]}, ValueError, "names: pairs 0 and 2 are both called 'a'"),
        ({"names": ["a", " ", "c"]}, ValueError, "names: expected text, got an empty name for pair 1"),
        ({"names": ["a", 2, "c"]}, TypeError, "names: expected text, got 2 for pair 1"),
        ({"coupling": torch.zeros(3, 5, dtype=torch.int64)}, ValueError, r"coupling: expected shape \(3, 4\)"),
        ({"coupling": torch.zeros(3, 4)}, TypeError, r"coupling: expected whole numbers, got torch.float32"),
    ],
)
def test_pairs_errors(change, kind, message):
    p = pairs()
    parts = {"source": p.source, "target": p.target, "names": p.names, "coupling": None}
    with pytest.raises(kind, match=message):
        MeasurePairs(**(parts | change))


@bad_input
def test_pairs_that_are_not_there():
    with pytest.raises(IndexError, match="pair 3: there are 3 pairs, 0 to 2"):
        pairs()[3]
    with pytest.raises(KeyError, match="no pair is called 'x'"):
        pairs()["x"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(2, 6), st.integers(0, 1000))
def test_ragged_parts_come_back(sizes, d, seed):
    parts = [points(k, d, seed=seed + i) for i, k in enumerate(sizes)]
    mu = TokenMeasure.from_ragged(parts)
    assert mu.points.shape == (len(sizes), max(sizes), d)
    assert all(torch.equal(mu[i].atoms(), part) for i, part in enumerate(parts))

"""One transformer for all pairs, checked by an integrator that knows nothing of how it was made."""

import math
from collections.abc import Callable

import pytest
import torch

import measureflow as mf
from measureflow import sphere
from measureflow.construct import STAGES, construct
from measureflow.datasets import clusters, diracs, shared_atoms, storms
from measureflow.errors import NoTransportMapError
from measureflow.measures import MeasurePairs, TokenMeasure
from measureflow.transport import wasserstein

# What the issue asks for: W2 of every pair, radians, by the independent integration.
ASKED = 1e-7


def uniform(*shape: int, seed: int) -> torch.Tensor:
    return sphere.uniform(*shape, generator=torch.Generator().manual_seed(seed))


def pair_up(source: torch.Tensor, target: torch.Tensor) -> MeasurePairs:
    return MeasurePairs(TokenMeasure(source), TokenMeasure(target))


def ragged() -> MeasurePairs:
    source = TokenMeasure.from_ragged([uniform(n, 3, seed=n) for n in (5, 9, 6)])
    return MeasurePairs(source, TokenMeasure.from_ragged([uniform(n, 3, seed=20 + n) for n in (5, 3, 1)]))


def unequal_weights() -> MeasurePairs:
    weights = torch.rand(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    weights = weights / weights.sum(-1, keepdim=True)
    target = TokenMeasure(uniform(3, 7, 3, seed=2), weights.flip(-1))
    return MeasurePairs(TokenMeasure(uniform(3, 7, 3, seed=1), weights), target)


def weights_in_groups() -> MeasurePairs:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).repeat(2, 1)
    halves = torch.full((2, 2), 0.5, dtype=torch.float64)
    return MeasurePairs(TokenMeasure(uniform(2, 4, 3, seed=1), weights), TokenMeasure(uniform(2, 2, 3, seed=2), halves))


def antipodal_pairs() -> MeasurePairs:
    x = uniform(3, 1, 3, seed=1)
    return pair_up(torch.cat([x, -x], dim=1), uniform(3, 2, 3, seed=2))


def zero_barycentres() -> MeasurePairs:
    x = uniform(2, 4, 3, seed=1)
    return pair_up(torch.cat([x, -x], dim=1), uniform(2, 8, 3, seed=2))


def one_atom_differs() -> MeasurePairs:
    x = uniform(1, 12, 3, seed=1)
    y = x.clone()
    y[0, 0] = uniform(3, seed=5)
    return pair_up(torch.cat([x, y]), uniform(2, 12, 3, seed=2))


def swapped() -> MeasurePairs:
    x = uniform(2, 8, 3, seed=1)
    return pair_up(x, x[[1, 0]])


def classes() -> MeasurePairs:
    return pair_up(uniform(6, 10, 3, seed=1), uniform(2, 1, 3, seed=2)[[0, 1, 0, 1, 0, 0]])


def shared_target() -> MeasurePairs:
    return pair_up(uniform(3, 6, 3, seed=1), uniform(1, 3, 3, seed=2).repeat(3, 1, 1))


CASES: dict[str, Callable[[], MeasurePairs]] = {
    "clusters": lambda: clusters(3, 12, 3, seed=0),
    "shared atoms": lambda: shared_atoms(4, 16, 3, seed=0),
    "d = 4": lambda: clusters(3, 12, 4, seed=0),
    "d = 8": lambda: clusters(3, 12, 8, seed=0),
    "circle, one pair": lambda: clusters(1, 8, 2, seed=0),
    "circle, three pairs": lambda: clusters(3, 8, 2, seed=1),
    "Dirac targets": lambda: diracs(4, 16, 3, seed=0),
    "two classes": classes,
    "one target for all": shared_target,
    "one pair": lambda: clusters(1, 8, 3, seed=0),
    "one atom": lambda: clusters(3, 1, 3, target_clusters=1, seed=0),
    "sizes differ": ragged,
    "unequal weights": unequal_weights,
    "weights in groups": weights_in_groups,
    "antipodal pairs": antipodal_pairs,
    "zero barycentres": zero_barycentres,
    "one atom differs": one_atom_differs,
    "targets are the other sources": swapped,
    "targets are the sources": lambda: pair_up(uniform(3, 8, 3, seed=1), uniform(3, 8, 3, seed=1)),
    "covers the sphere": lambda: pair_up(uniform(3, 40, 3, seed=1), uniform(3, 40, 3, seed=2)),
    "a pair twice": lambda: pair_up(uniform(2, 6, 3, seed=1)[[0, 1, 0]], uniform(2, 6, 3, seed=2)[[0, 1, 0]]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_pair_arrives(name: str) -> None:
    pairs = CASES[name]()
    theta = construct(pairs)
    reached = wasserstein(mf.push_forward(theta, pairs.source, solver="dopri8"), pairs.target)
    assert float(reached.max()) <= ASKED
    torch.testing.assert_close(torch.tensor(theta.certificate.w2, dtype=torch.float64), reached)
    assert max(theta.certificate.w2_exact) <= ASKED


def test_p32_zero_barycentre_is_gathered_the_same_way_each_time() -> None:
    first, second = construct(antipodal_pairs()), construct(antipodal_pairs())
    for a, b in zip(first.layers, second.layers, strict=True):
        assert all(torch.equal(s, t) for (_, s), (_, t) in zip(a.tensors(), b.tensors(), strict=True))


def test_the_inverse_takes_targets_back() -> None:
    pairs = clusters(2, 8, 3, seed=0)
    theta = construct(pairs)
    back = mf.push_forward(theta.inverse(), mf.push_forward(theta, pairs.source))
    # The way back expands where the way there contracts: rounding times about 1e5.
    assert float(sphere.distance(back.points, pairs.source.points).max()) < 1e-8


def test_the_order_of_atoms_does_not_matter() -> None:
    pairs = shared_atoms(2, 8, 3, seed=0)
    theta = construct(pairs)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    moved = mf.push_forward(theta, TokenMeasure(pairs.source.points[:, order]))
    # The same flow, with sums taken in another order: rounding, amplified by the construction.
    assert float((moved.points - mf.push_forward(theta, pairs.source).points[:, order]).abs().max()) < 1e-8


def test_a_coupling_can_be_followed() -> None:
    generator = torch.Generator().manual_seed(1)
    coupling = torch.stack([torch.randperm(8, generator=generator) for _ in range(2)])
    pairs = MeasurePairs(
        TokenMeasure(uniform(2, 8, 3, seed=1)), TokenMeasure(uniform(2, 8, 3, seed=2)), coupling=coupling
    )
    moved = mf.push_forward(construct(pairs, match="given"), pairs.source)
    wanted = pairs.target.points.gather(1, coupling.unsqueeze(-1).expand(-1, -1, 3))
    assert float(sphere.distance(moved.points, wanted).max()) < 1e-6  # one atom of eight, W2 1e-7 over all


def test_one_theta_for_all_and_attention_tells_shared_atoms_apart() -> None:
    # Without attention equal atoms go to equal places, so the two targets could not both be reached.
    pairs = shared_atoms(2, 8, 3, seed=0)
    theta = construct(pairs)
    assert any(layer.heads for layer in theta.layers)
    shared = (sphere.pairwise_distance(pairs.source.points[0], pairs.source.points[1]) == 0).nonzero()
    assert len(shared) >= 4
    moved = mf.push_forward(theta, pairs.source).points
    assert float(sphere.distance(moved[0, shared[:, 0]], moved[1, shared[:, 1]]).min()) > 1e-3


def test_float32_pairs_are_built_in_float64() -> None:
    assert construct(clusters(2, 4, 3, seed=0).to(torch.float32)).certificate.worst < ASKED


def test_saved_and_loaded_it_is_the_same_map(tmp_path) -> None:
    pairs = clusters(2, 6, 3, seed=0)
    theta = construct(pairs)
    theta.save(tmp_path / "theta.safetensors")
    loaded = mf.load(tmp_path / "theta.safetensors")
    assert loaded.metadata["certificate"]["w2"] == list(theta.certificate.w2)
    assert torch.equal(mf.push_forward(loaded, pairs.source).points, mf.push_forward(theta, pairs.source).points)


def test_the_certificate_counts_what_is_there() -> None:
    theta = construct(clusters(3, 6, 3, seed=0))
    certificate = theta.certificate
    assert sum(certificate.stages.values()) == len(theta.layers) == certificate.switches + 1
    assert set(certificate.stages) <= set(STAGES)
    assert certificate.norm == pytest.approx(theta.norm)
    assert "3 pairs" in str(certificate)


def test_five_seasons_of_storms() -> None:
    pairs = storms(years=range(2015, 2020))
    certificate = construct(pairs).certificate
    assert certificate.worst <= ASKED


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs",
    [shared_atoms(8, 64, 3, seed=0), shared_atoms(16, 48, 3, seed=0), shared_atoms(6, 64, 4, seed=0)],
    ids=["N=8 n=64 d=3", "N=16 n=48 d=3", "N=6 n=64 d=4"],
)
def test_the_specs_synthetic_cases(pairs: MeasurePairs) -> None:
    assert construct(pairs).certificate.worst <= ASKED


@pytest.mark.slow
def test_the_specs_largest_synthetic_case() -> None:
    assert construct(shared_atoms(24, 64, 3, seed=0)).certificate.worst <= ASKED


class TestImpossible:
    def test_two_targets_for_one_source(self) -> None:
        x = uniform(1, 4, 3, seed=1).repeat(2, 1, 1)
        pairs = MeasurePairs(TokenMeasure(x), TokenMeasure(uniform(2, 4, 3, seed=2)), names=["first", "again"])
        with pytest.raises(NoTransportMapError, match="'first' and 'again' have the same source"):
            construct(pairs)

    def test_an_atom_cannot_become_two(self) -> None:
        with pytest.raises(NoTransportMapError, match="pair '0': no map exists: 2 source atoms cannot become 4"):
            construct(pair_up(uniform(1, 2, 3, seed=1), uniform(1, 4, 3, seed=2)))

    def test_a_repeated_source_atom_is_named(self) -> None:
        x = uniform(1, 5, 3, seed=1)
        x[0, 3] = x[0, 1]
        with pytest.raises(NoTransportMapError, match="source rows 1, 3 are one point"):
            construct(pair_up(x, uniform(1, 5, 3, seed=2)))

    def test_the_best_inexact_map_is_reached(self) -> None:
        x, y = uniform(2, 6, 3, seed=1), uniform(2, 6, 3, seed=2)
        x[0, 3] = x[0, 1]
        theta = construct(pair_up(x, y), allow_inexact=True)
        # The two nearest target atoms share an image: each is half their distance away, and carries 1/6.
        between = sphere.pairwise_distance(y[0], y[0]).fill_diagonal_(9.0)
        best = math.sqrt(2 / 6) * float(between.min()) / 2
        assert theta.certificate.best_w2[0] == pytest.approx(best, rel=1e-9)
        assert theta.certificate.best_w2[1] == 0
        assert theta.certificate.w2[0] == pytest.approx(best, abs=ASKED)
        assert theta.certificate.w2[1] <= ASKED

    @pytest.mark.parametrize("year", [1997, 1999, 2000, 2006])
    def test_seasons_with_two_storms_born_at_one_place(self, year: int) -> None:
        with pytest.raises(NoTransportMapError, match=f"pair '{year}'.*are one point.*least W2"):
            construct(storms(years=year))

    @pytest.mark.bad_input
    def test_arguments(self) -> None:
        pairs = clusters(2, 4, 3, seed=0)
        with pytest.raises(ValueError, match="mode: expected one of compact, got 'fast'"):
            construct(pairs, mode="fast")
        with pytest.raises(ValueError, match="match: expected 'free' or 'given'"):
            construct(pairs, match="mine")
        plain = MeasurePairs(pairs.source, pairs.target)
        with pytest.raises(ValueError, match="these pairs have no coupling"):
            construct(plain, match="given")

    @pytest.mark.bad_input
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_p31_a_bad_coordinate_stops_before_any_work(self, value: float) -> None:
        x = uniform(2, 4, 3, seed=1)
        x[1, 2, 0] = value
        with pytest.raises(ValueError, match="measure 1, row 2"):
            construct(pair_up(x, uniform(2, 4, 3, seed=2)))

    def test_p30_the_circle_refuses_a_crossing_coupling(self) -> None:
        angle = torch.tensor([0.0, 0.4, 0.8], dtype=torch.float64)
        x = torch.stack([angle.cos(), angle.sin()], dim=-1).unsqueeze(0)
        pairs = MeasurePairs(TokenMeasure(x), TokenMeasure(x), coupling=torch.tensor([[1, 0, 2]]))
        with pytest.raises(NoTransportMapError, match="cannot pass each other"):
            construct(pairs, match="given")

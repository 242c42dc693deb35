"""The flow: its invariances, what is stored when, and what is refused."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from problems import equiangular, random_measures, rich_transformer, rotated

from measureflow import sphere
from measureflow.errors import FlowError
from measureflow.flow import flow, push_forward
from measureflow.measures import TokenMeasure
from measureflow.transformer import Head, Layer, Perceptron, Transformer, constant_drift

# Two solves at the default tolerance 1e-10 differ by some tens of it.
TOLERANCE = 1e-8


def difference(a: TokenMeasure, b: TokenMeasure) -> float:
    return float((a.points - b.points).abs().max())


@pytest.fixture
def theta() -> Transformer:
    return rich_transformer(3, seed=0)


@pytest.fixture
def mu() -> TokenMeasure:
    return random_measures(2, n=7, d=3, seed=1)


# --- what a flow is


def test_semigroup_a_layer_split_in_two(theta, mu):
    split = Transformer(
        [replace(layer, duration=share * layer.duration) for layer in theta.layers for share in (0.3, 0.7)]
    )
    assert difference(push_forward(split, mu), push_forward(theta, mu)) < TOLERANCE


def test_composition_is_one_flow_after_the_other(theta, mu):
    other = rich_transformer(3, seed=5)
    assert difference(push_forward(theta.then(other), mu), push_forward(other, push_forward(theta, mu))) < TOLERANCE


def test_inverse_brings_every_token_back(theta, mu):
    assert difference(push_forward(theta.then(theta.inverse()), mu), mu) < TOLERANCE


def test_rescaled_transformer_is_the_same_map(theta, mu):
    slow = theta.rescale(3.0)
    assert slow.duration == pytest.approx(3.0)
    assert difference(push_forward(slow, mu), push_forward(theta, mu)) < TOLERANCE


def test_scaling_the_biases_too_is_another_map(theta, mu):
    # interpolation.md's correction of the paper: 1/T on U, b, B as well is false.
    layers = [layer.mapped(lambda tensor: tensor * theta.duration / 3) for layer in theta.layers]
    wrong = Transformer([replace(layer, duration=layer.duration * 3 / theta.duration) for layer in layers])
    assert difference(push_forward(wrong, mu), push_forward(theta, mu)) > 1e-2


def test_inverse_after_clustering_loses_digits_exponentially(generator):
    # V = I, beta = 2, d = 4: the return error of double precision is about 8e-11 at T = 10 and 6e-8 at T = 20.
    mu = TokenMeasure(sphere.uniform(16, 4, generator=generator))
    errors = []
    for duration in (10.0, 20.0):
        theta = Transformer([Layer([Head(torch.eye(4).double(), 2 * torch.eye(4).double())], duration=duration)])
        errors.append(difference(push_forward(theta.then(theta.inverse()), mu, rtol=1e-13, atol=1e-15), mu))
    assert 1e-13 < errors[0] < 1e-8
    assert 10 < errors[1] / errors[0] < 1e7


# --- invariances


def test_rotating_everything_rotates_the_result(theta, mu, generator):
    Q = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    moved = push_forward(rotated(theta, Q), mu.with_points(mu.points @ Q.mT))
    assert difference(moved, mu.with_points(push_forward(theta, mu).points @ Q.mT)) < TOLERANCE


def test_permuting_atoms_permutes_the_result(theta, mu, generator):
    order = torch.randperm(7, generator=generator)
    shuffled = TokenMeasure(mu.points[:, order], mu.weights[:, order])
    assert torch.allclose(
        push_forward(theta, shuffled).points, push_forward(theta, mu).points[:, order], atol=TOLERANCE
    )


def test_replicating_every_atom_changes_nothing(theta, mu):
    twice = TokenMeasure(mu.points.repeat(1, 3, 1), mu.weights.repeat(1, 3) / 3)
    assert torch.allclose(push_forward(theta, twice).points[:, :7], push_forward(theta, mu).points, atol=TOLERANCE)


def test_p11_padding_acts_nowhere_and_stays_put(theta, mu):
    points = torch.cat([mu.points, torch.full((2, 3, 3), torch.nan, dtype=torch.float64)], dim=1)
    padded = TokenMeasure(points, torch.cat([mu.weights, torch.zeros(2, 3, dtype=torch.float64)], dim=1))
    for solver in ("exact", "rk4", "dopri5"):
        moved, alone = push_forward(theta, padded, solver=solver), push_forward(theta, mu, solver=solver)
        # Sums over more (zero) terms round differently; steps are the same, for padding is no part of the error.
        assert torch.allclose(moved.points[:, :7], alone.points, atol=1e-12)
        assert torch.equal(moved.points[:, 7:], padded.points[:, 7:])


def test_a_batch_of_any_shape_is_its_measures_side_by_side(theta):
    batch = random_measures(2, 3, n=5, d=3, seed=2)
    moved = push_forward(theta, batch)
    assert moved.points.shape == (2, 3, 5, 3)
    for i in range(2):
        for j in range(3):
            alone = push_forward(theta, TokenMeasure(batch.points[i, j], batch.weights[i, j]))
            assert torch.allclose(moved.points[i, j], alone.points, atol=TOLERANCE)


def test_float32_follows_float64_to_its_own_tolerance(theta, mu):
    moved = push_forward(theta.to(torch.float32), mu.to(torch.float32))
    assert moved.points.dtype == torch.float32
    assert float((moved.points - push_forward(theta, mu).points).abs().max()) < 1e-4


def test_closed_gate_leaves_tokens_at_rest(generator):
    points = sphere.uniform(50, 3, generator=generator)
    z = torch.tensor([0.0, 0.0, 1.0]).double()
    gate = Perceptron(torch.randn(3, 1, generator=generator).double(), z[None], torch.tensor([-0.2]).double())
    mu = TokenMeasure(points)
    closed = points[:, 2] <= 0.2
    for solver in ("exact", "dopri5", "rk4"):
        moved = push_forward(Transformer([Layer(perceptron=gate, duration=5.0)]), mu, solver=solver).points
        # torchdiffeq interpolates inside its last step: a few roundings.
        assert torch.allclose(moved[closed], points[closed], rtol=0, atol=4e-15)
        assert float((moved[~closed] - points[~closed]).abs().max()) > 0.1


def test_a_layer_without_velocity_moves_nothing(mu):
    still = Perceptron(torch.zeros(3, 2).double(), torch.ones(2, 3).double(), torch.ones(2).double())
    assert difference(push_forward(Transformer([Layer(perceptron=still)]), mu), mu) < 1e-15


def test_globe_is_kept(theta):
    mu = replace(random_measures(n=4, d=3, seed=0), globe=True)
    assert flow(theta, mu, times=2).start.globe
    assert push_forward(theta, mu).globe


# --- what is stored


def test_times_none_keeps_start_and_end_only(theta, mu):
    path = flow(theta, mu)
    assert path.times.tolist() == [0.0, theta.duration]
    assert torch.equal(path.points[0], mu.points)
    assert difference(path.end, push_forward(theta, mu)) == 0


def test_a_number_of_times_is_spread_evenly(theta, mu):
    path = flow(theta, mu, times=6)
    assert torch.allclose(path.times, torch.linspace(0, theta.duration, 6).double(), atol=1e-6)
    assert difference(path.end, push_forward(theta, mu)) < TOLERANCE


def test_every_stored_time_is_the_flow_up_to_there(theta, mu):
    times = [0.2, 0.6, 0.75, 1.1]  # inside layers, at a switch; neither 0 nor the end
    path = flow(theta, mu, times=times)
    assert path.times.tolist() == times
    first, second, third = theta.layers
    until = [
        [replace(first, duration=0.2)],
        [first],
        [first, replace(second, duration=0.15)],
        [first, second, replace(third, duration=0.2)],
    ]
    for k, layers in enumerate(until):
        assert difference(path[k], push_forward(Transformer(layers), mu)) < TOLERANCE


def test_times_may_be_a_tensor_and_end_within_rounding(theta, mu):
    end = theta.duration * (1 + 1e-15)
    assert len(flow(theta, mu, times=torch.tensor([0.0, 1.0, end], dtype=torch.float64))) == 3


def test_even_times_put_the_same_number_on_every_layer(theta, mu):
    path = flow(theta, mu, times=theta.even_times(10))
    per_layer = [sum(a < t <= b for t in path.times.tolist()) for a, b in pairwise(path.switch_times)]
    assert per_layer == [3, 3, 3]


def test_all_stored_tokens_are_unit_vectors_to_rounding(theta, mu):
    for solver in ("exact", "euler", "rk4", "dopri5", "midpoint"):
        path = flow(theta, mu, times=9, solver=solver)
        assert float((path.points.norm(dim=-1) - 1).abs().max()) < 4e-16


def test_memory_does_not_grow_with_steps(theta, mu):
    # Storage kept alive by the result is that of two sets of points whatever the number of steps.
    for steps in (4, 400):
        path = flow(theta, mu, solver="rk4", steps=steps)
        assert path.points.untyped_storage().nbytes() == 2 * mu.points.untyped_storage().nbytes()


def test_stats_count_what_was_done(theta, mu):
    stats = flow(theta, mu, solver="rk4", steps=10).stats
    assert (stats.solver, stats.steps, stats.evaluations) == ("rk4", 30, 120)
    assert 0 < stats.off_sphere < 1e-3
    assert stats.seconds > 0
    coarse = flow(theta, mu, solver="euler", steps=10).stats
    assert coarse.evaluations == 30
    assert coarse.off_sphere > stats.off_sphere


def test_steps_are_per_layer_and_shared_out_over_stored_times(theta, mu):
    assert flow(theta, mu, times=theta.even_times(7), solver="rk4", steps=10).stats.steps == 30


def test_exact_flow_takes_no_evaluations(mu):
    theta = Transformer([Layer(perceptron=constant_drift(torch.tensor([0.0, 0.0, 2.0]).double()), duration=0.7)])
    path = flow(theta, mu)
    assert path.stats.evaluations == 0
    up = torch.tensor([0.0, 0.0, 1.0]).double()
    assert torch.allclose(path.end.points, sphere.drift(mu.points, up, 1.4), atol=1e-15)


def test_progress_says_a_line_per_stage_without_a_terminal(theta, mu, capsys, monkeypatch):
    monkeypatch.setattr("measureflow.progress.PATIENCE", -1.0)
    flow(theta, mu, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["flow: mix", "flow: bend", "flow: push"]
    flow(theta, mu)
    assert capsys.readouterr().err == ""


# --- what is refused


def test_p16_a_velocity_that_is_not_finite_names_time_layer_and_measure(theta):
    mu = random_measures(3, n=4, d=3, seed=0)
    W = torch.full((3, 1), 1e308, dtype=torch.float64)
    huge = Perceptron(W, torch.ones(1, 3).double(), torch.ones(1).double())
    broken = Transformer([*theta.layers[:1], Layer(perceptron=huge, stage="burst")])
    for solver in ("rk4", "dopri5", "midpoint"):
        with pytest.raises(FlowError, match=r"^time [\d.]+, layer 1 \(burst\), measure \d: ") as caught:
            push_forward(broken, mu, solver=solver)
        assert "\n" not in str(caught.value)


def test_steps_far_too_large_are_an_error_not_a_result(mu):
    theta = Transformer([Layer([Head(300 * torch.eye(3).double(), torch.zeros(3, 3).double())])])
    with pytest.raises(FlowError, match=r"left the sphere, off by .* take smaller steps"):
        push_forward(theta, mu, solver="euler", steps=2)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("times", "message"),
    [
        (1, "times: expected at least 2"),
        ([], "times: expected at least one"),
        ([0.0, 9.0], r"times: expected numbers in \[0, 1.4\], got 9.0 at position 1"),
        ([-0.5, 1.0], "got -0.5 at position 0"),
        ([0.0, math.nan], "got nan at position 1"),
        ([0.0, 1.0, 1.0], "increasing numbers, got 1.0 after 1.0 at position 2"),
    ],
)
def test_bad_times_are_named(theta, mu, times, message):
    with pytest.raises(ValueError, match=message):
        flow(theta, mu, times=times)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "dopri6"}, "solver: expected one of exact, euler, rk4, .*dopri8.*scipy_solver, got 'dopri6'"),
        ({"solver": "rk4", "rtol": 1e-3}, "rtol: solver 'rk4' takes fixed steps"),
        ({"solver": "dopri5", "steps": 3}, "steps: solver 'dopri5' chooses its own"),
        ({"solver": "rk4", "steps": 0}, "steps: expected a whole number of at least 1"),
        ({"rtol": -1.0}, r"rtol: expected a number in \[0, 1\), got -1.0"),
        ({"rtol": 0.0, "atol": 0.0}, "at least one of them above 0"),
        ({"solver": "rk4", "adjoint": True}, "adjoint: solver 'rk4' is differentiated directly"),
        ({"solver": "dopri5", "options": {"setp": 1}}, "has no option 'setp'; it has .*first_step.*max_step"),
        ({"solver": "rk4", "options": {"first_step": 1}}, "has no option 'first_step'; it has none"),
    ],
)
def test_bad_settings_are_named_with_the_valid_ones(theta, mu, settings, message):
    with pytest.raises(ValueError, match=message):
        flow(theta, mu, **settings)


@pytest.mark.bad_input
def test_things_that_do_not_fit_together_are_named(theta, mu):
    with pytest.raises(TypeError, match=r"theta: expected a Transformer, got Layer; Transformer\(\[layer\]\)"):
        flow(theta.layers[0], mu)
    with pytest.raises(TypeError, match="measures: expected a TokenMeasure, got Tensor"):
        flow(theta, mu.points)
    with pytest.raises(ValueError, match="theta in d = 3 and measures in d = 4"):
        flow(theta, random_measures(n=3, d=4, seed=0))
    with pytest.raises(TypeError, match=r"layer 0, heads.0.V: expected torch.float32 .* theta.to\(...\)"):
        flow(theta, mu.to(torch.float32))


def test_equiangular_tokens_follow_their_scalar_equation():
    theta, mu, expected = equiangular(n=4, beta=3.0, start=0.1, duration=2.0)
    moved = push_forward(theta, mu).points
    cosines = (moved @ moved.mT)[~torch.eye(4, dtype=torch.bool)]
    assert torch.allclose(cosines, torch.full_like(cosines, expected), atol=1e-9)

"""Heads, perceptrons, layers and transformers: velocities, algebra, bookkeeping, refusals."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from problems import random_measures, rich_transformer, rotated

from measureflow import sphere
from measureflow.transformer import (
    ACTIVATIONS,
    Head,
    Layer,
    Perceptron,
    Transformer,
    compose,
    constant_drift,
    saturating_gate,
)


@pytest.fixture
def theta() -> Transformer:
    return rich_transformer(3, seed=0)


@pytest.fixture
def identity() -> torch.Tensor:
    return torch.eye(3, dtype=torch.float64)


# --- velocities, against the formula written out atom by atom


def test_head_velocity_is_the_softmax_average_of_the_formula(generator):
    V, B = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    mu = random_measures(n=4, d=3, seed=1)
    computed = Head(V, B).velocity(mu.points, mu.weights)
    for x, got in zip(mu.points, computed, strict=True):
        scores = [math.exp(float((B @ x) @ y)) * float(w) for y, w in zip(mu.points, mu.weights, strict=True)]
        mean = sum(s * y for s, y in zip(scores, mu.points, strict=True)) / sum(scores)
        assert torch.allclose(got, V @ mean, atol=1e-14)


def test_even_attention_takes_the_short_way_to_the_same_answer(identity):
    mu = random_measures(2, n=4, d=3, seed=1)
    even, general = Head(identity, 0 * identity), Head(identity, (0 * identity).requires_grad_())
    assert even.attends_evenly
    assert not general.attends_evenly  # B is to be learned, and gets its gradient
    short, long = (head.velocity(mu.points, mu.weights).expand(2, 4, 3) for head in (even, general))
    assert torch.allclose(short, long, atol=1e-15)
    assert not Head(identity, 0 * identity, kernel="unnormalised").attends_evenly


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_perceptron_velocity_is_the_formula(activation, generator):
    W, U, b = (torch.randn(*shape, generator=generator).double() for shape in ((3, 5), (5, 3), (5,)))
    x = sphere.uniform(4, 3, generator=generator)
    scalar = {"relu": lambda s: max(s, 0.0), "softplus": lambda s: math.log1p(math.exp(s)), "tanh": math.tanh}
    for point, got in zip(x, Perceptron(W, U, b, activation).velocity(x), strict=True):
        expected = sum(W[:, k] * scalar[activation](float(U[k] @ point + b[k])) for k in range(5))
        assert torch.allclose(got, expected, atol=1e-14)


def test_layer_velocity_is_tangent_and_adds_heads_and_perceptron(theta):
    mu = random_measures(2, n=5, d=3, seed=2)
    layer = theta.layers[1]
    v = layer.velocity(mu.points, mu.weights)
    assert float((v * mu.points).sum(-1).abs().max()) < 1e-15
    parts = [Layer(layer.heads), Layer(perceptron=layer.perceptron)]
    assert torch.allclose(v, sum(part.velocity(mu.points, mu.weights) for part in parts), atol=1e-15)


def test_constant_drift_is_the_same_vector_everywhere(generator):
    w = torch.randn(4, generator=generator)
    x = sphere.uniform(6, 4, generator=generator, dtype=torch.float32)
    assert torch.equal(constant_drift(w).velocity(x), w.expand(6, 4))


def test_saturating_gate_is_a_clipped_ramp():
    z, drift = torch.tensor([0.0, 0.0, 1.0]).double(), torch.tensor([2.0, 0.0, 0.0]).double()
    height = torch.linspace(-1, 1, 41, dtype=torch.float64)
    x = torch.stack([(1 - height**2).sqrt(), 0 * height, height], dim=-1)
    moved = saturating_gate(z, threshold=0.25, width=0.5, drift=drift).velocity(x)
    ramp = ((height - 0.25) / 0.5).clamp(0, 1)
    assert torch.allclose(moved, ramp[:, None] * drift, atol=1e-15)
    assert not bool(moved[height <= 0.25].any())  # exactly at rest on the closed side


def test_velocity_turns_with_the_frame(theta, generator):
    Q = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    mu = random_measures(n=5, d=3, seed=2)
    for layer, turned in zip(theta.layers, rotated(theta, Q).layers, strict=True):
        v = layer.velocity(mu.points, mu.weights)
        assert torch.allclose(turned.velocity(mu.points @ Q.mT, mu.weights), v @ Q.mT, atol=1e-14)


# --- algebra


def test_inverse_turns_every_velocity_round_in_reverse_order(theta):
    mu = random_measures(n=5, d=3, seed=3)
    inverse = theta.inverse()
    assert [layer.stage for layer in inverse.layers] == ["push", "bend", "mix"]
    for layer, undone in zip(reversed(theta.layers), inverse.layers, strict=True):
        assert undone.duration == layer.duration
        assert torch.equal(undone.velocity(mu.points, mu.weights), -layer.velocity(mu.points, mu.weights))


def test_inverse_of_the_inverse_is_the_transformer(theta):
    again = theta.inverse().inverse()
    for a, b in zip(theta.layers, again.layers, strict=True):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True))


def test_rescale_touches_v_w_and_durations_only(theta):
    slow = theta.rescale(2.8)
    assert slow.duration == pytest.approx(2.8)
    for a, b in zip(theta.layers, slow.layers, strict=True):
        assert b.duration == pytest.approx(2 * a.duration)
        for (name, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
            factor = 0.5 if name.endswith(("V", "W")) else 1.0
            assert torch.allclose(y, factor * x, atol=1e-15), name


def test_compose_and_then_put_layers_in_order(theta):
    other = rich_transformer(3, seed=1)
    assert compose([theta, other]).layers == (*theta.layers, *other.layers)
    assert theta.then(other).layers == (*theta.layers, *other.layers)


# --- bookkeeping


def test_switches_durations_and_stages(theta):
    assert theta.switches == 2
    assert theta.switch_times == pytest.approx([0.0, 0.6, 0.9, 1.4])
    assert theta.duration == theta.switch_times[-1]
    assert theta.then(theta).stages == {"mix": 2, "bend": 2, "push": 2}


def test_layer_at_takes_the_layer_that_begins_at_a_switch(theta):
    stages = [theta.layer_at(t).stage for t in (0.0, 0.59, theta.switch_times[1], 0.95, theta.duration)]
    assert stages == ["mix", "mix", "bend", "push", "push"]
    mu = random_measures(n=5, d=3, seed=3)
    v = theta.velocity(mu.points, mu.weights, 0.7)
    assert torch.equal(v, theta.layers[1].velocity(mu.points, mu.weights))


def test_even_times_spend_the_same_number_on_every_layer(theta):
    times = theta.even_times(31)
    assert len(times) == 31
    assert (times[0], times[-1]) == (0.0, theta.duration)
    assert times[10] == theta.switch_times[1]
    assert times[20] == theta.switch_times[2]
    assert all(a < b for a, b in pairwise(times))


def test_num_parameters_counts_every_entry(theta):
    # mix: 2 heads of 9 + 9; bend: a head, and 5 neurons of 3 + 3 + 1; push: 4 neurons.
    assert theta.num_parameters == 2 * 18 + (18 + 35) + 28


def test_norm_is_the_largest_over_layers(theta):
    by_layer = [math.sqrt(sum(float(t.square().sum()) for _, t in layer.tensors())) for layer in theta.layers]
    assert theta.norm == pytest.approx(max(by_layer))


def test_to_converts_every_tensor_and_keeps_a_repeated_layer_one(theta):
    layer = theta.layers[0]
    single = Transformer([layer, theta.layers[1], layer]).to(torch.float32)
    assert single.layers[0] is single.layers[2]
    assert {t.dtype for part in single.layers for _, t in part.tensors()} == {torch.float32}


def test_save_and_load_give_the_same_transformer(theta, tmp_path):
    from measureflow.files import load

    theta.save(tmp_path / "theta.safetensors")
    again = load(tmp_path / "theta.safetensors")
    assert [layer.stage for layer in again.layers] == ["mix", "bend", "push"]
    for a, b in zip(theta.layers, again.layers, strict=True):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True))


def test_repr_is_one_line_of_facts(theta):
    assert repr(theta) == "Transformer(d=3, layers=3, heads<=2, parameters=117, duration=1.4)"


# --- refusals


@pytest.mark.bad_input
def test_wrong_shapes_are_named_with_the_expected_ones(identity):
    with pytest.raises(ValueError, match=r"B: expected shape \(d=3, d=3\), got \(2, 2\)"):
        Head(identity, torch.eye(2).double())
    with pytest.raises(ValueError, match=r"V: expected shape \(d=3, d=3\), got \(3, 2\)"):
        Head(identity[:, :2], identity)
    with pytest.raises(ValueError, match=r"b: expected shape \(m=4\), got \(3,\)"):
        Perceptron(torch.zeros(3, 4), torch.zeros(4, 3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"U: expected shape \(m=4, d=3\), got \(4, 2\)"):
        Perceptron(torch.zeros(3, 4), torch.zeros(4, 2), torch.zeros(4))


@pytest.mark.bad_input
def test_unknown_names_come_with_the_valid_ones(identity):
    with pytest.raises(ValueError, match="activation: expected one of relu, softplus, tanh, got 'gelu'"):
        Perceptron(torch.zeros(3, 4), torch.zeros(4, 3), torch.zeros(4), activation="gelu")
    with pytest.raises(ValueError, match=r"softmax.*'softmin'"):
        Head(identity, identity, kernel="softmin")


@pytest.mark.bad_input
def test_mixed_dtypes_are_named(identity):
    with pytest.raises(TypeError, match=r"B: expected torch.float64 as V has, got torch.float32"):
        Head(identity, torch.eye(3))
    with pytest.raises(TypeError, match=r"V: expected a floating-point tensor, got torch.int64"):
        Head(torch.eye(3, dtype=torch.int64), torch.eye(3, dtype=torch.int64))


@pytest.mark.bad_input
@pytest.mark.parametrize("duration", [0.0, -1.0, math.inf, math.nan])
def test_durations_are_positive_numbers(identity, duration, theta):
    with pytest.raises(ValueError, match="duration: expected a positive number"):
        Layer([Head(identity, identity)], duration=duration)
    with pytest.raises(ValueError, match="duration: expected a positive number"):
        theta.rescale(duration)


@pytest.mark.bad_input
def test_empty_and_mixed_layers_are_refused(identity, theta):
    with pytest.raises(ValueError, match="expected heads or a perceptron, got an empty layer"):
        Layer()
    with pytest.raises(ValueError, match=r"expected heads and perceptron of one dimension, got dimensions \[3, 4\]"):
        Layer([Head(identity, identity)], constant_drift(torch.ones(4).double()))
    with pytest.raises(ValueError, match="layers: expected at least one"):
        Transformer([])
    with pytest.raises(ValueError, match="layer 3: expected dimension 3, got 4"):
        theta.then(Transformer([Layer(perceptron=constant_drift(torch.ones(4)))]))
    with pytest.raises(ValueError, match="transformers: expected at least one"):
        compose([])


@pytest.mark.bad_input
def test_other_arguments_out_of_range(theta):
    with pytest.raises(ValueError, match="width: expected a positive number, got 0"):
        saturating_gate(torch.ones(3), 0.5, 0.0, torch.ones(3))
    with pytest.raises(ValueError, match=r"t: expected a time in \[0, 1.4\], got 2"):
        theta.layer_at(2.0)
    with pytest.raises(ValueError, match="k: expected at least 2 times"):
        theta.even_times(1)
    with pytest.raises(TypeError, match="layer 1: expected a Layer, got Transformer"):
        Transformer([theta.layers[0], theta])


def test_parameters_that_are_not_finite_are_found_by_name(theta):
    bad = replace(theta.layers[0].heads[0], V=torch.full((3, 3), torch.nan).double())
    broken = Transformer([replace(theta.layers[0], heads=[bad])])
    assert [name for name, t in broken.layers[0].tensors() if not bool(t.isfinite().all())] == ["heads.0.V"]

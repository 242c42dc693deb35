"""Leaving out neurons that see no token changes nothing."""

from dataclasses import replace

import pytest
import torch
from problems import random_measures

from measureflow import sphere
from measureflow.culling import culled_velocity, seen_neurons
from measureflow.flow import flow, push_forward
from measureflow.measures import TokenMeasure
from measureflow.transformer import Head, Layer, Perceptron, Transformer


@pytest.fixture
def clusters(generator) -> TokenMeasure:
    """Six measures of 20 tokens, each on a cap of about 0.1 rad, two of them with padding."""
    centres = sphere.uniform(6, 3, generator=generator)
    points = torch.stack([sphere.von_mises_fisher(c, 500.0, 20, generator=generator) for c in centres])
    weights = torch.full((6, 20), 1 / 20, dtype=torch.float64)
    weights[1:3, 15:] = 0
    return TokenMeasure(points, weights / weights.sum(-1, keepdim=True))


@pytest.fixture
def caps(clusters, generator) -> Perceptron:
    """600 neurons on caps of 0.2 rad around the tokens, 100 a measure."""
    u = clusters.points.reshape(-1, 3)[torch.arange(600) % 120]
    W = torch.randn(3, 600, generator=generator, dtype=torch.float64)
    return Perceptron(W, 10 * u, torch.full((600,), -10 * torch.cos(torch.tensor(0.2)).item(), dtype=torch.float64))


def test_no_neuron_that_acts_on_the_cap_is_left_out(clusters, caps, generator):
    real = (clusters.weights > 0).unsqueeze(-1)
    seen = seen_neurons(caps, clusters.points, real)
    assert seen is not None
    assert seen.b.shape[-1] <= 300
    # Anywhere within reach of the centre, not only at the tokens.
    for i in range(6):
        x = sphere.uniform(4000, 3, generator=generator)
        x = x[(x - seen.centre[i]).square().sum(-1) <= seen.reach[i]]
        assert len(x) > 10
        few = torch.relu(x @ seen.U[i].mT + seen.b[i]) @ seen.W[i]
        assert torch.allclose(few, caps.velocity(x), atol=1e-12)


@pytest.mark.parametrize("heads", [(), (Head(torch.eye(3).double(), torch.eye(3).double()),)])
def test_velocity_is_that_of_the_layer(clusters, caps, heads):
    layer = Layer(heads, caps)
    real = (clusters.weights > 0).unsqueeze(-1)
    fast, slow = (f(clusters.points, clusters.weights) for f in (culled_velocity(layer, real), layer.velocity))
    # Sums of up to 100 terms of size 1 in another order.
    assert torch.allclose(torch.where(real, fast - slow, 0.0), torch.zeros(6, 20, 3).double(), atol=1e-13)


def test_neurons_are_chosen_again_when_tokens_move_away(clusters, caps):
    layer = Layer(perceptron=caps)
    velocity = culled_velocity(layer, None)
    for points in (clusters.points, clusters.points.flip(0), clusters.points[[1, 2, 3, 4, 5, 0]]):
        got = velocity(points, clusters.weights)
        assert torch.allclose(got, layer.velocity(points, clusters.weights), atol=1e-13)


def test_a_flow_that_carries_tokens_across_caps_is_the_plain_one(clusters, caps, monkeypatch):
    theta = Transformer([Layer([Head(3 * torch.eye(3).double(), torch.zeros(3, 3).double())], caps, duration=1.5)])
    fast = flow(theta, clusters, times=5, solver="rk4", steps=40)
    monkeypatch.setattr("measureflow.culling.FEWEST_NEURONS", 10**9)
    slow = flow(theta, clusters, times=5, solver="rk4", steps=40)
    assert torch.allclose(fast.points, slow.points, atol=1e-11)
    assert float((slow.points[-1] - slow.points[0]).abs().max()) > 0.1


def test_gradients_are_those_of_all_neurons(clusters, caps, monkeypatch):
    def gradients() -> list[torch.Tensor]:
        layer = Layer(perceptron=caps).mapped(lambda tensor: tensor.clone().requires_grad_())
        tensors = [tensor for _, tensor in layer.tensors()]
        end = push_forward(Transformer([replace(layer, duration=0.1)]), clusters, solver="rk4", steps=4).points
        return list(torch.autograd.grad((end * end.detach().flip(0)).sum(), tensors))

    fast = gradients()
    monkeypatch.setattr("measureflow.culling.FEWEST_NEURONS", 10**9)
    for a, b in zip(fast, gradients(), strict=True):
        assert float(b.abs().max()) > 0
        assert torch.allclose(a, b, atol=1e-12)


def test_neurons_seen_from_everywhere_are_all_kept():
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(100, 3, generator=generator, dtype=torch.float64)
    wide = Perceptron(U.mT.contiguous(), U, torch.zeros(100, dtype=torch.float64))
    mu = random_measures(n=9, d=3, seed=0)
    assert seen_neurons(wide, mu.points) is None
    still = TokenMeasure(torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], dtype=torch.float64))  # no mean direction
    assert seen_neurons(wide, still.points) is None

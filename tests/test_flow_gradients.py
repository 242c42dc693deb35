"""Gradients through the flow: direct, by the adjoint, checkpointed, by finite differences."""

from dataclasses import replace

import pytest
import torch
from problems import random_measures, rich_transformer
from torch import Tensor

from measureflow.flow import flow, push_forward
from measureflow.measures import TokenMeasure
from measureflow.transformer import Head, Layer, Transformer


@pytest.fixture
def mu() -> TokenMeasure:
    return random_measures(2, n=5, d=3, seed=1)


def learnable(theta: Transformer) -> tuple[Transformer, list[Tensor]]:
    layers = [layer.mapped(lambda tensor: tensor.detach().clone().requires_grad_()) for layer in theta.layers]
    return Transformer(layers), [tensor for layer in layers for _, tensor in layer.tensors()]


def loss(theta: Transformer, mu: TokenMeasure, **settings) -> Tensor:
    target = torch.linspace(-1, 1, mu.points.numel(), dtype=torch.float64).reshape(mu.points.shape)
    return (push_forward(theta, mu, **settings).points * target).sum()


def gradients(settings: dict, mu: TokenMeasure) -> list[Tensor]:
    theta, tensors = learnable(rich_transformer(3, seed=0))
    return list(torch.autograd.grad(loss(theta, mu, **settings), tensors))


@pytest.mark.parametrize("settings", [{"solver": "rk4", "steps": 8}, {"solver": "dopri8"}, {"solver": "exact"}])
def test_direct_gradients_are_those_of_finite_differences(settings, mu):
    theta, tensors = learnable(rich_transformer(3, seed=0))
    computed = torch.autograd.grad(loss(theta, mu, **settings), tensors)
    h = 1e-5  # truncation h^2 and rounding 1e-12/h (the solver's own error varies smoothly) are both below 1e-6
    for tensor, gradient in zip(tensors, computed, strict=True):
        with torch.no_grad():
            place = tuple(size // 2 for size in tensor.shape)
            tensor[place] += h
            above = loss(theta, mu, **settings)
            tensor[place] -= 2 * h
            below = loss(theta, mu, **settings)
            tensor[place] += h
        assert float(gradient[place]) == pytest.approx(float(above - below) / (2 * h), abs=2e-6, rel=1e-5)


@pytest.mark.parametrize("solver", ["dopri8", "dopri5", "midpoint", "scipy_solver"])
def test_p18_adjoint_and_direct_gradients_agree_for_every_parameter(solver, mu):
    steps = {"steps": 200} if solver == "midpoint" else {}
    direct = gradients({"solver": "dopri8"}, mu)
    adjoint = gradients({"solver": solver, "adjoint": True, **steps}, mu)
    # Midpoint solves forward and backward with errors of h^2 = 1e-5.
    tolerance = 1e-4 if solver == "midpoint" else 1e-6
    for a, b in zip(direct, adjoint, strict=True):
        assert float(b.abs().max()) > 0
        assert torch.allclose(a, b, atol=tolerance)


def test_p18_gradients_reach_tokens_and_weights_that_the_layer_does_not_own(mu):
    theta = rich_transformer(3, seed=0)
    found = []
    for adjoint in (False, True):
        points, weights = mu.points.clone().requires_grad_(), mu.weights.clone().requires_grad_()
        value = loss(theta, TokenMeasure(points, weights), solver="dopri8", adjoint=adjoint)
        found.append(torch.autograd.grad(value, [points, weights]))
    for a, b in zip(*found, strict=True):
        assert float(a.abs().max()) > 0
        assert torch.allclose(a, b, atol=1e-7)


@pytest.mark.bad_input
def test_p18_a_solver_without_gradients_says_so(mu):
    theta, _ = learnable(rich_transformer(3, seed=0))
    with pytest.raises(ValueError, match="scipy_solver' has no gradient of its own; set adjoint=True"):
        push_forward(theta, mu, solver="scipy_solver")


@pytest.mark.parametrize("settings", [{"solver": "rk4"}, {"solver": "dopri5"}, {"solver": "exact"}])
def test_p20_checkpointed_gradients_are_the_plain_ones(settings, mu, monkeypatch):
    # No token requires a gradient here, only parameters.
    checkpointed = gradients(settings, mu)
    monkeypatch.setattr("measureflow.solvers.checkpoint", lambda move, points, **_: move(points))
    for a, b in zip(checkpointed, gradients(settings, mu), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_checkpointing_keeps_one_set_of_tokens_per_layer(mu):
    theta, _ = learnable(rich_transformer(3, seed=0))
    kept = []
    for steps in (4, 64):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t):
            push_forward(theta, mu, solver="rk4", steps=steps)
        kept.append(sum(sizes))
    assert kept[0] == kept[1]


def test_gradients_at_rest_are_finite():
    # All tokens stand still behind a closed gate, where error norms and initial steps are roots of zero.
    theta = rich_transformer(3, seed=0)
    W, U, b = (torch.ones(3, 1), torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([-2.0]))
    perceptron = replace(theta.layers[2].perceptron, W=W.double(), U=U.double(), b=b.double(), activation="relu")
    points = random_measures(n=4, d=3, seed=0).points.requires_grad_()
    for settings in ({"solver": "dopri5"}, {"solver": "dopri8", "adjoint": True}, {"solver": "rk4"}, {}):
        end = push_forward(Transformer([Layer(perceptron=perceptron)]), TokenMeasure(points), **settings).points
        (gradient,) = torch.autograd.grad(end[:, 0].sum(), points)
        # The tokens are at rest; the projection takes the part along the token out of the gradient.
        first = torch.tensor([1.0, 0.0, 0.0]).double()
        expected = first - points.detach() * points.detach()[:, :1]
        assert torch.allclose(gradient, expected, atol=1e-12)


def test_gradients_of_stored_times_add_up(mu):
    theta, tensors = learnable(rich_transformer(3, seed=0))
    path = flow(theta, mu, times=4, solver="rk4")
    gradient = torch.autograd.grad(path.points[1:].sum(), tensors)
    assert all(bool(g.isfinite().all()) for g in gradient)
    last = torch.autograd.grad(flow(theta, mu, times=4, solver="rk4").points[-1].sum(), tensors)
    # The last layer acts after the second stored time only: the earlier times add nothing there but the third does.
    assert float((gradient[0] - last[0]).abs().max()) > 1e-3


def test_adjoint_gradients_lose_digits_where_the_flow_contracts():
    # As the docstring of `flow` warns: the backward solve expands what the clustering has contracted.
    mu, gaps = random_measures(n=8, d=3, seed=0), []
    for duration in (4.0, 20.0):
        found = []
        for adjoint in (False, True):
            V = torch.eye(3, dtype=torch.float64).requires_grad_()
            B = (2 * torch.eye(3, dtype=torch.float64)).requires_grad_()
            theta = Transformer([Layer([Head(V, B)], duration=duration)])
            end = push_forward(theta, mu, solver="dopri8", adjoint=adjoint, rtol=1e-8, atol=1e-10)
            found.append(torch.cat(torch.autograd.grad(end.points[0].sum(), [V, B])))
        gaps.append(float((found[0] - found[1]).abs().max()))
    assert gaps[0] < 1e-7
    assert 1e-6 < gaps[1] < 1e-1

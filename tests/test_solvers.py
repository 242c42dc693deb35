"""Every solver: its order, on the sphere to rounding, never across a switch, judged per measure."""

from dataclasses import replace

import pytest
import torch
from problems import equiangular, random_measures, rich_transformer
from torchdiffeq._impl.odeint import SOLVERS
from torchdiffeq._impl.solvers import FixedGridODESolver

from measureflow import sphere
from measureflow.errors import FlowError
from measureflow.flow import flow, push_forward
from measureflow.measures import TokenMeasure
from measureflow.solvers import FIXED_STEP, SOLVER_NAMES
from measureflow.transformer import Head, Layer, Transformer, saturating_gate

FIXED = [name for name in SOLVER_NAMES if name in FIXED_STEP or issubclass(SOLVERS.get(name, int), FixedGridODESolver)]
ADAPTIVE = [name for name in SOLVER_NAMES if name not in FIXED]
ORDER = {"euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "implicit_adams": 5, "fixed_adams": 5}  # others of FIXED: 4


def equiangular_error(**settings) -> float:
    theta, mu, expected = equiangular(n=3, beta=1.0, start=0.0, duration=1.0)
    end = push_forward(theta, mu, **settings).points
    assert float((end.norm(dim=-1) - 1).abs().max()) < 4e-16
    return abs(float(end[0] @ end[1]) - expected)


def test_every_name_of_torchdiffeq_is_a_solver():
    assert set(SOLVER_NAMES) == {"exact", *SOLVERS}


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_every_solver_runs_with_its_defaults(solver):
    # 32 steps of length h: errors of about h^order; orders 2 and 3 of variable step ask for 1e-6 a step.
    assert equiangular_error(solver=solver) < {"euler": 2e-2, "midpoint": 1e-3, "heun2": 1e-3}.get(solver, 1e-4)


@pytest.mark.parametrize("solver", FIXED)
def test_fixed_steps_converge_at_their_order(solver):
    coarse, fine = (equiangular_error(solver=solver, steps=steps) for steps in (16, 32))
    order = ORDER.get(solver, 4)
    # Halving the step divides the error by 2^order, up to terms of the next order.
    assert 2 ** (order - 0.5) < coarse / fine < 2 ** (order + 0.7)


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_adaptive_solvers_keep_their_tolerance(solver):
    order = getattr(SOLVERS.get(solver), "order", 8)
    for rtol in (1e-4, 1e-6):
        # The tolerance is per step, h^(order + 1) = rtol, and the whole error is h^order up to a constant.
        assert equiangular_error(solver=solver, rtol=rtol, atol=rtol / 10) < 5 * rtol ** (order / (order + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_dtype_and_sphere_are_kept(solver, dtype):
    mu = random_measures(2, n=4, d=3, seed=0, dtype=dtype)
    path = flow(rich_transformer(3, seed=0, dtype=dtype), mu, solver=solver, times=3)
    assert path.points.dtype == dtype
    assert float((path.points.norm(dim=-1) - 1).abs().max()) < 4 * torch.finfo(dtype).eps


def test_drifting_and_projecting_once_is_projecting_after_each_step():
    # The field is homogeneous of degree one in each token, so that steps commute with the projection.
    theta = rich_transformer(3, seed=2)
    layer, mu, steps = theta.layers[0], random_measures(n=6, d=3, seed=3), 12
    x, h = mu.points, theta.layers[0].duration / 12
    for _ in range(steps):
        middle = sphere.project(x + h / 2 * layer.velocity(x, mu.weights))
        # Midpoint rule of the extended field: f(r x) = r v(x) at the middle, where r = |x + h/2 v|.
        r = (x + h / 2 * layer.velocity(x, mu.weights)).norm(dim=-1, keepdim=True)
        x = sphere.project(x + h * r * layer.velocity(middle, mu.weights))
    path = flow(Transformer([layer]), mu, solver="midpoint", steps=steps)
    assert torch.allclose(path.end.points, x, atol=1e-14)
    assert path.stats.off_sphere > 1e-5  # there was something to project


@pytest.mark.parametrize("solver", ["dopri5", "dopri8"])
def test_p17_a_run_over_switches_is_layer_by_layer(solver):
    theta = rich_transformer(3, seed=4)
    short = [replace(layer, duration=1e-6) for layer in theta.layers]
    mu, rtol = random_measures(n=5, d=3, seed=5), 1e-7
    layers = [theta.layers[0], *short, theta.layers[2], short[1]]
    moved = push_forward(Transformer(layers), mu, solver=solver, rtol=rtol, atol=rtol)
    by_hand = mu
    for layer in layers:
        by_hand = push_forward(Transformer([layer]), by_hand, solver=solver, rtol=rtol, atol=rtol)
    assert torch.allclose(moved.points, by_hand.points, atol=10 * rtol)
    reference = push_forward(Transformer(layers), mu, solver="dopri8", rtol=1e-12, atol=1e-13)
    assert torch.allclose(moved.points, reference.points, atol=10 * rtol)


@pytest.mark.parametrize("solver", ["dopri8", "dopri5", "bosh3"])
def test_p19_a_measure_beside_a_stiff_one_moves_as_it_does_alone(solver):
    # A steep gate moves the second measure and never touches the first.
    up = torch.tensor([0.0, 0.0, 1.0]).double()
    steep = saturating_gate(up, threshold=0.2, width=0.05, drift=torch.tensor([20.0, 0.0, 0.0]).double())
    theta = Transformer([Layer([Head(torch.eye(3).double(), torch.eye(3).double())], steep, duration=0.5)])
    half = random_measures(2, n=60, d=3, seed=6)
    flipped = half.points * torch.tensor([1.0, 1.0, -1.0]).double() * half.points[..., 2:].sign()  # z < 0
    both = TokenMeasure(torch.stack([flipped[0], -flipped[1]]), half.weights)
    rtol = 1e-6
    alone = push_forward(theta, both[:1], solver=solver, rtol=rtol, atol=rtol)
    beside = push_forward(theta, both, solver=solver, rtol=rtol, atol=rtol)
    assert torch.allclose(beside.points[:1], alone.points, atol=10 * rtol)
    reverse = TokenMeasure(both.points.flip(0), both.weights.flip(0))
    assert torch.allclose(
        push_forward(theta, reverse, solver=solver, rtol=rtol, atol=rtol).points[1:], alone.points, atol=10 * rtol
    )


def wall(monkeypatch, height: float) -> tuple[Transformer, TokenMeasure]:
    """The first of two measures runs, at time ln(3)/2, into a velocity that jumps to the other direction."""

    def velocity(self, points, weights):
        up = torch.zeros_like(points)
        up[..., 1] = torch.where(points[..., 1] > 0.5, -height, 1.0)
        return sphere.tangent(points, up)

    monkeypatch.setattr(Layer, "velocity", velocity)
    theta = Transformer([Layer([Head(torch.eye(2).double(), torch.eye(2).double())], stage="wall")])
    return theta, TokenMeasure(torch.tensor([[[1.0, 0.0]], [[0.0, -1.0]]]).double())


@pytest.mark.parametrize("solver", ["dopri8", "bosh3"])
def test_p16_a_step_that_shrinks_to_nothing_names_time_layer_measure_and_advice(solver, monkeypatch):
    theta, mu = wall(monkeypatch, 1e20)
    pattern = r"^time 0\.54\d*, layer 0 \(wall\), measure 0: the step shrank to nothing, .* loosen rtol and atol"
    with pytest.raises(FlowError, match=pattern) as caught:
        push_forward(theta, mu, solver=solver)
    assert "\n" not in str(caught.value)


def test_p16_the_step_limit_names_time_layer_measure_and_advice(monkeypatch):
    monkeypatch.setattr("measureflow.solvers.STEP_LIMIT", 200)
    theta, mu = wall(monkeypatch, 1.0)
    with pytest.raises(FlowError, match=r"^time 0\.54\d*, layer 0 \(wall\), measure 0: more than 200 steps; loosen"):
        push_forward(theta, mu, solver="dopri5")


def test_p16_the_backward_solve_is_guarded_too(monkeypatch):
    theta, _, _ = equiangular(n=3, beta=1.0, start=0.0, duration=1.0)
    mu = random_measures(n=3, d=3, seed=0)
    value = push_forward(
        theta.to(torch.float64), TokenMeasure(mu.points.requires_grad_()), solver="dopri5", adjoint=True
    )
    monkeypatch.setattr("measureflow.solvers.STEP_LIMIT", 3)
    with pytest.raises(FlowError, match=r"layer 0: more than 3 steps in the backward solve of the adjoint"):
        value.points.sum().backward()


def test_implicit_corrections_that_do_not_converge_are_an_error():
    theta, mu, _ = equiangular(n=3, beta=1.0, start=0.0, duration=1.0)
    fast = Transformer([layer.scaled(100.0) for layer in theta.layers])
    with pytest.raises(FlowError, match=r"implicit_adams: Functional iteration did not converge|left the sphere"):
        push_forward(fast, mu, solver="implicit_adams", steps=8)

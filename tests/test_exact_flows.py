"""Exact flows against torchdiffeq, against each other, and for the symmetries of the continuity equation."""

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from torchdiffeq import odeint

from measureflow import sphere
from measureflow.exact_flows import EXACT_FLOWS, exact_flow, has_exact_flow
from measureflow.exact_flows.gates import find_gates
from measureflow.exact_flows.ramp import Ramp, height, travel, travel_time
from measureflow.transformer import Head, Layer, Perceptron, constant_drift, saturating_gate

DIM = 3


def even_head(V: torch.Tensor) -> Head:
    return Head(V, torch.zeros_like(V))


def layer_of(kind: str, seed: int) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    z, w = sphere.uniform(2, DIM, generator=generator)
    random = torch.randn(DIM, DIM, generator=generator, dtype=torch.float64)
    level = float(random[0, 0].clamp(-1, 1)) / 2
    many = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    layers = {
        "drift": Layer(perceptron=constant_drift(1.5 * w)),
        "gate": Layer(perceptron=saturating_gate(z, level, 0.3, 2 * w)),
        "narrow gate": Layer(perceptron=saturating_gate(z, level, 0.01, w)),
        "printed gate": Layer(perceptron=Perceptron(w[:, None], z[None], z.new_tensor([-level]))),
        "self-centred gate": Layer(perceptron=saturating_gate(z, level, 0.3, z)),
        "many neurons on a line": Layer(
            perceptron=Perceptron(0.3 * w[:, None] * many[0], z * many[1][:, None], many[2])
        ),
        "rank one": Layer([even_head(1.3 * torch.outer(z, z))]),
        "identity": Layer([even_head(torch.eye(DIM, dtype=torch.float64))]),
        "any V and a drift": Layer([even_head(random), even_head(random.mT @ random)], constant_drift(w)),
    }
    return replace(layers[kind], duration=1.5)


KINDS = (
    "drift",
    "gate",
    "narrow gate",
    "printed gate",
    "self-centred gate",
    "many neurons on a line",
    "rank one",
    "identity",
    "any V and a drift",
)
GATES = tuple(kind for kind in KINDS if "gate" in kind or "line" in kind)
each_kind = pytest.mark.parametrize("kind", KINDS)


def cloud(seed: int, *batch: int, n: int = 25) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    weights = torch.rand(*batch, n, generator=generator, dtype=torch.float64) + 0.1
    return sphere.uniform(*batch, n, DIM, generator=generator), weights / weights.sum(-1, keepdim=True)


def moved(layer: Layer, x: torch.Tensor, weights: torch.Tensor, duration: float | None = None) -> torch.Tensor:
    y = exact_flow(layer, x, weights, duration)
    assert y is not None
    return y


def integrated(layer: Layer, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """torchdiffeq's answer. Without step_t its last value is interpolated, at 1e-8 whatever the tolerance."""
    end = torch.tensor([0.0, layer.duration], dtype=torch.float64)
    options = {"max_num_steps": 10**6, "step_t": end[1:]}
    field = layer.velocity
    return odeint(lambda t, y: field(y, weights), x, end, method="dopri8", rtol=1e-12, atol=1e-12, options=options)[-1]


@each_kind
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backwards", [False, True])
def test_agrees_with_torchdiffeq(kind, seed, backwards):
    layer = layer_of(kind, seed)
    layer = layer.inverse() if backwards else layer
    x, weights = cloud(seed, 2)
    # At a kink the integrator's own error is that of one low-order step, 1e-10; where there is none it is 1e-12.
    tolerance = 2e-9 if kind in GATES else 2e-12
    torch.testing.assert_close(moved(layer, x, weights), integrated(layer, x, weights), rtol=0, atol=tolerance)


@each_kind
def test_agreement_check_fails_on_a_wrong_time(kind):
    layer = layer_of(kind, 0)
    x, weights = cloud(0, 2)
    error = moved(layer, x, weights, layer.duration * 1.0001) - integrated(layer, x, weights)
    assert error.abs().max() > 1e-6


@each_kind
def test_semigroup(kind):
    layer = layer_of(kind, 1)
    x, weights = cloud(1, 2)
    twice = moved(layer, moved(layer, x, weights, 0.4), weights, 1.1)
    # A few roundings, amplified by e at most where the rate is of order 1 and the ramp 0.01 wide.
    torch.testing.assert_close(twice, moved(layer, x, weights), rtol=0, atol=1e-13)


@each_kind
def test_inverse(kind):
    layer = layer_of(kind, 1)
    x, weights = cloud(1, 2)
    y = moved(layer, x, weights)
    error = (moved(layer.inverse(), y, weights) - x).abs().amax(-1)
    # Tokens that a gate brings nearly to rest lose what speed they lose: roundings grow by that ratio on the way back.
    before, after = (layer.velocity(p, weights).norm(dim=-1) for p in (x, y))
    loss = torch.where(after > 0, before / after, torch.inf).where(before > 0, 1.0)
    assert (error < 1e-12 if kind not in GATES else error < 1e-13 * (1 + loss)).all()


@each_kind
def test_rotation(kind):
    layer = layer_of(kind, 2)
    x, weights = cloud(2)
    Q = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(7), dtype=torch.float64)).Q
    heads = [even_head(Q @ head.V @ Q.mT) for head in layer.heads]
    p = layer.perceptron
    turned = replace(layer, heads=heads, perceptron=None if p is None else Perceptron(Q @ p.W, p.U @ Q.mT, p.b))
    torch.testing.assert_close(moved(turned, x @ Q.mT, weights), moved(layer, x, weights) @ Q.mT, rtol=0, atol=1e-12)


@each_kind
def test_permutation_padding_and_batching(kind):
    layer = layer_of(kind, 3)
    x, weights = cloud(3, 2, 2)
    y = moved(layer, x, weights)
    order = torch.randperm(x.shape[-2], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        moved(layer, x[..., order, :], weights[..., order]), y[..., order, :], rtol=0, atol=1e-14
    )
    alone = moved(layer, x[1, 0], weights[1, 0])
    torch.testing.assert_close(alone, y[1, 0], rtol=0, atol=1e-14)
    padded = torch.cat([x, x[..., :3, :].flip(-1)], dim=-2)
    none = torch.cat([weights, torch.zeros_like(weights[..., :3])], dim=-1)
    torch.testing.assert_close(moved(layer, padded, none)[..., : x.shape[-2], :], y, rtol=0, atol=1e-14)


@each_kind
def test_float32_is_float64_rounded(kind):
    layer = layer_of(kind, 2)
    x, weights = cloud(2)
    y = moved(layer, x.float(), weights.float())
    assert y.dtype == torch.float32
    # One rounding of the start, amplified by a ramp of 1/0.01 at most, and one of the end.
    torch.testing.assert_close(y.double(), moved(layer, x, weights), rtol=0, atol=2e-5)


@each_kind
def test_tokens_stay_on_the_sphere(kind):
    x, weights = cloud(4, 3)
    layer = layer_of(kind, 4)
    for _ in range(10):
        x = moved(layer, x, weights)
    assert (x.norm(dim=-1) - 1).abs().max() < 1e-15


@each_kind
def test_gradient(kind):
    layer = layer_of(kind, 5)
    x, weights = cloud(5, n=6)
    x.requires_grad_()

    def on_sphere(y: torch.Tensor) -> torch.Tensor:
        return moved(layer, y / y.norm(dim=-1, keepdim=True), weights)

    assert torch.autograd.gradcheck(on_sphere, (x,), eps=1e-6, atol=1e-5, rtol=1e-4)


def test_second_derivative_under_a_gate_raises_instead_of_being_wrong():
    layer = Layer(perceptron=saturating_gate(torch.eye(3).double()[0], -0.9, 3.0, torch.eye(3).double()[1]))
    x, weights = cloud(0)
    y = moved(layer, x.requires_grad_(), weights)
    (first,) = torch.autograd.grad(y[:, 0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@each_kind
def test_no_exact_flow_while_learning(kind):
    layer = layer_of(kind, 0)
    x, weights = cloud(0)
    for _, tensor in layer.tensors():
        tensor.requires_grad_()
        assert exact_flow(layer, x, weights) is None
        assert not has_exact_flow(layer)
        tensor.requires_grad_(False)


def test_every_kind_in_the_table_is_tested():
    found = {name for kind in KINDS for name in [_name(layer_of(kind, 0))]}
    assert found == set(EXACT_FLOWS)


def _name(layer: Layer) -> str:
    return next(name for name, find in EXACT_FLOWS.items() if find(layer) is not None)


def test_layers_without_exact_flow():
    x, weights = cloud(0)
    eye = torch.eye(DIM, dtype=torch.float64)
    gate = saturating_gate(eye[0], 0.0, 0.1, eye[1])
    for layer in (
        Layer([Head(eye, eye)]),
        Layer([even_head(eye)], gate),
        Layer(perceptron=replace(gate, activation="tanh")),
        Layer(perceptron=Perceptron(gate.W, gate.U * torch.tensor([[0.0], [1.0]]), gate.b + 1)),
    ):
        assert not has_exact_flow(layer)
        assert exact_flow(layer, x, weights) is None


# Gates


def test_closed_gate_is_the_identity_bit_for_bit():
    z, w = torch.eye(DIM, dtype=torch.float64)[:2]
    layer = Layer(perceptron=saturating_gate(z, 0.0, 0.2, w), duration=3.0)
    x, weights = cloud(0, 3)
    y = moved(layer, x, weights)
    closed = x @ z <= 0
    assert closed.any()
    assert torch.equal(y[closed], x[closed])
    assert not (y[~closed] == x[~closed]).all(-1).any()


def test_self_centred_gate_against_its_printed_time():
    """t = [ln(u - c)/(1 - c²) - ln(1 - u)/(2(1 - c)) - ln(1 + u)/(2(1 + c))] from <x, z> to u (arXiv 2411.04551)."""
    z = torch.eye(DIM, dtype=torch.float64)[0]
    c = math.cos(0.8)
    layer = Layer(perceptron=Perceptron(z[:, None], z[None], z.new_tensor([-c])), duration=2.0)
    x = sphere.exp(z.expand(20, 3), torch.linspace(0.02, 0.78, 20).double()[:, None] * torch.eye(3).double()[1])

    def clock(u: torch.Tensor) -> torch.Tensor:
        logs = torch.log(u - c) / (1 - c**2), torch.log(1 - u) / (2 * (1 - c)), torch.log(1 + u) / (2 * (1 + c))
        return logs[0] - logs[1] - logs[2]

    y = moved(layer, x, torch.full((20,), 0.05, dtype=torch.float64))
    # 1 - u loses 1/(1 - u) = 5e3 roundings at the token nearest to z.
    torch.testing.assert_close(clock(y @ z) - clock(x @ z), torch.full((20,), 2.0).double(), rtol=0, atol=1e-10)


def test_poles_and_great_circles():
    z, w = torch.tensor([[0.6, 0.8, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    layer = Layer(perceptron=saturating_gate(z, -0.9, 0.5, w), duration=2.0)
    x, _ = cloud(3)
    x = torch.cat([x, torch.stack([w, -w])])
    y = moved(layer, x, torch.full((27,), 1 / 27, dtype=torch.float64))
    assert torch.equal(y[-2:], x[-2:])
    assert torch.linalg.det(torch.stack([x, y, w.expand_as(x)], dim=-2)).abs().max() < 1e-15
    assert (y @ w >= x @ w).all()


def test_very_long_and_very_narrow_gates():
    z, w = torch.eye(DIM, dtype=torch.float64)[:2]
    x, weights = cloud(6)
    y = moved(Layer(perceptron=saturating_gate(z, 0.1, 1e-6, w), duration=1e4), x, weights)
    seen = x @ z > 0.1
    assert torch.equal(y[~seen], x[~seen])
    # They drift towards w, which the gate does not see, and come to rest on its edge.
    assert (y[seen] @ z - 0.1).abs().max() < 1e-12


def test_gates_that_no_token_shares_flow_side_by_side():
    eye = torch.eye(DIM, dtype=torch.float64)
    parts = [saturating_gate(z, 0.8, 0.05, w) for z, w in ((eye[0], eye[0]), (eye[1], -eye[1]), (eye[2], eye[2]))]
    both = Perceptron(*(torch.cat([getattr(p, n) for p in parts], dim) for n, dim in (("W", 1), ("U", 0), ("b", 0))))
    assert len(find_gates(both)) == 3
    x, weights = cloud(0, 4)
    y = x
    for part in parts:
        y = moved(Layer(perceptron=part, duration=0.3), y, weights)
    together = moved(Layer(perceptron=both, duration=0.3), x, weights)
    torch.testing.assert_close(together, y, rtol=0, atol=1e-15)
    assert not torch.equal(y, x)


def test_token_that_meets_two_gates_has_no_exact_flow():
    eye = torch.eye(DIM, dtype=torch.float64)
    first = saturating_gate(eye[0], 0.5, 0.1, eye[1])
    second = saturating_gate(eye[1], 0.5, 0.1, eye[2])
    both = Perceptron(
        *(torch.cat([getattr(p, n) for p in (first, second)], k) for n, k in (("W", 1), ("U", 0), ("b", 0)))
    )
    layer = Layer(perceptron=both, duration=0.2)
    one = torch.ones(1, dtype=torch.float64)
    start = sphere.project(torch.tensor([[1.0, 0.1, 0.1]], dtype=torch.float64))
    assert has_exact_flow(layer)
    assert exact_flow(layer, start, one) is not None
    # Given longer it drifts into the second gate.
    assert exact_flow(layer, start, one, 2.0) is None
    assert exact_flow(layer, sphere.project(torch.tensor([[1.0, 1.0, 0.0]]).double()), one) is None


def ramp_cases() -> list[tuple[float, ...]]:
    """(A, B, p, q, u, move): rest points behind, ahead, double, complex and at the poles, and none."""
    return [
        (0.3, 0.5, -0.2, 2.0, -0.5, 0.7),
        (0.3, 0.5, 0.2, -0.1, -2.0, 4.0),
        (0.4, 0.3, -0.5 * 20, 20.0, 0.9, 1e-3 - 1e-3),  # |z projected| = threshold: a double rest point, no move
        (0.4, 0.3, -0.49 * 20, 20.0, 0.9, 0.2),
        (0.4, 0.3, -0.51 * 20, 20.0, 0.9, -0.5),
        (0.5, 0.0, -0.5 * 3, 3.0, 0.2, -0.6),  # the rest point is w itself
        (0.5, 0.2, 0.5 * 3, 3.0, 0.2, 0.6),  # and -w
        (0.0, 0.0, 0.7, 3.0, 0.2, 0.6),  # z across the circle
        (1e-14, 0.6, -0.3, 1.0, 0.1, 0.4),
        (1.0, 0.0, -0.995 * 200, 200.0, 3.1, 0.4),
        (0.2, 0.7, -0.3, 50.0, -0.7, 1.9),
    ]


@pytest.mark.parametrize("case", ramp_cases())
def test_travel_time_is_the_integral_of_one_over_the_rate(case):
    A, B, p, q, u, move = map(mpmath.mpf, case)
    expected = mpmath.quad(
        lambda v: 1 / (p + q * (A * mpmath.tanh(v) + B * mpmath.sech(v))), mpmath.linspace(u, u + move, 9)
    )
    A, B, p, q, u, move = (torch.tensor([v], dtype=torch.float64) for v in case)
    ramp = Ramp(u, p, q, A, B)
    time = travel_time(ramp, move)
    assert float(time) == pytest.approx(float(expected), rel=1e-12)
    back = travel(ramp, time, torch.full_like(time, torch.inf))
    torch.testing.assert_close(back, move, rtol=1e-12, atol=1e-15)


def test_travel_never_passes_a_rest_point():
    generator = torch.Generator().manual_seed(0)
    A, B, tau, u = 2 * torch.rand(4, 500, generator=generator, dtype=torch.float64) - 1
    q = 10 ** (3 * torch.rand(500, generator=generator, dtype=torch.float64))
    ramp = Ramp(2 * u, -tau * q, q, A, B)
    before = ramp.rate(ramp.u)
    for time in (1e-3, 1.0, 1e3):
        move = travel(ramp, torch.full_like(u, time), torch.full_like(u, torch.inf))
        after = ramp.rate(ramp.u + move)
        assert (after * before.sign() > -1e-11 * q).all()
        assert (move * before.sign() >= 0).all()
        assert move.isfinite().all()
    assert height(A, B, ramp.u).isfinite().all()


# Even attention


def test_two_tokens_at_a_right_angle_follow_tanh():
    """n = 2, B = 0: the cosine r of the angle between them obeys r = tanh t from r(0) = 0 (token dynamics)."""
    x = torch.eye(2, dtype=torch.float64)
    layer = Layer([even_head(torch.eye(2, dtype=torch.float64))], duration=1.7)
    y = moved(layer, x, torch.full((2,), 0.5, dtype=torch.float64))
    assert float(y[0] @ y[1]) == pytest.approx(math.tanh(1.7), abs=1e-15)


def test_cross_ratios_are_conserved():
    """Möbius maps of the sphere keep |x1 - x2| |x3 - x4| / (|x1 - x3| |x2 - x4|)."""
    x, weights = cloud(1, 3)
    layer = replace(layer_of("any V and a drift", 1), duration=3.0)

    def ratio(y: torch.Tensor) -> torch.Tensor:
        a, b, c, d = y[..., 0:4, :], y[..., 4:8, :], y[..., 8:12, :], y[..., 12:16, :]
        return (a - b).norm(dim=-1) * (c - d).norm(dim=-1) / ((a - c).norm(dim=-1) * (b - d).norm(dim=-1))

    y = moved(layer, x, weights)
    nearest = torch.cdist(y, y).add(torch.eye(25).double()).min()
    # Distances between tokens that have come near each other carry rounding 1e-16 / nearest.
    torch.testing.assert_close(ratio(y), ratio(x), rtol=float(8e-15 / nearest), atol=0)


def test_contraction_by_a_thousand_is_undone():
    generator = torch.Generator().manual_seed(0)
    shift = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    x = sphere.project(sphere.uniform(6, 86, 3, generator=generator) + shift)
    weights = torch.full((6, 86), 1 / 86, dtype=torch.float64)
    layer = replace(layer_of("identity", 0), duration=0.25)
    y = x
    for _ in range(32):
        y = moved(layer, y, weights)
    assert (y - y.mean(-2, keepdim=True)).norm(dim=-1).max() < 1e-3
    for _ in range(32):
        y = moved(layer.inverse(), y, weights)
    # 64 layers, one rounding each, times the contraction.
    torch.testing.assert_close(y, x, rtol=0, atol=1e-12)


def test_rank_one_two_ways():
    """The scalar equation against the Lorentz group, which knows nothing of the axis."""
    axis = sphere.uniform(3, generator=torch.Generator().manual_seed(2))
    layer = Layer([even_head(torch.outer(axis, axis))], duration=4.0)
    nudged = Layer([even_head(torch.outer(axis, axis)), even_head(torch.zeros(3, 3).double())], duration=4.0)
    assert (_name(layer), _name(nudged)) == ("even attention of rank one", "even attention")
    x, weights = cloud(2, 3)
    x[0, 0], x[1, 0] = axis, -axis
    # The frozen measure is a saddle: rounding grows like e^4.
    torch.testing.assert_close(moved(layer, x, weights), moved(nudged, x, weights), rtol=0, atol=1e-13)


def test_measure_without_mean_rests():
    x = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    y = moved(replace(layer_of("identity", 0), duration=0.25), x, torch.full((6,), 1 / 6, dtype=torch.float64))
    torch.testing.assert_close(y, x, rtol=0, atol=1e-15)


def test_long_drift_does_not_underflow():
    x, weights = cloud(0)
    w = torch.tensor([0.0, 0.6, 0.8], dtype=torch.float64)
    y = moved(Layer(perceptron=constant_drift(1e3 * w)), x, weights)
    torch.testing.assert_close(y, w.expand_as(y), rtol=0, atol=1e-15)

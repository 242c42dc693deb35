"""Each kernel against its formula written out, and what holds for every kernel of the table."""

import math

import numpy as np
import ot
import pytest
import torch
from problems import random_measures
from scipy.special import expit, ive

from measureflow import sphere
from measureflow.attention import KERNELS, attend, get_kernel
from measureflow.attention.kernels import Sigmoid, Sinkhorn
from measureflow.errors import NotConvergedError
from measureflow.transformer import Head

every_kernel = pytest.mark.parametrize("kernel", list(KERNELS))
# Sinkhorn's limit is reached to 1e-9 in column mass; all others are off by a few roundings of sums of 20 terms.
TOLERANCE = dict.fromkeys(KERNELS, 1e-13) | {"sinkhorn": 1e-7}


def problem(*batch: int, n: int = 6, m: int = 9, d: int = 3, seed: int = 0):
    """Queries with weights, keys with weights, and a general B."""
    queries, keys = random_measures(*batch, n=n, d=d, seed=seed), random_measures(*batch, n=m, d=d, seed=seed + 1)
    B = 2 * torch.randn(d, d, generator=torch.Generator().manual_seed(seed + 2), dtype=torch.float64)
    return queries.points, queries.weights, keys.points, keys.weights, B


def written_out(kernel: str, x: np.ndarray, y: np.ndarray, w: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Attention of one query by its formula, term by term."""
    s = np.array([x @ B.T @ key for key in y])
    match kernel:
        case "softmax":
            p = w * np.exp(s) / (w * np.exp(s)).sum()
        case "unnormalised":
            p = w * np.exp(s)
        case "sigmoid":
            p = w * expit(s)
        case "linear":
            p = w * s
        case "hardmax":
            p = np.eye(len(w))[s.argmax()]
    return sum(p_j * key for p_j, key in zip(p, y, strict=True))


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "sinkhorn"])
def test_each_kernel_is_its_formula(kernel):
    x, _, y, w, B = problem()
    expected = np.stack([written_out(kernel, row, y.numpy(), w.numpy(), B.numpy()) for row in x.numpy()])
    np.testing.assert_allclose(attend(x, y, w, B, kernel).numpy(), expected, atol=1e-13)


def test_sinkhorn_is_the_plan_of_entropic_transport():
    x, q, y, w, B = problem()
    # Transport with cost -s and regulariser 1 has the plan q_i p_ij.
    plan = ot.sinkhorn(q.numpy(), w.numpy(), -(x @ B.mT @ y.mT).numpy(), 1.0, stopThr=1e-13, numItermax=100_000)
    expected = (plan / q.numpy()[:, None]) @ y.numpy()
    np.testing.assert_allclose(attend(x, y, w, B, "sinkhorn", query_weights=q).numpy(), expected, atol=1e-8)


def test_sinkhorn_conserves_the_mean():
    # Σ_i q_i Σ_j p_ij y_j = Σ_j w_j y_j: every key is attended to by its share.
    x, q, y, w, B = problem(4)
    attended = attend(x, y, w, B, "sinkhorn", query_weights=q)
    assert torch.allclose((q.unsqueeze(-1) * attended).sum(-2), (w.unsqueeze(-1) * y).sum(-2), atol=2e-9)
    softmax = attend(x, y, w, B)
    assert float(((q.unsqueeze(-1) * softmax).sum(-2) - (w.unsqueeze(-1) * y).sum(-2)).abs().max()) > 1e-2


def test_sinkhorn_of_one_iteration_is_softmax_and_many_are_the_limit():
    x, q, y, w, B = problem(2)
    once = attend(x, y, w, B, Sinkhorn(iterations=1), query_weights=q)
    assert torch.allclose(once, attend(x, y, w, B), atol=1e-14)
    limit = attend(x, y, w, B, "sinkhorn", query_weights=q)
    many = attend(x, y, w, B, Sinkhorn(iterations=2000), query_weights=q)
    assert torch.allclose(many, limit, atol=1e-8)
    assert not torch.allclose(once, limit, atol=1e-2)


def test_an_even_number_of_iterations_leaves_the_columns_right():
    x, q, y, w, B = problem()
    # With keys the unit vectors, attention is the matrix p itself.
    m = y.shape[0]
    eye = torch.eye(m, dtype=torch.float64)
    queries = torch.nn.functional.pad(x, (0, m - 3))
    scores = torch.zeros(m, m, dtype=torch.float64)
    scores[:, :3] = y @ B
    for iterations, rows_right in ((2, False), (3, True), (4, False)):
        p = attend(queries, eye, w, scores, Sinkhorn(iterations=iterations), query_weights=q)
        assert torch.allclose(p.sum(-1), torch.ones(6, dtype=torch.float64), atol=1e-13) is rows_right
        assert torch.allclose(q @ p, w, atol=1e-13) is not rows_right


@pytest.mark.parametrize("beta", [20.0, 80.0])
def test_sinkhorn_reaches_the_limit_where_alternation_is_slow(beta):
    x, y = sphere.uniform(2, 4, 3, generator=torch.Generator().manual_seed(0))
    w, scores = torch.full((4,), 0.25, dtype=torch.float64), beta * x @ y.mT
    # With keys the unit vectors, attention is the matrix p itself: alone in having these sums and this form.
    p = attend(torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64), w, scores.mT, "sinkhorn")
    assert torch.allclose(p.sum(0), 4 * w, atol=4e-9)
    assert torch.allclose(p.sum(1), 4 * w, atol=4e-9)
    form = torch.log(p) - scores
    assert torch.allclose(form + form[0, 0], form[:, :1] + form[:1], atol=1e-10)


def test_sinkhorn_that_cannot_converge_says_so():
    x, y = sphere.uniform(2, 12, 3, generator=torch.Generator().manual_seed(0))
    w, B = torch.full((12,), 1 / 12, dtype=torch.float64), 300 * torch.eye(3, dtype=torch.float64)
    with pytest.raises(NotConvergedError, match=r"after 10000 normalisations.*raise the tolerance"):
        attend(x, y, w, B, "sinkhorn")
    looser = attend(x, y, w, B, Sinkhorn(tolerance=1e-3))
    assert torch.allclose(looser.mean(0), y.mean(0), atol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 30.0, 1e4])
def test_softmax_is_a_mixture_posterior_up_to_the_largest_concentrations(beta, generator):
    # dynamics of tokens: weights are P(component j | x) of von Mises-Fisher densities with concentration beta around
    # the keys; the output is the posterior mean of the component's direction. With their constants, in logarithms.
    keys = random_measures(n=5, d=3, seed=6)
    x = sphere.uniform(7, 3, generator=generator)
    log_constant = -math.log(4 * math.pi) + (math.log(beta / -math.expm1(-2 * beta)) + math.log(2) if beta else 0.0)
    log_density = log_constant + beta * (x.numpy() @ keys.points.numpy().T - 1)
    joint = log_density + np.log(keys.weights.numpy())
    posterior = np.exp(joint - np.logaddexp.reduce(joint, axis=1, keepdims=True))
    attended = attend(x, keys.points, keys.weights, beta * torch.eye(3, dtype=torch.float64))
    # Scores of size beta carry beta roundings.
    np.testing.assert_allclose(attended.numpy(), posterior @ keys.points.numpy(), atol=1e-14 + 4e-16 * beta)


def test_vmf_constant_used_above_is_the_general_one():
    beta = 30.0
    general = beta**0.5 / ((2 * math.pi) ** 1.5 * ive(0.5, beta))  # of e^{beta (<m, x> - 1)}
    assert general == pytest.approx(2 * beta / -math.expm1(-2 * beta) / (4 * math.pi), rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_at_1e4_neither_overflows_nor_loses_the_keys(dtype):
    x, _, y, w, _ = problem(n=9)
    attended = attend(y.to(dtype), y.to(dtype), w.to(dtype), 1e4 * torch.eye(3, dtype=dtype))
    # Keys are at least 0.1 apart, so that a key sees itself and e^{-50} of others.
    assert torch.allclose(attended, y.to(dtype), atol=4 * torch.finfo(dtype).eps)
    assert torch.isfinite(attend(x, y, w, -1e4 * torch.eye(3, dtype=torch.float64))).all()


def test_hardmax_is_the_limit_of_sharp_softmax_and_shares_ties():
    x, _, y, w, B = problem()
    assert torch.allclose(attend(x, y, w, B, "hardmax"), attend(x, y, w, 1e5 * B), atol=1e-12)
    # A query on the bisector of two keys: their weighted mean, though the scores differ by a rounding.
    pair = torch.tensor([[0.6, 0.8, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    up = torch.tensor([[1.0, 1.0 + 2e-16, 0.0]], dtype=torch.float64)
    weights = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    expected = (0.1 * pair[:1] + 0.3 * pair[1:2]) / 0.4
    assert torch.allclose(attend(up, pair, weights, torch.eye(3, dtype=torch.float64), "hardmax"), expected, atol=1e-15)


def test_sigmoid_bias():
    x, _, y, w, B = problem()
    biased = attend(x, y, w, B, Sigmoid(bias=-3.0))
    expected = torch.einsum("ij,j,jd->id", torch.sigmoid(x @ B.mT @ y.mT - 3.0), w, y)
    assert torch.allclose(biased, expected, atol=1e-14)


# What holds for every kernel


@every_kernel
def test_rotation(kernel):
    x, q, y, w, B = problem(2)
    Q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)).Q
    turned = attend(x @ Q.mT, y @ Q.mT, w, Q @ B @ Q.mT, kernel, query_weights=q)
    assert torch.allclose(turned, attend(x, y, w, B, kernel, query_weights=q) @ Q.mT, atol=TOLERANCE[kernel])


@every_kernel
def test_permutation(kernel):
    x, q, y, w, B = problem(2)
    rows, columns = torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([8, 3, 1, 5, 0, 7, 2, 4, 6])
    moved = attend(x[:, rows], y[:, columns], w[:, columns], B, kernel, query_weights=q[:, rows])
    assert torch.allclose(moved, attend(x, y, w, B, kernel, query_weights=q)[:, rows], atol=TOLERANCE[kernel])


@every_kernel
def test_replication_of_atoms(kernel):
    x, q, y, w, B = problem(2)
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    y3 = y.repeat(1, 3, 1)
    w3 = (shares[:, None] * w[:, None]).reshape(2, -1)
    x2, q2 = x.repeat_interleave(2, dim=1), q.repeat_interleave(2, dim=1) / 2
    replicated = attend(x2, y3, w3, B, kernel, query_weights=q2)
    expected = attend(x, y, w, B, kernel, query_weights=q).repeat_interleave(2, dim=1)
    assert torch.allclose(replicated, expected, atol=TOLERANCE[kernel])


@every_kernel
@pytest.mark.parametrize("filling", [float("nan"), 1e10, -float("inf")])
def test_p11_padding_never_touches_a_result(kernel, filling):
    x, q, y, w, B = problem(2)

    def padded(value: float, with_gradient: bool):
        leaves = [torch.cat([x, x[:, :2]], 1), torch.cat([y, y[:, :3]], 1), B.clone()]
        leaves[0][:, 6:], leaves[1][:, 9:] = value, value
        weights = [torch.nn.functional.pad(q, (0, 2)), torch.nn.functional.pad(w, (0, 3))]
        leaves = [t.requires_grad_(with_gradient) for t in [*leaves, *weights]]
        out = attend(leaves[0], leaves[1], leaves[4], leaves[2], kernel, query_weights=leaves[3])[:, :6]
        return out, torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) if with_gradient else ()

    out, gradients = padded(filling, with_gradient=True)
    reference, expected = padded(0.25, with_gradient=True)
    assert torch.equal(out, reference)
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient is None or bool(gradient.isfinite().all())
        assert (gradient is None and other is None) or torch.equal(gradient, other)
    # Filled or not, padding is as good as absent; shorter sums round otherwise.
    absent = attend(x, y, w, B, kernel, query_weights=q)
    assert torch.allclose(padded(filling, with_gradient=False)[0], absent, atol=TOLERANCE[kernel])


@every_kernel
def test_batching(kernel):
    x, q, y, w, B = problem(2, 3)
    together = attend(x, y, w, B, kernel, query_weights=q)
    for i in range(2):
        for j in range(3):
            alone = attend(x[i, j], y[i, j], w[i, j], B, kernel, query_weights=q[i, j])
            assert torch.allclose(together[i, j], alone, atol=TOLERANCE[kernel])


@every_kernel
def test_dtype_and_device_follow(kernel):
    x, q, y, w, B = problem(2)
    single = attend(*(t.float() for t in (x, y, w, B)), kernel, query_weights=q.float())
    assert single.dtype == torch.float32
    assert single.device == x.device
    # Roundings of float32 in scores of size 5, amplified by e^5 where nothing divides by it; Sinkhorn stops at 3e-5.
    double = attend(x, y, w, B, kernel, query_weights=q)
    assert torch.allclose(single.double(), double, atol=2e-4 if kernel == "sinkhorn" else 2e-5, rtol=2e-5)


@every_kernel
def test_a_head_uses_it(kernel):
    mu = random_measures(3, n=7, d=3, seed=4)
    V = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    velocity = Head(V, 2 * V, kernel).velocity(mu.points, mu.weights)
    attended = attend(mu.points, mu.points.clone(), mu.weights.clone(), 2 * V, kernel, query_weights=mu.weights)
    assert torch.allclose(velocity, attended @ V.mT, atol=1e-14)


def test_get_kernel():
    for name, kind in KERNELS.items():
        assert get_kernel(name) == kind()
    assert get_kernel(Sigmoid(0.5)) == Sigmoid(0.5)


@pytest.mark.bad_input
def test_unknown_kernel_and_settings_are_named():
    with pytest.raises(ValueError, match=r"kernel: expected one of softmax, unnormalised, .*, got 'sofmax'"):
        get_kernel("sofmax")
    with pytest.raises(ValueError, match="iterations: expected at least 1, or None for the limit, got 0"):
        Sinkhorn(iterations=0)
    with pytest.raises(ValueError, match="tolerance: expected a positive number, got 0"):
        Sinkhorn(tolerance=0.0)

"""Blocks and gradients of attention: every way to evaluate it agrees, in values and derivatives; and its errors."""

import pytest
import torch
from problems import random_measures
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from measureflow import sphere
from measureflow.attention import KERNELS, attend
from measureflow.attention.kernels import Sinkhorn
from measureflow.transformer import Head

# Derivatives are checked by differences of 1e-6, which see an error of 1e-9 in the limit as 1e-3.
SHARP = {name: Sinkhorn(tolerance=1e-14) if name == "sinkhorn" else name for name in KERNELS}
every_kernel = pytest.mark.parametrize("kernel", list(KERNELS))


def leaves(*batch: int, n: int = 4, m: int = 5, d: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64):
    """Queries, keys, key weights, B and query weights that ask for gradients."""
    x, y = random_measures(*batch, n=n, d=d, seed=seed), random_measures(*batch, n=m, d=d, seed=seed + 1)
    B = torch.randn(d, d, generator=torch.Generator().manual_seed(seed + 2), dtype=torch.float64)
    return [t.to(dtype).requires_grad_() for t in (x.points, y.points, y.weights, B, x.weights)]


def attended(kernel, budget=None):
    return lambda x, y, w, B, q: attend(x, y, w, B, kernel, query_weights=q, budget=budget)


def naive_softmax(x, y, w, B, _):
    grown = torch.exp(torch.einsum("...id,ed,...je->...ij", x, B, y)) * w.unsqueeze(-2)
    return (grown / grown.sum(-1, keepdim=True)) @ y


def torch_attention(x, y, w, B, _):
    mask = torch.log(w).unsqueeze(-2).expand(*w.shape[:-1], x.shape[-2], w.shape[-1])
    return torch.nn.functional.scaled_dot_product_attention(x @ B.mT, y, y, attn_mask=mask, scale=1.0)


def value_and_gradients(function, arguments):
    out = function(*arguments)
    toward = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape).cos()
    return [out.detach(), *torch.autograd.grad((out * toward).sum(), arguments, allow_unused=True)]


def assert_agree(found, expected, rtol):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert float((a - b).abs().max()) <= rtol * (1 + float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", [None, 700, 29])
@pytest.mark.parametrize("other", [naive_softmax, torch_attention])
def test_p13_softmax_agrees_with_dense_and_fused_attention_in_gradients_too(other, budget, dtype):
    arguments = leaves(3, n=17, m=29, d=5, dtype=dtype)
    reference = value_and_gradients(other, [a.detach().double().requires_grad_() for a in arguments])
    # Gradients of 29 weights near 1/29 divide by them: a few hundred roundings.
    found = value_and_gradients(attended("softmax", budget), arguments)
    assert_agree([None if t is None else t.double() for t in found], reference, 500 * torch.finfo(dtype).eps)


@every_kernel
@pytest.mark.parametrize("budget", [1, 9, 60, 100])
def test_p13_blocks_agree_with_one_dense_evaluation(kernel, budget):
    arguments = leaves(2, 3, n=7, m=9)
    if not KERNELS[kernel].by_row:
        budget = max(budget, 63)  # all scores of a measure at once
    blocked = value_and_gradients(attended(SHARP[kernel], budget), arguments)
    dense = value_and_gradients(attended(SHARP[kernel]), arguments)
    assert_agree(blocked, dense, 1e-11 if kernel == "sinkhorn" else 1e-14)


@every_kernel
@pytest.mark.parametrize("budget", [None, 6, 21])
def test_derivatives_are_those_of_the_values(kernel, budget):
    if budget is not None and not KERNELS[kernel].by_row:
        budget = 20
    assert gradcheck(attended(SHARP[kernel], budget), leaves(2))
    assert gradcheck(attended(SHARP[kernel], budget), leaves())


@every_kernel
@pytest.mark.parametrize("budget", [None, 6])
def test_second_derivatives_are_right(kernel, budget):
    if kernel == "hardmax":
        x, y, w, _, _ = leaves()  # queries and B are cut off from its gradients
        B = torch.eye(3, dtype=torch.float64)
        assert gradgradcheck(lambda y, w: attend(x.detach(), y, w, B, kernel, budget=budget), [y, w])
        return
    budget = budget if KERNELS[kernel].by_row else None
    assert gradgradcheck(attended(SHARP[kernel], budget), leaves(n=3, m=4))


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_derivatives_of_few_sinkhorn_iterations(iterations):
    assert gradcheck(attended(Sinkhorn(iterations=iterations)), leaves(2))


def test_sinkhorn_gradients_through_the_limit_are_those_of_many_iterations():
    arguments = leaves(n=6, m=5)
    unrolled = value_and_gradients(attended(Sinkhorn(iterations=401)), arguments)
    assert_agree(value_and_gradients(attended("sinkhorn"), arguments), unrolled, 1e-7)


@every_kernel
def test_gradients_keep_away_from_padding_and_are_finite_beside_it(kernel):
    x, y, w, B, q = leaves(2)
    with torch.no_grad():
        w[0, 3:], q[1, 2:] = 0, 0
    _, dx, dy, dw, _, dq = value_and_gradients(attended(kernel), [x, y, w, B, q])
    assert bool((dy[0, 3:] == 0).all())
    assert bool((dw[0, 3:] == 0).all())
    assert dx is None or bool((dx[1, 2:] == 0).all())
    assert dq is None or bool((dq[1, 2:] == 0).all())
    assert all(bool(t.isfinite().all()) for t in (dx, dy, dw, dq) if t is not None)


@pytest.mark.parametrize("kernel", [name for name, kind in KERNELS.items() if kind.by_row and name != "hardmax"])
def test_queries_and_keys_that_are_one_tensor_get_the_sum_of_both_gradients(kernel):
    x, _, _, B, q = leaves(2)
    V = torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        q[0, 3] = 0
    (joint,) = torch.autograd.grad(Head(V, B, kernel).velocity(x, q).square().sum(), x)
    y = x.detach().clone().requires_grad_()
    parts = torch.autograd.grad(attend(x, y, q, B, kernel, query_weights=q).square().sum(), (x, y))
    assert torch.allclose(joint, sum(parts), atol=1e-14)


class Largest(TorchDispatchMode):
    """Number of entries of the largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.entries = max(self.entries, t.numel())
        return out


@every_kernel
@pytest.mark.parametrize("budget", [1000, 9000])
def test_no_array_is_larger_than_the_budget_forward_or_backward(kernel, budget):
    if not KERNELS[kernel].by_row:
        budget = max(budget, 90 * 80)
    arguments = leaves(4, n=90, m=80)
    with Largest() as seen:
        value_and_gradients(attended(kernel, budget), arguments)
    # The tokens themselves are 4 x 90 x 3.
    assert max(budget // 2, 1080) <= seen.entries <= max(budget, 1080)
    with Largest() as dense:
        value_and_gradients(attended(kernel), arguments)
    assert dense.entries == 4 * 90 * 80


def test_blocks_need_no_gradients_to_be_asked_for():
    arguments = [a.detach() for a in leaves(2, n=9, m=8)]
    with torch.no_grad():
        assert torch.allclose(attended("softmax", 16)(*arguments), attended("softmax")(*arguments), atol=1e-15)


@every_kernel
@pytest.mark.bad_input
def test_p12_a_measure_without_keys_is_named(kernel):
    x, y, w, B, q = leaves(2, 3)
    empty = w.detach().clone()
    empty[1, 2] = 0
    with pytest.raises(ValueError, match="measure 1, 2: no key of positive weight is left"):
        attend(x, y, empty, B, kernel)
    with pytest.raises(ValueError, match="the measure: no key of positive weight is left"):
        attend(x[0, 0], y[0, 0], 0 * w[0, 0], B, kernel)
    with pytest.raises(ValueError, match="measure 0, 1: no query of positive weight is left"):
        attend(x, y, w, B, kernel, query_weights=q * torch.tensor([1.0, 0.0, 1.0]).unsqueeze(-1))
    with pytest.raises(ValueError, match="no key of positive weight is left"):
        attend(x, y[..., :0, :], w[..., :0], B, kernel)


@pytest.mark.bad_input
@pytest.mark.parametrize("weight", [-0.1, float("nan")])
def test_weights_that_are_negative_or_not_numbers_are_named(weight):
    x, y, w, B, _ = (a.detach() for a in leaves(2))
    w[1, 3] = weight
    with pytest.raises(ValueError, match=rf"measure 1, row 3: expected a key of weight at least 0, got {weight}"):
        attend(x, y, w, B)


@pytest.mark.bad_input
def test_arguments_that_do_not_fit_are_named():
    x, y, w, B, q = leaves(2)
    with pytest.raises(ValueError, match="method: expected one of auto, exact, got 'fast'"):
        attend(x, y, w, B, method="fast")
    with pytest.raises(ValueError, match="kernel: expected one of softmax"):
        attend(x, y, w, B, kernel="fast")
    with pytest.raises(
        ValueError, match=r"keys: expected shape \(2, 5, 3\) beside queries of \(2, 4, 3\), got \(5, 3\)"
    ):
        attend(x, y[0], w, B)
    with pytest.raises(ValueError, match=r"weights: expected shape \(2, 5\) .*, got \(2, 4\)"):
        attend(x, y, q, B)
    with pytest.raises(ValueError, match=r"B: expected shape \(3, 3\) .*, got \(2, 2\)"):
        attend(x, y, w, B[:2, :2])
    with pytest.raises(ValueError, match=r"query_weights: expected shape \(2, 4\) .*, got \(2, 5\)"):
        attend(x, y, w, B, query_weights=w)
    with pytest.raises(TypeError, match=r"B: expected torch.float64 as the queries have, got torch.float32"):
        attend(x, y, w, B.float())
    with pytest.raises(ValueError, match="budget: expected at least 1 score, got 0"):
        attend(x, y, w, B, budget=0)
    with pytest.raises(ValueError, match="Sinkhorn: needs all 4 x 5 scores of a measure at once, over budget=19"):
        attend(x, y, w, B, "sinkhorn", budget=19)


def test_large_measures_have_bounded_memory_and_the_right_mean():
    # Uniform points: attention to e^{beta <x, y>} is A(x) = (coth beta - 1/beta) x on S².
    n, beta = 20_000, 3.0
    g = torch.Generator().manual_seed(0)
    y = sphere.uniform(n // 2, 3, generator=g)
    y = torch.cat([y, -y])
    w = torch.full((n,), 1 / n, dtype=torch.float64)
    x = sphere.uniform(100, 3, generator=g)
    with Largest() as seen:
        found = attend(x, y, w, beta * torch.eye(3, dtype=torch.float64), budget=50_000)
    assert seen.entries <= 3 * n
    expected = (1 / torch.tanh(torch.tensor(beta)) - 1 / beta) * x
    # Sampling noise: about sqrt(e^{2 beta}-weighted variance / n) = 0.02 at four standard deviations.
    assert float((found - expected).abs().max()) < 0.03

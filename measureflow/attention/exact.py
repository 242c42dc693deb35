"""Exact attention, evaluated in blocks so that memory stays bounded, forward and backward."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from measureflow.attention.kernels import Kernel, get_kernel
from measureflow.errors import first_row

METHODS = ("auto", "exact")
CPU_BUDGET = 2**19
"""Scores held at a time on a CPU unless said otherwise: 4 MiB in float64, about a cache, where blocks are fastest."""
ACCELERATOR_BUDGET = 2**26
"""Scores held at a time on other devices, which want large blocks: 512 MiB in float64."""


def attend(
    queries: Float[Tensor, "*batch n d"],
    keys: Float[Tensor, "*batch m d"],
    weights: Float[Tensor, "*batch m"],
    B: Float[Tensor, "d d"],
    kernel: Kernel | str = "softmax",
    method: str = "auto",
    *,
    query_weights: Float[Tensor, "*batch n"] | None = None,
    budget: int | None = None,
) -> Float[Tensor, "*batch n d"]:
    r"""Attention of queries to a measure of keys: A_B[mu](x) = ∫ p(<B x, y>) y mu(dy).

    Softmax: A_B[mu](x) = ∫ e^{<Bx,y>} y mu(dy) / ∫ e^{<Bx,y>} mu(dy) (arXiv 2411.04551, equation (1.3)); other
    kernels as their docstrings say. Keys of weight 0 take no part in values or gradients, whatever they hold, and a
    query of weight 0 counts as the origin.

    Args:
        queries: x.
        keys, weights: the measure mu; weights at least 0.
        B: of the scores <B x, y>.
        kernel: a name of `KERNELS` or a Kernel.
        method: "exact", or "auto" for the fastest that is exact to rounding, which today is the same.
        query_weights: of the queries, for doubly stochastic kernels; None is uniform.
        budget: most scores to hold at a time, though at least those of one query; of such arrays a few exist at
            once. Larger problems are taken in blocks of queries and of measures, which are computed again in the
            backward pass. None is `CPU_BUDGET` or `ACCELERATOR_BUDGET`. Kernels that do not go by row need all
            scores of a measure at once.

    Raises:
        ValueError: a kernel or method has no such name; shapes do not fit; the budget is less than 1; a weight is
            negative or not a number; a measure has no key of positive weight; a kernel that does not go by row is
            over budget. The measure and row are named.
        TypeError: dtypes differ.

    >>> mu = torch.eye(2)
    >>> attend(mu, mu, torch.tensor([0.5, 0.5]), torch.zeros(2, 2))
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    kernel = get_kernel(kernel)
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if budget is not None and budget < 1:
        raise ValueError(f"budget: expected at least 1 score, got {budget}")
    _check(queries, keys, weights, B, query_weights)
    same = queries is keys and query_weights is weights
    keys, log_weights = _without_padding(keys, weights, "key")
    log_queries = None
    if same:
        queries, log_queries = keys, log_weights
    elif query_weights is not None:
        queries, log_queries = _without_padding(queries, query_weights, "query")
    arguments = [queries, keys, log_weights.unsqueeze(-2)]
    if not kernel.by_row and log_queries is not None:
        arguments.append(log_queries.unsqueeze(-1))

    def dense(x: Tensor, y: Tensor, log_w: Tensor, log_q: Tensor | None = None) -> Tensor:
        return kernel.probabilities(x @ B.mT @ y.mT, log_w, log_q) @ y

    n, m = queries.shape[-2], keys.shape[-2]
    if budget is None:
        budget = CPU_BUDGET if queries.device.type == "cpu" else ACCELERATOR_BUDGET
    if queries.shape[:-1].numel() * m <= budget:
        return dense(*arguments)
    if not kernel.by_row and n * m > budget:
        name = type(kernel).__name__
        raise ValueError(f"{name}: needs all {n} x {m} scores of a measure at once, over budget={budget}; raise it")
    rows = min(n, max(1, budget // m))
    together = max(1, budget // (rows * m))
    done = []
    for x, *rest in zip(*(a.flatten(0, -3).split(together) if a.ndim > 2 else [a] for a in arguments), strict=True):
        blocks = [
            checkpoint(dense, part, *rest, use_reentrant=False, preserve_rng_state=False)
            for part in x.split(rows, dim=-2)
        ]
        done.append(torch.cat(blocks, dim=-2))
    return torch.cat(done).reshape(queries.shape) if queries.ndim > 2 else done[0]


def _check(queries: Tensor, keys: Tensor, weights: Tensor, B: Tensor, query_weights: Tensor | None) -> None:
    *batch, n, d = queries.shape
    m = keys.shape[-2]
    expected = {"keys": (keys, (*batch, m, d)), "weights": (weights, (*batch, m)), "B": (B, (d, d))}
    if query_weights is not None:
        expected["query_weights"] = (query_weights, (*batch, n))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: expected shape {shape} beside queries of {tuple(queries.shape)}, got {tuple(tensor.shape)}"
            )
        if tensor.dtype != queries.dtype:
            raise TypeError(f"{name}: expected {queries.dtype} as the queries have, got {tensor.dtype}")


def _without_padding(points: Tensor, weights: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Points with padding at the origin, and log-weights that are -inf there, without a path for gradients."""
    present = weights.detach() > 0
    if bool(present.all()) and weights.shape[-1] > 0:
        return points, torch.log(weights)
    bad = ~(present | (weights.detach() == 0))
    if bool(bad.any()):
        raise ValueError(f"{first_row(bad)}: expected a {side} of weight at least 0, got {float(weights[bad][0])}")
    empty = ~present.any(-1)
    if bool(empty.any()):
        index = ", ".join(str(int(i)) for i in empty.nonzero()[0])
        raise ValueError(f"{f'measure {index}' if index else 'the measure'}: no {side} of positive weight is left")
    log_weights = torch.log(torch.where(present, weights, 1.0)).masked_fill(~present, -torch.inf)
    return torch.where(present.unsqueeze(-1), points, 0.0), log_weights

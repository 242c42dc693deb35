"""Exact attention, evaluated in blocks so that memory stays bounded, forward and backward."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from measureflow.attention.kernels import Kernel, get_kernel

METHODS = ("auto", "exact")
BUDGET = 2**25
"""Default number of scores held at a time: 256 MiB in float64."""


def attend(
    queries: Float[Tensor, "*batch n d"],
    keys: Float[Tensor, "*batch m d"],
    weights: Float[Tensor, "*batch m"],
    B: Float[Tensor, "d d"],
    kernel: Kernel | str = "softmax",
    method: str = "auto",
    *,
    query_weights: Float[Tensor, "*batch n"] | None = None,
    budget: int = BUDGET,
) -> Float[Tensor, "*batch n d"]:
    r"""Attention of queries to a measure of keys: A_B[mu](x) = ∫ p(<B x, y>) y mu(dy).

    Softmax: A_B[mu](x) = ∫ e^{<Bx,y>} y mu(dy) / ∫ e^{<Bx,y>} mu(dy) (arXiv 2411.04551, equation (1.3)); other
    kernels as their docstrings say. Keys of weight 0 take no part in values or gradients, whatever they hold.

    Args:
        queries: x.
        keys, weights: the measure mu; weights at least 0.
        B: of the scores <B x, y>.
        kernel: a name of `KERNELS` or a Kernel.
        method: "auto" or "exact".
        query_weights: of the queries, for doubly stochastic kernels; None is uniform.
        budget: most scores to hold at a time. Larger problems are taken in blocks of queries, which are computed
            again in the backward pass. Doubly stochastic kernels need all scores at once.

    Raises:
        ValueError: a kernel or method has no such name; a measure has no key of positive weight; a doubly
            stochastic kernel is over budget.

    >>> mu = torch.eye(2)
    >>> attend(mu, mu, torch.tensor([0.5, 0.5]), torch.zeros(2, 2))
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    kernel = get_kernel(kernel)
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    present = weights.detach() > 0
    if not bool(present.any(-1).all()):
        index = [int(i) for i in (~present.any(-1)).nonzero()[0]]
        where = f"measure {', '.join(map(str, index))}" if index else "the measure"
        raise ValueError(f"{where}: no key of positive weight is left to attend to")
    if not bool(present.all()):
        keys = torch.where(present.unsqueeze(-1), keys, 0.0)
    # log(0) has an infinite slope; padding gets its -inf as a constant.
    log_weights = torch.log(torch.where(present, weights, 1.0)).masked_fill(~present, -torch.inf).unsqueeze(-2)
    n = queries.shape[-2]
    if query_weights is None:
        log_queries = torch.zeros_like(queries[..., :1]) - torch.log(queries.new_tensor(float(n)))
    else:
        real = query_weights.detach() > 0
        log_queries = torch.log(torch.where(real, query_weights, 1.0)).masked_fill(~real, -torch.inf).unsqueeze(-1)

    def block(x: Tensor, log_q: Tensor, keys: Tensor, log_weights: Tensor, B: Tensor) -> Tensor:
        return kernel.probabilities((x @ B.mT) @ keys.mT, log_weights, log_q) @ keys

    batch = queries.shape[:-2].numel()
    rows = max(1, budget // max(1, batch * keys.shape[-2]))
    if rows >= n:
        return block(queries, log_queries, keys, log_weights, B)
    if not kernel.by_row:
        raise ValueError(f"{type(kernel).__name__}: {batch * n * keys.shape[-2]} scores at once, over budget={budget}")
    parts = []
    for x, log_q in zip(queries.split(rows, dim=-2), log_queries.split(rows, dim=-2), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(block, x, log_q, keys, log_weights, B, use_reentrant=False))
        else:
            parts.append(block(x, log_q, keys, log_weights, B))
    return torch.cat(parts, dim=-2)

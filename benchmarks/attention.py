"""Attention in blocks against the dense matrix, forward and with gradients."""

import torch
from torch import Tensor

import measureflow as mf

from .fields import naive_attention
from .timing import Row, compare


def run(quick: bool) -> list[Row]:
    """Softmax attention of n tokens to themselves, d = 3, float64."""
    rows = []
    for n in (500, 1000) if quick else (1000, 4000, 8000):
        generator = torch.Generator().manual_seed(0)
        x = mf.sphere.uniform(n, 3, generator=generator).double()
        weights = torch.full((n,), 1 / n, dtype=torch.float64)
        B = 5 * torch.eye(3, dtype=torch.float64)

        def forward(attend, x=x, weights=weights, B=B) -> Tensor:
            return attend(x, x, weights, B)

        def gradient(attend, x=x, weights=weights, B=B) -> Tensor:
            leaf = x.clone().requires_grad_()
            attend(leaf, leaf, weights, B).square().sum().backward()
            return leaf.grad

        for what, work in (("values", forward), ("values and gradients", gradient)):
            rows.append(
                compare(
                    f"{what}, n = {n:,}",
                    ("attend", lambda work=work: work(mf.attention.attend)),
                    ("dense matrix", lambda work=work: work(naive_attention)),
                    tolerance=1e-10,
                )
            )
    return rows

"""Exact W2 against scipy's assignment on a cost matrix written by hand."""

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import measureflow as mf

from .timing import Row, compare


def scipy_w2(mu: mf.TokenMeasure, nu: mf.TokenMeasure) -> Tensor:
    """Geodesic W2 of measures of equally many equal atoms, one after another."""
    distances = []
    for x, y in zip(mu.points.numpy(), nu.points.numpy(), strict=True):
        cost = np.arccos(np.clip(x @ y.T, -1, 1)) ** 2
        distances.append(np.sqrt(cost[linear_sum_assignment(cost)].mean()))
    return torch.tensor(np.array(distances))


def run(quick: bool) -> list[Row]:
    """Uniform against uniform on the sphere, d = 3, float64."""
    rows = []
    for batch, n in ((8, 50), (1, 200)) if quick else ((64, 100), (1, 500), (1, 1000), (1, 2000)):
        generator = torch.Generator().manual_seed(0)
        mu, nu = (mf.TokenMeasure(mf.sphere.uniform(batch, n, 3, generator=generator).double()) for _ in range(2))
        rows.append(
            compare(
                f"W2, {batch} pair{'s' if batch > 1 else ''} of {n:,} atoms",
                ("mf.transport.wasserstein", lambda mu=mu, nu=nu: mf.transport.wasserstein(mu, nu)),
                ("scipy assignment", lambda mu=mu, nu=nu: scipy_w2(mu, nu)),
                tolerance=1e-9,
            )
        )
    return rows

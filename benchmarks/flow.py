"""Flows against torchdiffeq on the dense field, to like accuracy."""

import torch
from torch import Tensor
from torchdiffeq import odeint

import measureflow as mf

from .fields import naive_velocity
from .timing import Row, compare


def torchdiffeq_flow(theta: mf.Transformer, measures: mf.TokenMeasure) -> Tensor:
    """Each layer by dopri8 at the tolerances of `mf.flow`, on the dense field, projected at the switches."""
    x = measures.points
    for layer in theta.layers:
        times = torch.tensor([0.0, layer.duration], dtype=x.dtype)

        def field(_: Tensor, y: Tensor, layer=layer) -> Tensor:
            return naive_velocity(layer, y, measures.weights)

        x = odeint(field, x, times, method="dopri8", rtol=1e-12, atol=1e-13)[-1]
        x = mf.sphere.project(x)
    return x


def run(quick: bool) -> list[Row]:
    """A constructed transformer, which has exact flows, and random layers, which have none."""
    rows = []
    for pairs, atoms in ((2, 8),) if quick else ((4, 16), (8, 32)):
        given = mf.datasets.clusters(pairs, atoms, 3, seed=0)
        theta = mf.construct(given, seed=0)
        # Within its steps the reference leaves the sphere, and undoing the gathering multiplies that; ours is at the
        # targets to 1e-9, as the certificate says.
        rows.append(
            _row(f"constructed, N = {pairs}, n = {atoms}, {len(theta.layers)} layers", theta, given.source, 1e-3)
        )
    generator = torch.Generator().manual_seed(0)
    for tokens in (64,) if quick else (64, 512):
        layers = [
            mf.Layer([mf.Head(*torch.randn(2, 3, 3, generator=generator, dtype=torch.float64).unbind())])
            for _ in range(4)
        ]
        points = mf.sphere.uniform(8, tokens, 3, generator=generator).double()
        theta = mf.Transformer(layers)
        rows.append(
            _row(
                f"random heads, N = 8, n = {tokens}, 4 layers", theta, mf.TokenMeasure(mf.sphere.project(points)), 1e-6
            )
        )
    return rows


def _row(problem: str, theta: mf.Transformer, measures: mf.TokenMeasure, tolerance: float) -> Row:
    return compare(
        problem,
        ("mf.push_forward", lambda: mf.push_forward(theta, measures).points),
        ("torchdiffeq dopri8", lambda: torchdiffeq_flow(theta, measures)),
        tolerance=tolerance,
    )

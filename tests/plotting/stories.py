"""Small trajectories to draw."""

import torch

from measureflow import sphere
from measureflow.flow import flow
from measureflow.measures import TokenMeasure
from measureflow.trajectory import FlowStats, Trajectory
from measureflow.transformer import Head, Layer, Transformer, constant_drift


def clusters(d: int, *, n_measures: int = 2, atoms: int = 6, times: int = 30, globe: bool = False) -> Trajectory:
    """Measures that cluster and then drift, from uniform tokens."""
    points = sphere.uniform(n_measures, atoms, d, generator=torch.Generator().manual_seed(0))
    eye = torch.eye(d, dtype=torch.float64)
    up = eye[-1]
    theta = Transformer(
        [
            Layer(heads=[Head(eye, 2 * eye)], duration=1.0, stage="cluster"),
            Layer(perceptron=constant_drift(up), duration=0.5, stage="drift"),
        ]
    )
    return flow(theta, TokenMeasure(points, globe=globe), times=times, solver="rk4", steps=8)


def at_rest(points: torch.Tensor, *, globe: bool = False) -> Trajectory:
    """A trajectory on which nothing moves."""
    stats = FlowStats("none", 0, 0, 0.0, 0.0)
    weights = torch.full(points.shape[:-1], 1 / points.shape[-2], dtype=points.dtype)
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return Trajectory(times, points.expand(2, *points.shape), weights, globe, (0.0, 1.0), ("rest",), stats)


def along_the_equator(longitudes: torch.Tensor, times: torch.Tensor) -> Trajectory:
    """One token at the given longitudes (degrees) at the given times."""
    points = sphere.from_lonlat(longitudes, torch.zeros_like(longitudes)).reshape(-1, 1, 3)
    stats = FlowStats("none", 0, 0, 0.0, 0.0)
    weights = torch.ones(1, dtype=points.dtype)
    ends = (float(times[0]), float(times[-1]))
    return Trajectory(times, points, weights, True, ends, ("sail",), stats)

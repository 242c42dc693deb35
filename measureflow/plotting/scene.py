"""What there is to draw: a trajectory, pairs or measures as arrays, and the chart that shows them in space."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from measureflow import sphere
from measureflow.measures import MeasurePairs, TokenMeasure
from measureflow.plotting.projections import principal_axes
from measureflow.trajectory import Trajectory

ARC = np.radians(5)  # longest step of a drawn path: a chord of it is within 0.1 % of the radius from the great circle


@dataclass(frozen=True, eq=False)
class Scene:
    """N measures at T times as arrays, and where they should end.

    Args:
        times: (T,) stored times, and others between them where a token goes far.
        places: (T, N, n, d) points.
        weights: (N, n); 0 is padding, which is not drawn.
        targets: (N, m, d) points of the targets, or None.
        target_weights: (N, m), or None.
        names: one per measure; empty where there is nothing to tell apart.
        globe: the points are places on the Earth.
    """

    times: Float[ndarray, " T"]
    places: Float[ndarray, "T N n d"]
    weights: Float[ndarray, "N n"]
    targets: Float[ndarray, "N m d"] | None
    target_weights: Float[ndarray, "N m"] | None
    names: Sequence[str]
    globe: bool

    @property
    def dim(self) -> int:
        """Dimension d of the space around the sphere."""
        return self.places.shape[-1]


def scene_of(
    given: Trajectory | MeasurePairs | TokenMeasure,
    targets: TokenMeasure | None = None,
    names: Sequence[str] | None = None,
) -> Scene:
    """Arrays to draw from any result of measureflow.

    Between stored times a trajectory follows great circles: points are added where a step is longer than 5 degrees.

    Args:
        given: a trajectory, pairs (their sources at the start, their targets as targets) or measures.
        targets: where the measures should end: one target per measure.
        names: one per measure; None takes the pairs' names, or numbers from 0.

    Raises:
        TypeError: nothing that can be drawn.
        ValueError: targets or names do not fit the measures, a point of a trajectory is not finite, or a token jumps
            to its antipode between two stored times.
    """
    if isinstance(given, MeasurePairs):
        targets = given.target if targets is None else targets
        names = given.names if names is None else names
        given = given.source
    if isinstance(given, TokenMeasure):
        times, points = np.zeros(1), _array(given.points)[None]
    elif isinstance(given, Trajectory):
        times, points = _along_arcs(given)
    else:
        kinds = "a Trajectory, MeasurePairs or a TokenMeasure"
        raise TypeError(f"expected {kinds} to draw, got {type(given).__name__}")
    n, d = points.shape[-2:]
    places = points.reshape(len(times), -1, n, d)
    count = places.shape[1]
    flat = _array(given.weights).reshape(-1, n)
    if targets is not None:
        ends, masses = _targets(targets, count, d)
    else:
        ends, masses = None, None
    return Scene(times, places, flat, ends, masses, _names(names, count), given.globe)


def chart_of(scene: Scene) -> tuple[Float[ndarray, "3 d"], str]:
    """The linear chart that puts the points of a scene in R^3, and what to say about it on the page.

    d = 3 is shown as it is, d = 2 as a circle in a plane, d > 3 by the three principal axes of all points of the
    paths and of the targets (`projections.principal_axes`): the points then lie inside the ball.
    """
    if scene.dim <= 3:
        return np.eye(3, scene.dim), ""
    points = scene.places.reshape(-1, scene.dim)
    weights = np.broadcast_to(scene.weights, scene.places.shape[:-1]).reshape(-1)
    if scene.targets is not None and scene.target_weights is not None:
        points = np.concatenate([points, scene.targets.reshape(-1, scene.dim)])
        weights = np.concatenate([weights, scene.target_weights.reshape(-1)])
    axes, kept = principal_axes(points, weights)
    return axes, f"3 of {scene.dim} dimensions, by principal axes; {100 * kept:.0f} % of the variance"


def _along_arcs(path: Trajectory) -> tuple[Float[ndarray, " T"], Float[ndarray, "T *batch n d"]]:
    real = (path.weights > 0).expand(path.points.shape[:-1])
    bad = real & ~path.points.isfinite().all(-1)
    if bool(bad.any()):
        k, *place, row = (int(i) for i in bad.nonzero()[0])
        measure = f"measure {', '.join(map(str, place))}, " if place else ""
        got = path.points[bad][0].tolist()
        raise ValueError(f"time {float(path.times[k]):.6g}, {measure}row {row}: expected a finite point, got {got}")
    angles = sphere.distance(path.points[:-1], path.points[1:]).where(real[1:], 0.0)
    longest = _array(angles).reshape(len(path) - 1, real[0].numel()).max(-1)
    pieces = np.ceil(longest / ARC).astype(int).clip(min=1)
    stored = _array(path.times)
    steps = [
        begin + (end - begin) * np.arange(k) / k for begin, end, k in zip(stored[:-1], stored[1:], pieces, strict=True)
    ]
    times = np.concatenate([*steps, stored[-1:]])
    return times, np.stack([_array(path.at(float(t)).points) for t in times])


def _array(tensor: Tensor) -> ndarray:
    return tensor.detach().double().cpu().numpy()


def _targets(targets: TokenMeasure, count: int, d: int) -> tuple[ndarray, ndarray]:
    if targets.dim != d:
        raise ValueError(f"targets: expected points in d = {d}, as the measures, got d = {targets.dim}")
    ends = _array(targets.points).reshape(-1, *targets.points.shape[-2:])
    if len(ends) != count:
        raise ValueError(f"targets: expected {count}, one per measure, got {len(ends)}")
    return ends, _array(targets.weights).reshape(len(ends), -1)


def _names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is None:
        return () if count == 1 else tuple(str(i) for i in range(count))
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names: expected a sequence of {count} texts, got {names!r}")
    if len(names) != count:
        raise ValueError(f"names: expected {count}, one per measure, got {len(names)}")
    return tuple(names)

"""From the sphere to the page: cameras, hidden points, principal axes, and the flat map.

Everything here is numpy on arrays of float64: what is drawn has no gradient.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray


def camera(lon: float | int, lat: float | int) -> Float[ndarray, "3 3"]:
    """Rotation that brings the point at (lon, lat), in degrees, to face the viewer with north up.

    Rows are the directions right, up and towards the viewer: `x @ camera(lon, lat).T` gives (right, up, depth), and
    a point of the sphere is in front where depth >= 0 (orthographic projection).

    Raises:
        ValueError: the latitude is outside [-90, 90] or the longitude is not finite.

    >>> np.round(camera(0.0, 0.0) @ [1.0, 0.0, 0.0]).tolist()
    [0.0, 0.0, 1.0]
    """
    if not (abs(lat) <= 90 and np.isfinite(lon)):
        raise ValueError(f"view: expected a finite longitude and a latitude in [-90, 90], got lon, lat = {lon}, {lat}")
    lam, phi = np.radians(lon), np.radians(lat)
    right = [-np.sin(lam), np.cos(lam), 0.0]
    up = [-np.sin(phi) * np.cos(lam), -np.sin(phi) * np.sin(lam), np.cos(phi)]
    towards = [np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)]
    return np.array([right, up, towards])


def facing(points: Float[ndarray, "*#batch 3"], weights: Float[ndarray, "*#batch"]) -> tuple[float, float]:
    """Longitude and latitude (degrees) to look from: the longitude of the mean of the points, and their mean latitude.

    Points whose mean is near the axis are seen from longitude 0. Latitudes are held within 50 degrees, so that north
    stays recognisable.
    """
    x, y, z = np.moveaxis(points, -1, 0)
    weights = np.broadcast_to(weights, points.shape[:-1])
    mean = [float((weights * part).sum() / weights.sum()) for part in (x, y, np.arctan2(z, np.hypot(x, y)))]
    lon = np.degrees(np.arctan2(mean[1], mean[0])) if np.hypot(mean[0], mean[1]) > 0.02 else 0.0
    return float(lon), float(np.clip(np.degrees(mean[2]), -50, 50))


def split_at_horizon(
    seen: Float[ndarray, "m T 3"],
) -> tuple[Float[ndarray, "m S 2"], Float[ndarray, "m S 2"]]:
    """Cut paths where they pass the horizon: their visible and their hidden parts, with NaN elsewhere.

    Each step between two points gets a point in its middle or, where the step crosses the horizon, at the crossing,
    so that both parts meet there; S = 2 T - 1.

    Args:
        seen: paths as a camera sees them, (right, up, depth).
    """
    begin, end = seen[:, :-1], seen[:, 1:]
    crosses = (begin[..., 2] < 0) != (end[..., 2] < 0)
    gap = np.where(crosses, begin[..., 2] - end[..., 2], 1.0)
    share = np.where(crosses, begin[..., 2] / gap, 0.5)[..., None]
    dense = np.empty((seen.shape[0], 2 * seen.shape[1] - 1, 3))
    dense[:, ::2] = seen
    dense[:, 1::2] = begin + share * (end - begin)
    at_horizon = np.zeros(dense.shape[:2], dtype=bool)
    at_horizon[:, 1::2] = crosses
    front = (dense[..., 2] >= 0) | at_horizon
    back = (dense[..., 2] < 0) | at_horizon
    flat = dense[..., :2]
    return np.where(front[..., None], flat, np.nan), np.where(back[..., None], flat, np.nan)


def unfold(seen: Float[ndarray, "k 3"]) -> Float[ndarray, "l 2"]:
    """Lay a closed ring on the page with its hidden part outside the unit disc, for filling.

    A point at distance r from the centre of the disc goes to distance 2 - r when it is hidden: a continuous
    one-to-one map of the sphere without its farthest point, so that filled rings, clipped by the disc, are right
    where they are visible. Long steps around the farthest point are broken so that no chord cuts into the disc.

    Args:
        seen: ring as a camera sees it, first point repeated at the end.
    """
    flat = seen[:, :2]
    r = np.hypot(flat[:, 0], flat[:, 1])
    hidden = (seen[:, 2] < 0) & (r > 0)
    stretch = np.where(hidden, (2 - r) / np.where(r > 0, r, 1.0), 1.0)
    flat = flat * stretch[:, None]
    angle = np.arctan2(flat[:, 1], flat[:, 0])
    turn = (np.diff(angle) + np.pi) % (2 * np.pi) - np.pi
    far = hidden[:-1] & hidden[1:]
    pieces = np.where(far, np.ceil(np.abs(turn) / (np.pi / 4)), 1).astype(int).clip(min=1)
    if pieces.max(initial=1) == 1:
        return flat
    step = np.repeat(np.arange(len(pieces)), pieces)
    share = np.concatenate([np.arange(n) / n for n in pieces])
    radius = np.hypot(flat[:, 0], flat[:, 1])
    bent_angle = angle[step] + share * turn[step]
    bent_radius = radius[step] + share * (radius[step + 1] - radius[step])
    bent = bent_radius[:, None] * np.stack([np.cos(bent_angle), np.sin(bent_angle)], -1)
    return np.concatenate([np.where((share == 0)[:, None], flat[step], bent), flat[-1:]])


def principal_axes(
    points: Float[ndarray, "*batch d"], weights: Float[ndarray, "*batch"]
) -> tuple[Float[ndarray, "3 d"], float]:
    """The three orthonormal directions of R^d that keep most of the points, and the share of variance they keep.

    Variance is taken about the centre of the sphere, not about the mean, so that the projected points lie inside the
    unit ball around the centre; all of it is 1. Each axis is turned so that its largest entry is positive.

    >>> axes, kept = principal_axes(np.eye(4)[:3], np.ones(3))
    >>> axes.shape, round(kept, 6)
    ((3, 4), 1.0)
    """
    x = points.reshape(-1, points.shape[-1])
    w = np.broadcast_to(weights, points.shape[:-1]).reshape(-1)
    moment = (w[:, None] * x).T @ x / w.sum()
    values, vectors = np.linalg.eigh(moment)
    axes = vectors[:, ::-1][:, :3].T
    largest = np.take_along_axis(axes, np.abs(axes).argmax(-1)[:, None], -1)
    return axes * np.sign(largest), float(values[::-1][:3].sum() / values.sum())


def to_lonlat(points: Float[ndarray, "*batch 3"]) -> Float[ndarray, "*batch 2"]:
    """Longitude in [-180, 180] and latitude, in degrees."""
    lon = np.degrees(np.arctan2(points[..., 1], points[..., 0]))
    lat = np.degrees(np.arctan2(points[..., 2], np.hypot(points[..., 0], points[..., 1])))
    return np.stack([lon, lat], -1)


def map_pieces(lonlat: Float[ndarray, "T 2"]) -> list[Float[ndarray, "_ 2"]]:
    """Cut a path in degrees into pieces inside [-180, 180], each meeting the edge of the map where it is cut.

    A step of more than 180 degrees goes the short way, across the date line.

    >>> [piece.tolist() for piece in map_pieces(np.array([[170.0, 0.0], [-170.0, 10.0]]))]
    [[[170.0, 0.0], [180.0, 5.0]], [[-180.0, 5.0], [-170.0, 10.0]]]
    """
    pieces, current = [], [lonlat[0]]
    for begin, end in pairwise(lonlat):
        jump = end[0] - begin[0]
        if abs(jump) > 180:
            edge = 180.0 if jump < 0 else -180.0
            length = jump + 2 * edge
            share = (edge - begin[0]) / length if length else 0.0
            lat = begin[1] + share * (end[1] - begin[1])
            pieces.append(np.array([*current, [edge, lat]]))
            current = [np.array([-edge, lat])]
        current.append(end)
    return [*pieces, np.array(current)]


def is_front(seen: Float[ndarray, "*batch 3"]) -> Bool[ndarray, "*batch"]:
    """Whether a point, as a camera sees it, is on the near half of the sphere.

    >>> is_front(np.array([[0.0, 0.0, 1.0], [0.0, 0.6, -0.8]])).tolist()
    [True, False]
    """
    return seen[..., 2] >= 0

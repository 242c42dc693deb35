"""Land and sea: Natural Earth's outline at 1:110 million, bundled.

It is bundled (37 kB, public domain, see data/README.md) rather than taken from cartopy because cartopy downloads its
coastlines when a picture is drawn: figures would need a network, and would change with the server.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from jaxtyping import Float
from matplotlib.path import Path
from numpy import ndarray

from measureflow.plotting.projections import unfold

LONGEST_STEP = 3.0  # degrees between neighbouring corners: short enough for straight lines on the page


@dataclass(frozen=True, eq=False)
class Land:
    """The land of the Earth as closed rings (first corner repeated at the end), lakes as rings the other way round.

    Args:
        lonlat: corners in degrees, ring by ring; longitudes of one ring are continuous, so they may leave [-180, 180].
        points: the same corners on the unit sphere.
        stereographic: the rings seen from the South Pole of the projection, in which the North Pole, which is sea,
            is at infinity: inside and outside are those of the plane.
    """

    lonlat: tuple[Float[ndarray, "_ 2"], ...]
    points: tuple[Float[ndarray, "_ 3"], ...]
    stereographic: tuple[Path, ...]


@cache
def land() -> Land:
    """The bundled land, read once.

    >>> len(land().lonlat)
    126
    """
    file = resources.files("measureflow.plotting") / "data" / "coastlines_110m.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
        corners, lengths = data["lonlat"].astype(float), data["lengths"]
    rings = tuple(_densified(ring) for ring in np.split(corners, np.cumsum(lengths)[:-1]))
    points = tuple(_on_sphere(ring) for ring in rings)
    plane = [ring[:, :2] / (1 - ring[:, 2:]) for ring in points]
    return Land(rings, points, tuple(Path(ring, closed=True) for ring in plane))


def is_land(point: Float[ndarray, " 3"]) -> bool:
    """Whether a point of the sphere is on land.

    >>> is_land(np.array([0.0, 0.0, -1.0])), is_land(np.array([0.0, 0.0, 1.0]))  # South Pole, North Pole
    (True, False)
    """
    if point[2] > 1 - 1e-9:
        return False
    place = point[:2] / (1 - point[2])
    # A place in a lake is in two rings.
    return sum(ring.contains_point(place) for ring in land().stereographic) % 2 == 1


def land_from(rotation: Float[ndarray, "3 3"]) -> Path:
    """The land as a camera sees it: a path to be filled and clipped by the unit disc.

    Args:
        rotation: of `projections.camera`.
    """
    rings = [unfold(ring @ rotation.T) for ring in land().points]
    if is_land(-rotation[2]):
        # The farthest point is then inside a ring that the unfolding turns inside out: a ring round everything, run
        # against it, sets inside and outside right (paths are filled where their winding number is not zero).
        angle = np.linspace(2 * np.pi, 0, 181)
        rings.append(3 * np.stack([np.cos(angle), np.sin(angle)], -1))
    return Path.make_compound_path(*(Path(ring, closed=True) for ring in rings))


def land_on_map() -> Path:
    """The land in degrees, to be filled and clipped by the map [-180, 180] x [-90, 90].

    Rings that run across the date line are drawn again one turn further on either side.
    """
    shapes = []
    for ring in land().lonlat:
        turn = ring[-1, 0] - ring[0, 0]
        if abs(turn) > 180:  # Antarctica: around the pole and back along the lower edge
            ring = np.concatenate([ring, [[ring[-1, 0], -90.0], [ring[0, 0], -90.0]], ring[:1]])
        for shift in (-360.0, 0.0, 360.0):
            moved = ring + np.array([shift, 0.0])
            if moved[:, 0].min() < 180 and moved[:, 0].max() > -180:
                shapes.append(Path(moved, closed=True))
    return Path.make_compound_path(*shapes)


def _densified(ring: Float[ndarray, "k 2"]) -> Float[ndarray, "l 2"]:
    lon = np.unwrap(ring[:, 0], period=360)
    ring = np.stack([lon, ring[:, 1]], -1)
    length = np.hypot(np.diff(lon) * np.cos(np.radians(ring[:-1, 1])), np.diff(ring[:, 1]))
    parts = [
        begin + (end - begin) * np.arange(n)[:, None] / n
        for begin, end, n in zip(ring[:-1], ring[1:], np.ceil(length / LONGEST_STEP).clip(1).astype(int), strict=True)
    ]
    return np.concatenate([*parts, ring[-1:]])


def _on_sphere(lonlat: Float[ndarray, "k 2"]) -> Float[ndarray, "k 3"]:
    lam, phi = np.radians(lonlat).T
    return np.stack([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)], -1)

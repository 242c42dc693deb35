"""Letters on the sphere, as clouds of points."""

import math

import torch
from jaxtyping import Bool, Float
from matplotlib import font_manager
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from torch import Tensor

from measureflow import sphere
from measureflow.measures import MeasurePairs, TokenMeasure

# This font comes with matplotlib, so that letters look the same everywhere.
_FONT = font_manager.FontProperties(family="DejaVu Sans")


def letters(
    sources: str = "ABCDE", targets: str = "FGHIJ", atoms: int = 128, *, size: float = 0.5, seed: int = 0
) -> MeasurePairs:
    """Letters to letters: the k-th source letter becomes the k-th target letter at the same place.

    By default 5 pairs of 128 atoms on S². Each letter is a flat figure, centred, its longer side from -1 to 1, filled
    evenly with points (a scrambled Sobol sequence). It is put on the sphere by the inverse stereographic projection
    `sphere.lift_stereographic` with scale 1/tan(size/2), which takes distance 1 to the angle `size`, and then turned
    to its place on the equator, upright and readable from outside, with north at the last axis. Places are evenly
    spaced, eastward from the first axis.

    Args:
        sources, targets: as many letters, digits or signs; pairs are named "A to F".
        atoms: number of points of each letter.
        size: angle between a letter's centre and the ends of its longer side, radians, in (0, π/2). Letters overlap
            where size is over about π over their number.
        seed: of the points.

    Returns:
        float64, equal weights, no coupling.

    Raises:
        ValueError: there are no letters or not as many targets, a sign is not in the font or has no area, a number is
            out of range.

    >>> letters("AB", "OX", 10)
    MeasurePairs(2, 'A to O' to 'B to X', atoms=10 -> 10, d=3, float64)
    """
    if not sources or len(sources) != len(targets):
        raise ValueError(f"expected as many targets as sources, at least one, got {sources!r} and {targets!r}")
    if atoms < 1:
        raise ValueError(f"atoms: expected at least 1, got {atoms}")
    if not 0 < size < math.pi / 2:
        raise ValueError(f"size: expected an angle in (0, π/2), got {size}")
    names = [f"{a} to {b}" for a, b in zip(sources, targets, strict=True)]
    source, target = (
        _on_equator([_fill(sign, atoms, seed + 2 * k + side) for k, sign in enumerate(signs)], size)
        for side, signs in enumerate((sources, targets))
    )
    return MeasurePairs(source, target, names)


def _fill(sign: str, atoms: int, seed: int) -> Float[Tensor, "n 2"]:
    """Points that fill a sign evenly; centred, longer side from -1 to 1."""
    font = font_manager.get_font(font_manager.findfont(_FONT))
    if sign.isspace() or not font.get_char_index(ord(sign)):
        raise ValueError(f"letters: expected signs that {_FONT.get_name()} draws, got {sign!r}")
    outline = TextPath((0, 0), sign, size=1, prop=_FONT)
    box = outline.get_extents()
    side = max(box.width, box.height)
    middle = torch.tensor([(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2], dtype=torch.float64)
    sobol = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed)
    inside = torch.zeros(0, 2, dtype=torch.float64)
    while len(inside) < atoms:
        square = 2 * sobol.draw(4 * atoms, dtype=torch.float64) - 1
        inside = torch.cat([inside, square[_contains(outline, middle + square * side / 2)]])
    return inside[:atoms]


def _contains(outline: Outline, points: Float[Tensor, "n 2"]) -> Bool[Tensor, " n"]:
    """Points inside by winding number: the contour of a hole runs the other way round."""
    winding = torch.zeros(len(points), dtype=torch.int64)
    for corners in outline.to_polygons():
        x, y = torch.as_tensor(corners).T
        hand = int(torch.sign((x[:-1] * y[1:] - x[1:] * y[:-1]).sum()))
        winding += hand * torch.from_numpy(Outline(corners).contains_points(points.numpy()))
    return winding != 0


def _on_equator(figures: list[Float[Tensor, "n 2"]], size: float) -> TokenMeasure:
    lon = torch.arange(len(figures), dtype=torch.float64) * 2 * math.pi / len(figures)
    zero = torch.zeros_like(lon)
    outward = torch.stack([lon.cos(), lon.sin(), zero], dim=-1)
    east = torch.stack([-lon.sin(), lon.cos(), zero], dim=-1)
    north = torch.stack([zero, zero, zero + 1], dim=-1)
    # The lift takes the origin to minus the last axis, which is to point outward.
    frames = torch.stack([east, north, -outward], dim=-2)
    lifted = sphere.lift_stereographic(torch.stack(figures), 1 / math.tan(size / 2))
    return TokenMeasure(sphere.project(lifted @ frames))

"""Letters on the sphere, as clouds of points."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from measureflow import sphere
from measureflow.measures import MeasurePairs, TokenMeasure

# This font comes with matplotlib, so that letters look the same everywhere.
FONT = "DejaVu Sans"


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
    start, end = _outline(sign).unbind()
    least, largest = start.amin(0), start.amax(0)
    middle, side = (least + largest) / 2, (largest - least).max()
    sobol = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed)
    inside = torch.zeros(0, 2, dtype=torch.float64)
    while len(inside) < atoms:
        square = 2 * sobol.draw(4 * atoms, dtype=torch.float64) - 1
        inside = torch.cat([inside, square[_winding(middle + square * side / 2, start, end) != 0]])
    return inside[:atoms]


def _outline(sign: str) -> Float[Tensor, "2 edges 2"]:
    """Starts and ends of the edges of a sign's contours."""
    # Only letters need fonts: matplotlib looks through the machine's for seconds when it is first imported there.
    from matplotlib import font_manager
    from matplotlib.textpath import TextPath

    font = font_manager.FontProperties(family=FONT)
    if sign.isspace() or not font_manager.get_font(font_manager.findfont(font)).get_char_index(ord(sign)):
        raise ValueError(f"letters: expected signs that {FONT} draws, got {sign!r}")
    contours = [torch.as_tensor(corners) for corners in TextPath((0, 0), sign, size=1, prop=font).to_polygons()]
    return torch.stack([torch.cat([c[:-1] for c in contours]), torch.cat([c[1:] for c in contours])])


def _winding(
    points: Float[Tensor, "n 2"], start: Float[Tensor, "edges 2"], end: Float[Tensor, "edges 2"]
) -> Int[Tensor, " n"]:
    """How often the contours run around each point: 0 outside and in holes, whose contours run the other way."""
    edge, offset = end - start, points.unsqueeze(1) - start
    left = edge[:, 0] * offset[..., 1] - edge[:, 1] * offset[..., 0]
    y = points[:, 1:]
    up = (start[:, 1] <= y) & (y < end[:, 1]) & (left > 0)
    down = (end[:, 1] <= y) & (y < start[:, 1]) & (left < 0)
    return (up.long() - down.long()).sum(1)


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

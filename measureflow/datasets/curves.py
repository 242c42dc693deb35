"""Measures along curves: rings and spirals."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow import sphere
from measureflow.datasets.mixtures import check_sizes
from measureflow.measures import MeasurePairs, TokenMeasure


def rings(
    pairs: int = 8, atoms: int = 64, d: int = 3, *, radius: tuple[float, float] = (0.2, 0.8), seed: int = 0
) -> MeasurePairs:
    """Rings to rings: circles with centres, planes and radii of their own, atoms evenly spaced from a random start.

    By default 8 pairs of 64 atoms on S², with radii between 0.2 and 0.8 rad.

    Args:
        pairs, atoms: numbers of pairs, and of atoms on each ring.
        d: dimension of the space around the sphere, at least 3.
        radius: least and largest angle between centre and ring, radians, in (0, π); radii are uniform between them.
        seed: of the draw.

    Returns:
        float64, equal weights, no coupling.

    Raises:
        ValueError: a number is too small, or the radii are not 0 < least <= largest < π.

    >>> rings(2, 10)
    MeasurePairs(2, '0' to '1', atoms=10 -> 10, d=3, float64)
    """
    check_sizes(3, pairs=pairs, atoms=atoms, d=d)
    least, largest = radius
    if not 0 < least <= largest < math.pi:
        raise ValueError(f"radius: expected 0 < least <= largest < π, got {radius}")
    generator = torch.Generator().manual_seed(seed)

    def ring() -> TokenMeasure:
        start, size = torch.rand(2, pairs, 1, generator=generator, dtype=torch.float64)
        turn = torch.arange(atoms, dtype=torch.float64) / atoms + start
        from_centre = (least + (largest - least) * size).expand_as(turn)
        return TokenMeasure(_around(_frames(pairs, d, generator), from_centre, 2 * math.pi * turn))

    return MeasurePairs(ring(), ring())


def spirals(
    pairs: int = 8, atoms: int = 64, d: int = 3, *, radius: float = 0.8, turns: float = 2.0, seed: int = 0
) -> MeasurePairs:
    """Spirals to spirals that are wound the other way: Archimedean, atoms about evenly spaced along the curve.

    By default 8 pairs of 64 atoms on S², two turns out to 0.8 rad from the centre; seen from outside, sources unwind
    counterclockwise and targets clockwise.

    Args:
        pairs, atoms: numbers of pairs, and of atoms on each spiral.
        d: dimension of the space around the sphere, at least 3.
        radius: angle between the centre and the outer end, radians, in (0, π).
        turns: number of turns, above 0.
        seed: of the draw of centres and planes.

    Returns:
        float64, equal weights; the coupling ties atoms that are equally far along.

    Raises:
        ValueError: a number is too small, or the radius is not in (0, π).

    >>> spirals(2, 10)
    MeasurePairs(2, '0' to '1', atoms=10 -> 10, d=3, float64, coupled)
    """
    check_sizes(3, pairs=pairs, atoms=atoms, d=d)
    if not 0 < radius < math.pi:
        raise ValueError(f"radius: expected an angle in (0, π), got {radius}")
    if not 0 < turns < math.inf:
        raise ValueError(f"turns: expected a number above 0, got {turns}")
    generator = torch.Generator().manual_seed(seed)
    # Arc length grows with the square of the share of the radius.
    along = (torch.arange(atoms, dtype=torch.float64) + 0.5).div(atoms).sqrt().expand(pairs, atoms)
    source, target = (
        TokenMeasure(_around(_frames(pairs, d, generator), radius * along, hand * 2 * math.pi * turns * along))
        for hand in (1, -1)
    )
    return MeasurePairs(source, target, coupling=torch.arange(atoms).expand(pairs, atoms))


def _frames(pairs: int, d: int, generator: torch.Generator) -> Float[Tensor, "pairs 3 d"]:
    """Centres and two directions across each: three orthonormal rows, uniform; a rotation where d = 3."""
    q, r = torch.linalg.qr(torch.randn(pairs, d, 3, generator=generator, dtype=torch.float64))
    # Without the signs of R's diagonal the first coordinate of every centre would be negative.
    frames = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT
    if d == 3:
        # Seen from outside, a turn from the second row to the third is then counterclockwise.
        frames[:, 2] *= torch.linalg.det(frames).sign().unsqueeze(-1)
    return frames


def _around(
    frames: Float[Tensor, "pairs 3 d"], angle: Float[Tensor, "pairs n"], turn: Float[Tensor, "pairs n"]
) -> Float[Tensor, "pairs n d"]:
    """Points at an angle from the centre, in the direction `turn` (both radians) of the plane across it."""
    parts = torch.stack([angle.cos(), angle.sin() * turn.cos(), angle.sin() * turn.sin()], dim=-1)
    return sphere.project(parts @ frames)

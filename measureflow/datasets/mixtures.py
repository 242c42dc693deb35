"""Random measures of von Mises-Fisher clusters."""

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow import sphere
from measureflow.measures import MeasurePairs, TokenMeasure


def clusters(
    pairs: int = 8,
    atoms: int = 64,
    d: int = 3,
    *,
    source_clusters: int = 1,
    target_clusters: int = 4,
    concentration: float = 20.0,
    seed: int = 0,
) -> MeasurePairs:
    """Clusters to clusters: every measure has its own von Mises-Fisher clusters about uniformly drawn centres.

    By default 8 pairs of 64 atoms on S²; a cluster of concentration 20 spreads about 0.22 rad a direction.

    Args:
        pairs, atoms: numbers of pairs, and of atoms in each measure; the clusters share them as evenly as they can.
        d: dimension of the space around the sphere, at least 2.
        source_clusters, target_clusters: numbers of clusters in each measure.
        concentration: of every cluster; the spread is about 1/sqrt(concentration) radians a direction.
        seed: of the draw.

    Returns:
        float64, equal weights, no coupling.

    Raises:
        ValueError: a number is too small, or there are more clusters than atoms.

    >>> clusters(2, 10)
    MeasurePairs(2, '0' to '1', atoms=10 -> 10, d=3, float64)
    """
    check_sizes(2, pairs=pairs, atoms=atoms, d=d)
    generator = torch.Generator().manual_seed(seed)
    source = _mixtures(pairs, atoms, d, source_clusters, concentration, generator)
    return MeasurePairs(source, _mixtures(pairs, atoms, d, target_clusters, concentration, generator))


def shared_atoms(
    pairs: int = 8,
    atoms: int = 64,
    d: int = 3,
    *,
    share: float = 0.5,
    target_clusters: int = 4,
    concentration: float = 20.0,
    seed: int = 0,
) -> MeasurePairs:
    """Sources that have a share of their atoms in common, and targets that have not.

    One cluster of `share * atoms` atoms (by default 32 of 64) belongs to every source, a cluster of its own is the
    rest; the target is four clusters. A map that looks at each token alone sends the common atoms to one place in all
    pairs, so it cannot reach these targets; attention can.

    Args:
        pairs, atoms: numbers of pairs, and of atoms in each measure.
        d: dimension of the space around the sphere, at least 2.
        share: part of the atoms that is common, in (0, 1); rounded to whole atoms.
        target_clusters: number of clusters in each target.
        concentration: of every cluster; the spread is about 1/sqrt(concentration) radians a direction.
        seed: of the draw.

    Returns:
        float64, equal weights, no coupling.

    Raises:
        ValueError: a number is too small, or the share leaves no atom on one side.

    >>> p = shared_atoms(2, 10).source.points
    >>> torch.equal(p[0, :5], p[1, :5]), torch.equal(p[0, 5:], p[1, 5:])
    (True, False)
    """
    check_sizes(2, pairs=pairs, atoms=atoms, d=d)
    common = round(share * atoms)
    if not 0 < common < atoms:
        raise ValueError(f"share: expected a part of {atoms} atoms that is neither none nor all, got {share}")
    generator = torch.Generator().manual_seed(seed)
    base = _mixtures(1, common, d, 1, concentration, generator).points
    own = _mixtures(pairs, atoms - common, d, 1, concentration, generator).points
    source = TokenMeasure(torch.cat([base.expand(pairs, -1, -1), own], dim=1))
    return MeasurePairs(source, _mixtures(pairs, atoms, d, target_clusters, concentration, generator))


def diracs(
    pairs: int = 8, atoms: int = 64, d: int = 3, *, clusters: int = 2, concentration: float = 20.0, seed: int = 0
) -> MeasurePairs:
    """Clusters to Dirac measures: all atoms of a source go to one uniformly drawn point.

    By default 8 pairs of 64 atoms in 2 clusters on S², 1 atom in each target.

    Args:
        pairs, atoms: numbers of pairs, and of atoms in each source.
        d: dimension of the space around the sphere, at least 2.
        clusters: number of clusters in each source.
        concentration: of every cluster; the spread is about 1/sqrt(concentration) radians a direction.
        seed: of the draw.

    Returns:
        float64, equal weights; the coupling ties every source atom to the target's only one.

    Raises:
        ValueError: a number is too small, or there are more clusters than atoms.

    >>> diracs(2, 10)
    MeasurePairs(2, '0' to '1', atoms=10 -> 1, d=3, float64, coupled)
    """
    check_sizes(2, pairs=pairs, atoms=atoms, d=d)
    generator = torch.Generator().manual_seed(seed)
    source = _mixtures(pairs, atoms, d, clusters, concentration, generator)
    target = TokenMeasure(sphere.uniform(pairs, 1, d, generator=generator))
    return MeasurePairs(source, target, coupling=torch.zeros(pairs, atoms, dtype=torch.int64))


def check_sizes(least_d: int, **sizes: int) -> None:
    """Raise ValueError where a size is below 1, or `d` below `least_d`."""
    for name, size in sizes.items():
        least = least_d if name == "d" else 1
        if size < least:
            raise ValueError(f"{name}: expected at least {least}, got {size}")


def _mixtures(
    pairs: int, atoms: int, d: int, count: int, concentration: float, generator: torch.Generator
) -> TokenMeasure:
    if not 1 <= count <= atoms:
        raise ValueError(f"clusters: expected 1 to {atoms} for {atoms} atoms, got {count}")
    sizes = [len(part) for part in torch.arange(atoms).tensor_split(count)]

    def mixture() -> Float[Tensor, "n d"]:
        centres = sphere.uniform(count, d, generator=generator)
        return torch.cat(
            [
                sphere.von_mises_fisher(centre, concentration, size, generator=generator)
                for centre, size in zip(centres, sizes, strict=True)
            ]
        )

    return TokenMeasure(torch.stack([mixture() for _ in range(pairs)]))

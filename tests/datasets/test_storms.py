import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import measureflow
from measureflow import sphere
from measureflow.datasets import storms

bad_input = pytest.mark.bad_input


def rows() -> list[dict[str, str]]:
    file = Path(measureflow.__file__).parent / "datasets" / "data" / "storms.csv"
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def chord(row: dict[str, str], end: str) -> np.ndarray:
    """A place on the unit sphere, written without the library."""
    lon, lat = (np.deg2rad(float(row[f"{end}_{name}"])) for name in ("lon", "lat"))
    return np.array([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)])


def test_the_figures_of_the_docstring():
    p = storms()
    assert p.names == tuple(str(year) for year in range(1980, 2025))
    assert int(p.source.counts.sum()) == 4708
    counts = dict(zip(p.names, p.source.counts.tolist(), strict=True))
    assert min(counts.values()) == counts["2010"] == 88
    assert max(counts.values()) == counts["1985"] == 124
    basins = storms(by="basin")
    expected = {"WP": 1388, "EP": 916, "SI": 792, "NA": 724, "SP": 494, "NI": 391, "SA": 3}
    assert dict(zip(basins.names, basins.source.counts.tolist(), strict=True)) == expected
    assert len(storms(by="basin-season")) == 273
    km = sphere.EARTH_RADIUS_KM * sphere.distance(p.source.points, p.target.points)[p.source.weights > 0]
    assert round(float(km.mean())) == 2499
    assert round(float(km.max())) == 10188


def test_every_storm_is_there_with_its_own_end():
    p = storms()
    assert p.globe
    assert p.source.points.dtype == torch.float64
    seen = Counter(row["season"] for row in rows())
    assert seen == Counter(dict(zip(p.names, p.source.counts.tolist(), strict=True)))
    place = dict.fromkeys(p.names, 0)
    for row in rows():
        i, k = p.names.index(row["season"]), place[row["season"]]
        place[row["season"]] += 1
        # Two ways to the same coordinates: a few roundings apart.
        assert np.allclose(p.source.points[i, k], chord(row, "genesis"), rtol=0, atol=1e-15)
        assert np.allclose(p.target.points[i, p.coupling[i, k]], chord(row, "lysis"), rtol=0, atol=1e-15)


def test_p01_the_north_atlantic_is_no_missing_value():
    assert storms(by="basin")["NA"].source.counts.tolist() == [724]
    atlantic = storms(by="basin", years=2005)["NA"]
    assert atlantic.source.counts.tolist() == [sum(r["basin"] == "NA" and r["season"] == "2005" for r in rows())]
    assert "NA 2005" in storms(by="basin-season", years=2005).names


def test_seasons_with_two_births_at_one_place():
    p = storms()
    twice = []
    for one in p:
        born = one.source[0].atoms()
        if bool((sphere.pairwise_distance(born, born) == 0).sum() > len(born)):
            twice.append(one.names[0])
    assert twice == ["1997", "1999", "2000", "2006"]


@pytest.mark.parametrize("years", [2015, [2015], range(2015, 2016), iter([2015])])
def test_years_in_any_form(years):
    assert storms(years=years).names == ("2015",)


def test_drawing_as_many_storms_from_each_season():
    p = storms(years=range(2015, 2020), atoms=88, seed=1)
    assert p.source.points.shape == p.target.points.shape == (5, 88, 3)
    assert torch.equal(p.source.weights, torch.full((5, 88), 1 / 88, dtype=torch.float64))
    whole = storms(years=range(2015, 2020))
    for drawn, season in zip(p, whole, strict=True):
        both = torch.cat([drawn.source.points[0], drawn.target.points[0]], dim=-1)
        every = torch.cat([season.source.points[0], season.target.points[0]], dim=-1)
        same = (both.unsqueeze(1) == every).all(-1)
        assert bool((same.sum(1) == 1).all())
        assert bool((same.sum(0) <= 1).all())
    assert torch.equal(
        storms(years=2015, atoms=9, seed=1).source.points, storms(years=2015, atoms=9, seed=1).source.points
    )
    assert not torch.equal(storms(years=2015, atoms=9).source.points, storms(years=2015, atoms=9, seed=1).source.points)


@bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"years": 1979}, "years: expected years from 1980 to 2024, got 1979"),
        ({"years": range(2020, 2030)}, "years: expected years from 1980 to 2024, got 2025"),
        ({"years": []}, "years: expected years from 1980 to 2024, got none"),
        ({"by": "month"}, "by: expected one of 'season', 'basin', 'basin-season', got 'month'"),
        ({"years": 2010, "atoms": 89}, "atoms: expected 1 to 88, the storms of pair '2010', got 89"),
        ({"atoms": 0}, "atoms: expected 1 to 97, the storms of pair '1980', got 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        storms(**arguments)

"""What the columns of a file of pairs mean, whatever the file's format.

One row is one atom: `pair`, `side` (source or target), its place, and optionally `weight` and `match`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from measureflow import sphere
from measureflow.errors import FileFormatError
from measureflow.measures import MeasurePairs, TokenMeasure, length_tolerance, sum_tolerance

SIDES = ("source", "target")
TEXT = ("pair", "side", "match")
# The dtypes that a file keeps bit for bit.
KINDS = {torch.float64: np.dtype(np.float64), torch.float32: np.dtype(np.float32)}
_COORDINATE = re.compile(r"x(0|[1-9][0-9]*)")
# Places in degrees with six decimals, and coordinates with as many, are off by less than a hundredth of this (radians).
_SAME_PLACE = 1e-5


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a file of pairs, as they were read or are to be written.

    Args:
        text: pair, side and, where there is one, match.
        numbers: x0, x1, ..., lon, lat, weight, each of them where there is one.
        place: names a row: "pairs.csv, line 7".
    """

    text: Mapping[str, Sequence[str]]
    numbers: Mapping[str, Float[np.ndarray, " rows"]]
    place: Callable[[int], str]

    def error(self, row: int, message: str) -> FileFormatError:
        """The error to raise about a row: its place, pair and side stand before the message."""
        pair, side = self.text["pair"][row], self.text["side"][row]
        return FileFormatError(f"{self.place(row)}: pair {pair!r}, {side}: {message}")


def choose_columns(names: Sequence[str], file: str) -> list[str]:
    """The columns that are read, in the order of the file; others are left aside.

    Raises:
        FileFormatError: a column is doubled or missing.
    """
    doubled = [name for i, name in enumerate(names) if name in names[:i]]
    if doubled:
        raise FileFormatError(f"{file}: the column {doubled[0]!r} stands there twice; rename one")
    found = f"the columns are {', '.join(map(repr, names[:12]))}"
    for name in ("pair", "side"):
        if name not in names:
            raise FileFormatError(f"{file}: the column {name!r} is missing; {found}")
    d = sum(1 for name in names if _COORDINATE.fullmatch(name))
    coordinates = [f"x{k}" for k in range(d)]
    degrees = [name for name in ("lon", "lat") if name in names]
    if d == 1 or any(name not in names for name in coordinates):
        missing = next(f"x{k}" for k in range(d + 1) if f"x{k}" not in names)
        raise FileFormatError(f"{file}: the column {missing!r} is missing; {found}")
    if len(degrees) == 1:
        missing = "lat" if degrees == ["lon"] else "lon"
        raise FileFormatError(f"{file}: the column {missing!r} is missing beside {degrees[0]!r}; {found}")
    if not d and not degrees:
        raise FileFormatError(f"{file}: expected the columns x0, x1, ... or lon, lat; {found}")
    if degrees and d not in (0, 3):
        raise FileFormatError(f"{file}: places with lon, lat have the coordinates x0, x1, x2, got x0 to x{d - 1}")
    wanted = {*TEXT, *coordinates, *degrees, "weight"}
    return [name for name in names if name in wanted]


def as_floats(values: np.ndarray, kind: np.dtype | None) -> Float[np.ndarray, " rows"]:
    """Numbers in the dtype `kind`; where it is None, float32 stays and whole numbers and others become float64."""
    # What is too large for float32 becomes infinite, and is then named as such.
    with np.errstate(over="ignore"):
        return values.astype(kind or (values.dtype if values.dtype in KINDS.values() else np.float64))


def to_pairs(columns: Columns, file: str) -> MeasurePairs:
    """Put rows together to pairs, in the order in which the pairs first appear.

    Raises:
        FileFormatError: a row is wrong; it is named.
    """
    _check_text(columns, file)
    _check_finite(columns)
    points, globe = _points(columns)
    index: dict[str, int] = {}
    pair = np.fromiter((index.setdefault(name, len(index)) for name in columns.text["pair"]), np.int64)
    target = np.fromiter((side == "target" for side in columns.text["side"]), bool)
    group = 2 * pair + target
    counts = np.bincount(group, minlength=2 * len(index))
    order = np.argsort(group, kind="stable")
    starts = np.cumsum(counts) - counts
    if (counts == 0).any():
        empty = int(counts.argmin())
        row = int((pair == empty // 2).argmax())
        raise columns.error(row, f"the pair has no {SIDES[empty % 2]} rows")
    position = np.empty(len(pair), np.int64)
    position[order] = np.arange(len(pair)) - np.repeat(starts, counts)
    weight = columns.numbers.get("weight")
    if weight is None:
        weight = (1 / counts[group]).astype(points.dtype)
    else:
        _check_weights(columns, weight, group, order[starts])

    def measures(side: Bool[np.ndarray, " rows"]) -> TokenMeasure:
        shape = (len(index), int(position[side].max()) + 1)
        padded = np.zeros((*shape, points.shape[1]), points.dtype)
        padded[pair[side], position[side]] = points[side]
        weights = np.zeros(shape, weight.dtype)
        weights[pair[side], position[side]] = weight[side]
        return TokenMeasure(torch.from_numpy(padded), torch.from_numpy(weights), globe)

    source = measures(~target)
    coupling = None
    if any(columns.text.get("match", ())):
        coupling = torch.full(source.weights.shape, -1)
        real = ~target & (weight > 0)
        partner = _partners(columns, pair, real, target & (weight > 0))
        coupling[pair[real], position[real]] = torch.from_numpy(position[partner])
    return MeasurePairs(source, measures(target), list(index), coupling)


def from_pairs(pairs: MeasurePairs) -> Columns:
    """Rows of pairs; padding is left out.

    Places on the Earth have both lon, lat, which mark them as such, and x0, x1, x2, which keep every bit.

    Raises:
        TypeError: the dtype is neither float64 nor float32.
    """
    sides = (pairs.source, pairs.target)
    atoms = [(measure.weights > 0).nonzero(as_tuple=True) for measure in sides]
    pair = torch.cat([where[0] for where in atoms])
    side = torch.cat([torch.full_like(where[0], k) for k, where in enumerate(atoms)])
    order = torch.argsort(2 * pair + side, stable=True)
    x = torch.cat([measure.points[where] for measure, where in zip(sides, atoms, strict=True)])[order].detach().cpu()
    if x.dtype not in KINDS:
        raise TypeError(
            f"pairs: expected float64 or float32 to write to a file, got {x.dtype}; call .to(torch.float32)"
        )
    numbers: dict[str, np.ndarray] = {}
    if pairs.globe:
        numbers["lon"], numbers["lat"] = (degrees.numpy() for degrees in sphere.to_lonlat(x.double()))
    numbers |= {f"x{k}": x[:, k].numpy() for k in range(x.shape[1])}
    weights = torch.cat([measure.weights[where] for measure, where in zip(sides, atoms, strict=True)])[order]
    numbers["weight"] = weights.detach().cpu().numpy()
    text = {
        "pair": [pairs.names[i] for i in pair[order].tolist()],
        "side": [SIDES[k] for k in side[order].tolist()],
    }
    if pairs.coupling is not None:
        match = torch.cat([pairs.coupling[atoms[0]], atoms[1][1]])[order]
        text["match"] = [str(k) for k in match.tolist()]
    return Columns(text, numbers, lambda row: f"row {row}")


def _check_text(columns: Columns, file: str) -> None:
    if not columns.text["pair"]:
        raise FileFormatError(f"{file}: expected at least one row, got none")
    for row, (pair, side) in enumerate(zip(columns.text["pair"], columns.text["side"], strict=True)):
        if not pair or pair.isspace():
            raise FileFormatError(f"{columns.place(row)}: the pair is empty; every row belongs to a named pair")
        if side not in SIDES:
            got = repr(side) if side else "an empty cell"
            raise FileFormatError(f"{columns.place(row)}: pair {pair!r}: side: expected source or target, got {got}")


def _check_finite(columns: Columns) -> None:
    for name, values in columns.numbers.items():
        bad = ~np.isfinite(values)
        if bad.any():
            row = int(bad.argmax())
            raise columns.error(row, f"{name}: expected a finite number, got {values[row]}")


def _points(columns: Columns) -> tuple[Float[np.ndarray, "rows d"], bool]:
    numbers = columns.numbers
    names = sorted((name for name in numbers if _COORDINATE.fullmatch(name)), key=lambda name: int(name[1:]))
    globe = "lon" in numbers
    on_globe = _on_globe(columns) if globe else None
    if not names and on_globe is not None:
        return on_globe.astype(np.result_type(numbers["lon"], numbers["lat"])), True
    points = np.stack([numbers[name] for name in names], axis=1)
    with np.errstate(over="ignore"):
        length = np.linalg.norm(points.astype(np.float64), axis=1)
    off = np.abs(length - 1) > length_tolerance(torch.from_numpy(points).dtype)
    if off.any():
        row = int(off.argmax())
        raise columns.error(
            row,
            f"expected coordinates of length 1, got {points[row].tolist()} of length {length[row]:.9g}; "
            "divide by the length, or pass dtype=torch.float32 where they were rounded to it",
        )
    if on_globe is not None:
        apart = np.linalg.norm(points - on_globe, axis=1) > _SAME_PLACE
        if apart.any():
            row = int(apart.argmax())
            lon, lat = numbers["lon"][row], numbers["lat"][row]
            raise columns.error(
                row,
                f"lon, lat = {lon:.9g}, {lat:.9g} is another place than x0, x1, x2 = {points[row].tolist()}; "
                "correct one of them or leave out the columns x0, x1, x2",
            )
    return points, globe


def _on_globe(columns: Columns) -> Float[np.ndarray, "rows 3"]:
    lon, lat = (torch.from_numpy(columns.numbers[name].astype(np.float64)) for name in ("lon", "lat"))
    off = (lat.abs() > 90).numpy()
    if off.any():
        row = int(off.argmax())
        raise columns.error(row, f"lat: expected degrees in [-90, 90], got {float(lat[row]):.9g}")
    return sphere.from_lonlat(lon, lat).numpy()


def _check_weights(
    columns: Columns,
    weight: Float[np.ndarray, " rows"],
    group: Int[np.ndarray, " rows"],
    first: Int[np.ndarray, " groups"],
) -> None:
    negative = weight < 0
    if negative.any():
        row = int(negative.argmax())
        raise columns.error(row, f"weight: expected at least 0, got {weight[row]:.9g}")
    total = np.bincount(group, weights=weight)
    atoms = torch.from_numpy(np.bincount(group[weight > 0], minlength=len(first)))
    off = np.abs(total - 1) > sum_tolerance(atoms, torch.from_numpy(weight).dtype).numpy()
    if off.any():
        worst = int(off.argmax())
        advice = "divide each by the sum, or pass dtype=torch.float32 where they were rounded to it"
        raise columns.error(int(first[worst]), f"expected weights that sum to 1, got {total[worst]:.9g}; {advice}")


def _partners(
    columns: Columns,
    pair: Int[np.ndarray, " rows"],
    source: Bool[np.ndarray, " rows"],
    target: Bool[np.ndarray, " rows"],
) -> Int[np.ndarray, " sources"]:
    """The target row with the same pair and match, for each source row."""
    match = columns.text["match"]
    empty = np.fromiter((not value for value in match), bool)
    if (source & empty).any():
        row = int((source & empty).argmax())
        raise columns.error(row, "match: got an empty cell; give every source row a match or leave the column out")
    index: dict[str, int] = {}
    code = np.fromiter((index.setdefault(value, len(index)) for value in match), np.int64)
    key = pair * len(index) + code
    rows = np.flatnonzero(target & ~empty)
    rows = rows[np.argsort(key[rows], kind="stable")]
    doubled = np.flatnonzero(np.diff(key[rows]) == 0)
    if len(doubled):
        earlier, later = (int(row) for row in rows[doubled[0] : doubled[0] + 2])
        raise columns.error(later, f"match: {match[later]!r} stands already at {columns.place(earlier)}")
    found = np.searchsorted(key[rows], key[source])
    alone = np.full(len(found), True) if not len(rows) else key[rows[found.clip(max=len(rows) - 1)]] != key[source]
    if alone.any():
        row = int(np.flatnonzero(source)[alone.argmax()])
        raise columns.error(row, f"match: no target row of the pair has {match[row]!r}")
    return rows[found]

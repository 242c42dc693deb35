import csv
import io
import math
import os
import pickle
import struct
import sys
import time
import zipfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from measureflow import sphere
from measureflow.datasets import read_pairs, storms, write_pairs
from measureflow.datasets.pair_files import READERS, WRITERS
from measureflow.errors import FileFormatError, MissingExtraError
from measureflow.measures import MeasurePairs, TokenMeasure

F32, F64 = torch.float32, torch.float64
bad_input = pytest.mark.bad_input
SUFFIXES = list(READERS)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
    lambda name: not name.isspace()
)
HALF = math.sqrt(0.5)


# Drawn as plain values: the type checker of --typecheck draws random numbers, which no strategy may.
DRAWS = {
    "names": st.lists(NAMES, min_size=1, max_size=4, unique=True),
    "sizes": st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=4, max_size=4),
    "d": st.integers(2, 5),
    "dtype": st.sampled_from([F32, F64]),
    "globe": st.booleans(),
    "even": st.booleans(),
    "coupled": st.booleans(),
    "seed": st.integers(0, 2**31),
}


def build(names, sizes, d, dtype, globe, even, coupled, seed) -> MeasurePairs:
    """Pairs of those sizes, weights and dtype; padding only at the end."""
    generator = torch.Generator().manual_seed(seed)

    def side(k: int) -> TokenMeasure:
        counts = [size[k] for size in sizes[: len(names)]]
        points = [sphere.uniform(n, 3 if globe else d, generator=generator, dtype=dtype) for n in counts]
        weights = [torch.rand(n, generator=generator, dtype=dtype) + 1e-6 for n in counts]
        return TokenMeasure.from_ragged(points, None if even else [w / w.sum() for w in weights], globe)

    source, target = side(0), side(1)
    coupling = None
    if coupled:
        coupling = torch.randint(0, 1000, source.weights.shape, generator=generator) % target.counts.unsqueeze(-1)
        coupling = coupling.masked_fill(source.weights == 0, -1)
    return MeasurePairs(source, target, names, coupling)


def assert_same(got: MeasurePairs, expected: MeasurePairs) -> None:
    assert got.names == expected.names
    assert got.globe == expected.globe
    for a, b in ((got.source, expected.source), (got.target, expected.target)):
        assert a.points.dtype == b.points.dtype
        assert torch.equal(a.points, b.points)
        assert torch.equal(a.weights, b.weights)
    assert (got.coupling is None) == (expected.coupling is None)
    assert got.coupling is None or torch.equal(got.coupling, expected.coupling)


def test_the_check_itself_sees_one_bit(tmp_path):
    p = storms(years=[2020, 2021])
    points = p.source.points.clone()
    points[1, 3, 0] = np.nextafter(float(points[1, 3, 0]), 1)
    with pytest.raises(AssertionError):
        assert_same(MeasurePairs(p.source.with_points(points), p.target, p.names, p.coupling), p)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**DRAWS)
def test_p06_every_bit_comes_back(suffix, tmp_path, **draws):
    p = build(**draws)
    file = tmp_path / f"pairs{suffix}"
    write_pairs(p, file)
    assert_same(read_pairs(file, dtype=p.source.points.dtype), p)
    if suffix != ".csv":
        assert_same(read_pairs(file), p)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_p06_tiny_numbers_come_back(suffix, dtype, tmp_path):
    tiny = 0.00000000000001953
    x = torch.tensor([[1.0, tiny, -0.0], [5e-324, -1.0, -tiny], [0.0, 1e-40, 1.0]], dtype=dtype)
    weights = torch.tensor([tiny, 1 - tiny - 1e-300, 1e-300], dtype=dtype)
    mu = TokenMeasure(x[None], weights[None])
    write_pairs(MeasurePairs(mu, mu), tmp_path / f"a{suffix}")
    back = read_pairs(tmp_path / f"a{suffix}", dtype=dtype)
    atoms = x[weights > 0]
    assert back.source[0].atoms().numpy().tobytes() == atoms.numpy().tobytes()
    assert torch.equal(back.target.weights[0], weights[weights > 0])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_storms_come_back_with_globe_and_coupling(suffix, tmp_path):
    p = storms(years=range(2015, 2020))
    write_pairs(p, tmp_path / f"storms{suffix}")
    assert_same(read_pairs(tmp_path / f"storms{suffix}"), p)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_padding_inside_is_left_out_and_the_coupling_follows(suffix, tmp_path):
    x = torch.eye(4, dtype=F64)
    source = TokenMeasure(x[None], torch.tensor([[0.0, 0.5, 0.0, 0.5]], dtype=F64))
    target = TokenMeasure(x[None], torch.tensor([[0.0, 0.25, 0.75, 0.0]], dtype=F64))
    write_pairs(MeasurePairs(source, target, coupling=torch.tensor([[-1, 2, -1, 1]])), tmp_path / f"a{suffix}")
    back = read_pairs(tmp_path / f"a{suffix}")
    assert torch.equal(back.source.points[0], x[[1, 3]])
    assert torch.equal(back.target.points[0], x[[1, 2]])
    assert back.coupling.tolist() == [[1, 0]]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "name",
    [
        "a\rb",
        "\na",
        'a"b',
        "a,b",
        "[a]",
        " a ",
        "'",
        "=1",
        "é",
        "NA",
        "N/A",
        "null",
        "nan",
        "None",
        "007",
        "1e3",
        "true",
        "-0",
    ],
)
def test_p01_text_stays_text(suffix, name, tmp_path):
    mu = TokenMeasure(torch.eye(3, dtype=F64)[None])
    write_pairs(MeasurePairs(mu, mu, [name]), tmp_path / f"a{suffix}")
    assert read_pairs(tmp_path / f"a{suffix}").names == (name,)


def table(*rows: str, header: str = "pair,side,x0,x1") -> str:
    return "\n".join([header, *rows, ""])


GOOD = table("a,source,1,0", "a,source,0,1", "b,source,0,1", "a,target,-1,0", "b,target,0,-1")


def read_text(tmp_path: Path, text: str | bytes, **options) -> MeasurePairs:
    file = tmp_path / "pairs.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_pairs(file, **options)


def refuses(tmp_path: Path, text: str | bytes, message: str, **options) -> None:
    """Reading raises one line that begins with the file's name and holds `message` (not a pattern)."""
    with pytest.raises(FileFormatError) as error:
        read_text(tmp_path, text, **options)
    assert str(error.value).startswith(f"{tmp_path / 'pairs.csv'}")
    assert "\n" not in str(error.value)
    assert message in str(error.value)


def test_rows_of_a_pair_may_stand_anywhere(tmp_path):
    p = read_text(tmp_path, GOOD)
    assert p.names == ("a", "b")
    assert p.source.counts.tolist() == [2, 1]
    assert p.target.counts.tolist() == [1, 1]
    assert p.source.points[0].tolist() == [[1, 0], [0, 1]]
    assert p.target.points[1].tolist() == [[0, -1]]
    assert not p.globe
    assert p.coupling is None


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("\n", "\r"),
        "\ufeff" + GOOD,
        "\ufeff" + GOOD.replace("\n", "\r\n"),
        GOOD.replace("\n", "\n\n"),
        GOOD.rstrip("\n"),
        GOOD.replace("a,", '"a",'),
    ],
)
def test_line_ends_marks_empty_lines_and_quotes(tmp_path, text):
    assert_same(read_text(tmp_path, text), read_text(tmp_path, GOOD))


def test_other_columns_are_left_aside(tmp_path):
    lines = GOOD.splitlines()
    text = "\n".join(["note," + lines[0] + ",x,X0", *(f"nan,{line},,é" for line in lines[1:])])
    assert_same(read_text(tmp_path, text), read_text(tmp_path, GOOD))


def test_columns_in_any_order(tmp_path):
    rows = list(csv.reader(io.StringIO(GOOD)))
    text = "\n".join(",".join(reversed(row)) for row in rows)
    assert_same(read_text(tmp_path, text), read_text(tmp_path, GOOD))


def test_p10_places_in_degrees(tmp_path):
    text = table("NA,source,179,0", "NA,target,-181,0", "x,source,-90,90", "x,target,0,45", header="pair,side,lon,lat")
    p = read_text(tmp_path, text)
    assert p.globe
    assert p.names == ("NA", "x")
    # Degrees become radians with a rounding of 3.1, so places are off by a few 1e-16.
    assert torch.allclose(p.source.points, p.target.points[[0, 0]] * 0 + p.source.points)
    assert float(sphere.distance(p.source.points[0, 0], p.target.points[0, 0])) < 1e-15
    assert torch.allclose(p.source.points[1, 0], torch.tensor([0, 0, 1.0], dtype=F64), rtol=0, atol=1e-15)
    expected = torch.tensor([HALF, 0, HALF], dtype=F64)
    assert torch.allclose(p.target.points[1, 0], expected, rtol=0, atol=1e-15)
    assert read_text(tmp_path, text, dtype=F32).source.points.dtype == F32


def test_weights_and_matches(tmp_path):
    text = table(
        "a,source,1,0,0.25,left",
        "a,source,0,1,0.75,right",
        "a,target,0,-1,0.5,right",
        "a,target,-1,0,0.25,left",
        "a,target,-1,0,0.25,",
        header="pair,side,x0,x1,weight,match",
    )
    p = read_text(tmp_path, text)
    assert p.source.weights.tolist() == [[0.25, 0.75]]
    assert p.target.weights.tolist() == [[0.5, 0.25, 0.25]]
    assert p.coupling.tolist() == [[1, 0]]


def test_matches_belong_to_their_pair_and_several_may_share_one(tmp_path):
    text = table(
        "a,target,1,0,1",
        "b,target,0,1,1",
        "b,target,1,0,2",
        "a,source,0,1,1",
        "a,source,-1,0,1",
        "b,source,0,-1,2",
        header="pair,side,x0,x1,match",
    )
    assert read_text(tmp_path, text).coupling.tolist() == [[0, 0], [1, -1]]


def test_a_column_of_empty_matches_is_no_coupling(tmp_path):
    lines = [line + "," for line in GOOD.splitlines()[1:]]
    assert read_text(tmp_path, table(*lines, header="pair,side,x0,x1,match")).coupling is None


def test_rows_of_weight_zero_are_padding(tmp_path):
    text = table(
        "a,source,1,0,0,",
        "a,source,0,1,1,m",
        "a,target,0,-1,0,",
        "a,target,-1,0,1,m",
        header="pair,side,x0,x1,weight,match",
    )
    p = read_text(tmp_path, text)
    assert p.source[0].atoms().tolist() == [[0, 1]]
    assert p.coupling.tolist() == [[-1, 1]]


@bad_input
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a,target,-1,0", "a,target,-1,", ", line 5: x1: expected a number, got an empty cell"),
        ("a,target,-1,0", "a,target,-1,NA", ", line 5: x1: expected a number, got 'NA'"),
        ("a,target,-1,0", "a,target,-1,0_0", ", line 5: x1: expected a number, got '0_0'"),
        ("a,target,-1,0", "a,target,-1e400,0", ", line 5: pair 'a', target: x0: expected a finite number, got -inf"),
        ("a,target,-1,0", "a,target,-1,nan", ", line 5: pair 'a', target: x1: expected a finite number, got nan"),
        ("a,target,-1,0", "a,target,-inf,0", ", line 5: pair 'a', target: x0: expected a finite number, got -inf"),
        (
            "a,target,-1,0",
            "a,target,-1,1",
            ", line 5: pair 'a', target: expected coordinates of length 1, got [-1.0, 1.0]",
        ),
        ("a,target,-1,0", "a,target,-1", ", line 5: expected 4 cells as in the header, got 3"),
        ("a,target,-1,0", "a,target,-1,0,0", ", line 5: expected 4 cells as in the header, got 5"),
        ("a,target,-1,0", "a,Target,-1,0", ", line 5: pair 'a': side: expected source or target, got 'Target'"),
        ("a,source,0,1\n", "", ""),
    ],
)
def test_wrong_rows(tmp_path, old, new, message):
    assert GOOD.count(old) == 1
    text = GOOD.replace(old, new)
    if message:
        refuses(tmp_path, text, message)
    else:
        assert len(read_text(tmp_path, text)) == 2


@bad_input
@pytest.mark.parametrize("cells", [",source", " ,source", "a,"])
def test_p05_a_row_without_pair_or_side_is_named(tmp_path, cells):
    what = "side: expected source or target, got an empty cell" if cells == "a," else "the pair is empty"
    refuses(tmp_path, GOOD.replace("b,source", cells), what)
    refuses(tmp_path, GOOD.replace("b,source", cells), ", line 4: ")


@bad_input
def test_p02_a_row_of_zeros_is_named(tmp_path):
    refuses(
        tmp_path,
        GOOD.replace("b,source,0,1", "b,source,0,0"),
        ", line 4: pair 'b', source: expected coordinates of length 1, got [0.0, 0.0] of length 0;",
    )


@bad_input
@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("pair,side,x0,x1,x1", "the column 'x1' stands there twice; rename one"),
        ("pair,side,x0,x1,note,note", "the column 'note' stands there twice"),
        ("side,x0,x1", "the column 'pair' is missing; the columns are 'side', 'x0', 'x1'"),
        ("pair,x0,x1", "the column 'side' is missing"),
        ("pair;side;x0;x1", "the column 'pair' is missing; the columns are 'pair;side;x0;x1'"),
        ("pair,side", "expected the columns x0, x1, ... or lon, lat"),
        ("pair,side,x0", "the column 'x1' is missing"),
        ("pair,side,x1,x2", "the column 'x0' is missing"),
        ("pair,side,x0,x1,x3", "the column 'x2' is missing"),
        ("pair,side,lon", "the column 'lat' is missing beside 'lon'"),
        ("pair,side,lat,x0,x1,x2", "the column 'lon' is missing beside 'lat'"),
        ("pair,side,lon,lat,x0,x1", "places with lon, lat have the coordinates x0, x1, x2, got x0 to x1"),
        ("pair,side,x0,x1", "expected at least one row, got none"),
    ],
)
def test_p03_wrong_headers(tmp_path, header, message):
    refuses(tmp_path, header + "\n", message)


@bad_input
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["a,source,1,0,-0.5", "a,source,0,1,1.5", "a,target,1,0,1"],
            ", line 2: pair 'a', source: weight: expected at",
        ),
        (
            ["a,source,1,0,nan", "a,target,1,0,1"],
            ", line 2: pair 'a', source: weight: expected a finite number, got nan",
        ),
        (
            ["a,source,1,0,1", "a,target,1,0,0.4", "a,target,0,1,0.5"],
            ", line 3: pair 'a', target: expected weights that sum to 1, got 0.9",
        ),
        (["a,source,1,0,0", "a,target,1,0,1"], ", line 2: pair 'a', source: expected weights that sum to 1, got 0;"),
        (["a,source,1,0,1", "a,source,1,0,1", "a,target,1,0,1"], "got 2; divide each by the sum"),
        (
            ["a,source,1,0,1", "b,source,1,0,1", "b,target,1,0,1"],
            ", line 2: pair 'a', source: the pair has no target rows",
        ),
        (
            ["b,source,1,0,1", "b,target,1,0,1", "a,target,1,0,1"],
            ", line 4: pair 'a', target: the pair has no source rows",
        ),
    ],
)
def test_wrong_weights_and_sides(tmp_path, rows, message):
    refuses(tmp_path, table(*rows, header="pair,side,x0,x1,weight"), message)


@bad_input
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,source,1,0,m", "a,source,0,1,", "a,target,1,0,m"], ", line 3: pair 'a', source: match: got an empty cell"),
        (["a,source,1,0,m", "a,target,1,0,n"], ", line 2: pair 'a', source: match: no target row of the pair has 'm'"),
        (["a,source,1,0,m", "a,target,1,0,"], ", line 2: pair 'a', source: match: no target row of the pair has 'm'"),
        (["a,source,1,0,1", "a,target,1,0,01"], "match: no target row of the pair has '1'"),
        (
            ["a,source,1,0,m", "a,target,1,0,m", "a,target,0,1,m"],
            ", line 4: pair 'a', target: match: 'm' stands already at ",
        ),
        (
            ["a,source,1,0,m", "a,target,1,0,n", "b,target,1,0,m", "b,source,1,0,m"],
            ", line 2: pair 'a', source: match: no",
        ),
    ],
)
def test_wrong_matches(tmp_path, rows, message):
    refuses(tmp_path, table(*rows, header="pair,side,x0,x1,match"), message)


@bad_input
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,source,0,90.5", "lat: expected degrees in [-90, 90], got 90.5"),
        ("a,source,inf,0", "lon: expected a finite number, got inf"),
        ("a,source,,0", "lon: expected a number, got an empty cell"),
    ],
)
def test_wrong_places(tmp_path, row, message):
    refuses(tmp_path, table("a,target,0,0", row, header="pair,side,lon,lat"), message)
    refuses(tmp_path, table("a,target,0,0", row, header="pair,side,lon,lat"), ", line 3: ")


@bad_input
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,source,90,0,1,0,0", "lon, lat = 90, 0 is another place than x0, x1, x2 = [1.0, 0.0, 0.0]"),
        ("a,source,90,0,,,", "x0: expected a number, got an empty cell"),
    ],
)
def test_mixed_coordinates(tmp_path, row, message):
    refuses(tmp_path, table("a,target,0,0,1,0,0", row, header="pair,side,lon,lat,x0,x1,x2"), message)


@bad_input
def test_text_that_is_no_table(tmp_path):
    refuses(tmp_path, "", "the file is empty")
    refuses(tmp_path, "\n\n", "the file is empty")
    refuses(tmp_path, GOOD.replace("b,t", "é,t").encode("latin-1"), ", line 6: the text is not UTF-8")
    refuses(tmp_path, GOOD.encode("utf-16"), ", line 1: the text is not UTF-8")
    refuses(tmp_path, GOOD.replace("a,target", '"a,target'), ", line 5: the row cannot be read as CSV")


def test_the_line_counts_every_line_of_the_file(tmp_path):
    text = GOOD.replace("a,source,1,0", '"a\n1",source,1,0\n\n"a\n1",target,1,0').replace(
        "b,target,0,-1", "b,target,0,-2"
    )
    refuses(tmp_path, text, ", line 10: pair 'b', target: expected coordinates of length 1")


@bad_input
def test_float32_values_in_a_csv_are_read_as_such_when_asked(tmp_path):
    x = sphere.project(torch.tensor([[0.3, 0.7, 0.2], [0.1, 0.2, 0.3], [0.5, 0.1, 0.9]])[None])
    mu = TokenMeasure(x * (1 + 3e-7))
    write_pairs(MeasurePairs(mu, mu), tmp_path / "pairs.csv")
    refuses(tmp_path, (tmp_path / "pairs.csv").read_bytes(), "pass dtype=torch.float32")
    assert torch.equal(read_pairs(tmp_path / "pairs.csv", dtype=F32).source.points, mu.points)


@bad_input
def test_numbers_too_large_for_float32_are_named(tmp_path):
    text = GOOD.replace("a,target,-1,0", "a,target,-1e300,0")
    refuses(tmp_path, text, ", line 5: pair 'a', target: x0: expected a finite number, got -inf", dtype=F32)


def test_p04_names_are_text_from_first_row_to_last(tmp_path):
    rows = [f"{name},{side},1,0" for name in ("651", "000651", "651.0") for side in ("source", "target")]
    assert read_text(tmp_path, table(*rows)).names == ("651", "000651", "651.0")


@pytest.mark.slow
def test_p04_two_million_rows(tmp_path):
    file = tmp_path / "long.csv"
    with open(file, "w") as out:
        out.write("pair,side,x0,x1\n")
        out.writelines("651,source,1,0\n651,target,0,1\n" for _ in range(1_000_000))
        out.write("000651,source,1,0\n000651,target,0,1\n")
    p = read_pairs(file)
    assert p.names == ("651", "000651")
    assert p.source.counts.tolist() == [1_000_000, 1]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_hundred_thousand_rows_take_seconds(suffix, tmp_path):
    generator = torch.Generator().manual_seed(0)
    source, target = (TokenMeasure(sphere.uniform(500, 100, 3, generator=generator)) for _ in range(2))
    p = MeasurePairs(source, target, coupling=torch.arange(100).expand(500, 100))
    start = time.process_time()
    write_pairs(p, tmp_path / f"a{suffix}")
    assert_same(read_pairs(tmp_path / f"a{suffix}"), p)
    # Measured: 1 s; the rest is for a busy or slow machine.
    assert time.process_time() - start < 10


def arrays(**changes) -> dict[str, np.ndarray]:
    whole = {
        "pair": np.array(["a", "a", "b", "b"]),
        "side": np.array(["source", "target"] * 2),
        "x0": np.array([1.0, 0.0, -1.0, 0.0]),
        "x1": np.array([0.0, 1.0, 0.0, -1.0]),
    }
    return {name: value for name, value in (whole | changes).items() if value is not None}


def read_arrays(tmp_path: Path, suffix: str, **changes) -> MeasurePairs:
    file = tmp_path / f"pairs{suffix}"
    if suffix == ".npz":
        np.savez(file, **arrays(**changes))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(arrays(**changes)), file)
    return read_pairs(file)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_numbers_as_names_and_whole_numbers_as_coordinates(suffix, tmp_path):
    whole = {"pair": np.array([7, 7, 10, 10]), "x0": np.array([1, 0, -1, 0]), "x1": np.array([0, 1, 0, -1])}
    p = read_arrays(tmp_path, suffix, **whole, match=np.array([0, 0, 5, 5]))
    assert p.names == ("7", "10")
    assert p.source.points.dtype == F64
    assert p.coupling.tolist() == [[0], [0]]


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_dtype_follows_the_coordinates(suffix, tmp_path):
    x = {name: arrays()[name].astype(np.float32) for name in ("x0", "x1")}
    p = read_arrays(tmp_path, suffix, **x, weight=np.ones(4))
    assert p.source.points.dtype == p.source.weights.dtype == F32
    p = read_arrays(tmp_path, suffix, weight=np.ones(4, np.float32))
    assert p.source.points.dtype == p.source.weights.dtype == F64


@bad_input
@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x1": np.array([0.0, np.nan, 0, -1])}, "row 1: pair 'a', target: x1: expected a finite number, got nan"),
        ({"x1": np.array([0.0, 1.5, 0, -1])}, "row 1: pair 'a', target: expected coordinates of length 1"),
        ({"x1": np.array(["0", "1", "0", "-1"])}, "x1: expected"),
        ({"x1": None}, "the column 'x1' is missing"),
        ({"pair": np.array([1.0, 1.0, 2.0, 2.0])}, "pair: expected"),
        ({"pair": np.array(["a", "a", "", ""])}, "row 2: the pair is empty"),
        ({"side": np.array(["source", "target", "source", "end"])}, "row 3: pair 'b': side: expected source or target"),
        ({"weight": np.array([1.0, 1.0, 2.0, 1.0])}, "row 2: pair 'b', source: expected weights that sum to 1, got 2"),
    ],
)
def test_wrong_arrays(suffix, tmp_path, changes, message):
    with pytest.raises(FileFormatError) as error:
        read_arrays(tmp_path, suffix, **changes)
    assert str(error.value).startswith(f"{tmp_path}{os.sep}pairs{suffix}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x1": np.array([0.0, 1.0])}, "x1: expected 4 rows as in pair, got 2"),
        ({"x1": np.zeros((4, 1))}, r"x1: expected one value a row, got an array of shape (4, 1)"),
        ({"pair": np.array([b"a", b"\xff", b"b", b"b"])}, "pair: the text is not UTF-8"),
    ],
)
def test_wrong_npz(tmp_path, changes, message):
    with pytest.raises(FileFormatError) as error:
        read_arrays(tmp_path, ".npz", **changes)
    assert message in str(error.value)


@bad_input
def test_gaps_in_parquet_are_named(tmp_path):
    import pyarrow
    from pyarrow import parquet

    for name, message in (
        ("x0", "row 2: x0: expected a number, got an empty cell"),
        ("pair", "row 2: the pair is empty"),
    ):
        columns = {key: value.tolist() for key, value in arrays().items()}
        columns[name][2] = None
        parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
        with pytest.raises(FileFormatError, match=message):
            read_pairs(tmp_path / "pairs.parquet")


@bad_input
def test_p03_doubled_columns_in_parquet_and_npz(tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = [pyarrow.array(value) for value in (*arrays().values(), arrays()["x1"])]
    parquet.write_table(pyarrow.table(columns, names=[*arrays(), "x1"]), tmp_path / "a.parquet")
    np.savez(tmp_path / "a.npz", **arrays())
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("x1.npy", archive.read("x1.npy"))
    for suffix in (".parquet", ".npz"):
        with pytest.raises(FileFormatError, match="the column 'x1' stands there twice"):
            read_pairs(tmp_path / f"a{suffix}")


@bad_input
@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_files_cut_short_anywhere(suffix, tmp_path):
    file = tmp_path / f"pairs{suffix}"
    write_pairs(storms(years=2020, atoms=5), file)
    content = file.read_bytes()
    for size in [0, 1, 4, *range(40, len(content), 111), len(content) - 1]:
        file.write_bytes(content[:size])
        with pytest.raises(FileFormatError, match="or one cut short") as error:
            read_pairs(file)
        assert "\n" not in str(error.value)


@bad_input
@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_damaged_and_foreign_files(suffix, tmp_path):
    file = tmp_path / f"pairs{suffix}"
    write_pairs(storms(years=2020, atoms=5), file)
    content = bytearray(file.read_bytes())
    content[60:200] = bytes(140)
    for wrong in (
        bytes(content),
        GOOD.encode(),
        b"PK\x03\x04" + bytes(100),
        b"\x93NUMPY",
        b"PAR1" + bytes(50) + b"PAR1",
    ):
        file.write_bytes(wrong)
        with pytest.raises(FileFormatError) as error:
            read_pairs(file)
        assert str(error.value).startswith(str(file))
        assert "\n" not in str(error.value)


@bad_input
@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 10**6), lost=st.integers(0, 4), added=st.binary(max_size=4))
def test_whatever_stands_in_a_file_it_is_read_or_refused_in_one_line(suffix, tmp_path, where, lost, added):
    file = tmp_path / f"pairs{suffix}"
    write_pairs(storms(years=2020, atoms=4), file)
    content = file.read_bytes()
    where %= len(content)
    file.write_bytes(content[:where] + added + content[where + lost :])
    message = ""
    try:
        assert len(read_pairs(file)) >= 1
    except FileFormatError as error:
        message = str(error)
    assert "\n" not in message


@bad_input
def test_p40_pickled_objects_in_npz_are_refused_and_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    np.savez(tmp_path / "object.npz", **arrays(pair=np.array([Trap()] * 4, dtype=object)))
    with pytest.raises(FileFormatError, match=r"object.npz: pair: an array of Python objects is not read"):
        read_pairs(tmp_path / "object.npz")
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(FileFormatError, match=r"pickle.npz: not an NPZ file, or one cut short"):
        read_pairs(tmp_path / "pickle.npz")
    with open(tmp_path / "single.npz", "wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(FileFormatError, match=r"single.npz: expected an NPZ file of named arrays"):
        read_pairs(tmp_path / "single.npz")
    assert not (tmp_path / "trapped").exists()


@bad_input
def test_an_npz_that_claims_more_than_it_holds(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000,), }"
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        for name, value in arrays().items():
            buffer = io.BytesIO()
            np.save(buffer, value)
            archive.writestr(f"{name}.npy", content if name == "x1" else buffer.getvalue())
    with pytest.raises(FileFormatError):
        read_pairs(tmp_path / "b.npz")


@bad_input
def test_paths(tmp_path):
    p = storms(years=2020, atoms=5)
    for name in ("pairs", "pairs.txt", "pairs.csv.gz"):
        with pytest.raises(ValueError, match=r"expected a name that ends in .csv, .parquet, .npz, got"):
            read_pairs(tmp_path / name)
        with pytest.raises(ValueError, match=r"expected a name that ends in .csv, .parquet, .npz, got"):
            write_pairs(p, tmp_path / name)
    for suffix in SUFFIXES:
        with pytest.raises(FileNotFoundError, match="there is no such file"):
            read_pairs(tmp_path / f"a{suffix}")
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            write_pairs(p, tmp_path / "missing" / f"a{suffix}")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(IsADirectoryError, match="expected a file of pairs, got a folder"):
        read_pairs(tmp_path / "folder.csv")
    with pytest.raises(TypeError, match=r"dtype: expected torch.float64 or torch.float32, got torch.float16"):
        read_pairs(tmp_path / "a.csv", dtype=torch.float16)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.csv"]


def test_suffixes_in_capitals_and_paths_as_text(tmp_path):
    p = storms(years=2020, atoms=5)
    for suffix in SUFFIXES:
        write_pairs(p, str(tmp_path / f"A{suffix.upper()}"))
        assert_same(read_pairs(str(tmp_path / f"A{suffix.upper()}")), p)


@bad_input
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_dtypes_that_files_do_not_keep(suffix, tmp_path):
    with pytest.raises(TypeError, match=r"expected float64 or float32 .*, got torch.bfloat16"):
        write_pairs(storms(years=2020, atoms=5).to(torch.bfloat16), tmp_path / f"a{suffix}")
    assert list(tmp_path.iterdir()) == []


@bad_input
def test_without_pyarrow_the_install_command_is_named(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    file.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for attempt in (lambda: read_pairs(file), lambda: write_pairs(storms(years=2020, atoms=5), file)):
        with pytest.raises(MissingExtraError, match=r"pip install 'measureflow\[parquet\]'"):
            attempt()
    assert set(WRITERS) == set(READERS)

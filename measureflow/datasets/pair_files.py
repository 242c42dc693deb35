"""Files of pairs, by suffix."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from measureflow.datasets.arrays import read_npz, write_npz
from measureflow.datasets.columns import KINDS
from measureflow.datasets.tables import read_csv, read_parquet, write_csv, write_parquet
from measureflow.measures import MeasurePairs

READERS: dict[str, Callable[[Path, np.dtype | None], MeasurePairs]] = {
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".npz": read_npz,
}
WRITERS: dict[str, Callable[[MeasurePairs, Path], None]] = {
    ".csv": write_csv,
    ".parquet": write_parquet,
    ".npz": write_npz,
}


def read_pairs(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> MeasurePairs:
    """Read pairs of measures from a CSV, Parquet or NPZ file, chosen by the suffix.

    One row is one atom. Columns (in NPZ: arrays of one length):

    - `pair`: the name of the pair, text; rows of a pair may stand anywhere in the file.
    - `side`: source or target.
    - `x0`, `x1`, ..., `x{d-1}`: a unit vector; or `lon`, `lat`: a place on the Earth, in degrees. Where a file has
      both, x0, x1, x2 are the points and lon, lat must name the same place to 1e-5 rad (64 m).
    - `weight` (optional): at least 0, with sum 1 over each side of each pair; without it all atoms weigh the same.
    - `match` (optional): any text; a source row belongs to the target row of the same pair with the same text. Several
      source rows may share one target row; target rows without a partner are allowed, source rows are not.

    Other columns are left aside. Pair, side and match are text: "NA" and "007" stay as they are.

    Args:
        path: ends in .csv, .parquet or .npz.
        dtype: torch.float64 or torch.float32; None takes float64 for CSV and the file's own dtype otherwise.

    Raises:
        FileFormatError: the file is truncated or foreign, or a row is wrong; file and line (CSV) or row (counted from
            0) are named.
        FileNotFoundError: there is no such file.
        MissingExtraError: a Parquet file is read without pyarrow.
        ValueError: the suffix is another one.
    """
    file = Path(path)
    reader = READERS[_suffix(file)]
    if dtype is not None and dtype not in KINDS:
        raise TypeError(f"dtype: expected torch.float64 or torch.float32, got {dtype}")
    if file.is_dir():
        raise IsADirectoryError(f"{path}: expected a file of pairs, got a folder")
    if not file.exists():
        raise FileNotFoundError(f"{path}: there is no such file")
    return reader(file, None if dtype is None else KINDS[dtype])


def write_pairs(pairs: MeasurePairs, path: str | os.PathLike[str]) -> None:
    """Write pairs of measures to a CSV, Parquet or NPZ file, chosen by the suffix; the columns are `read_pairs`'s.

    Reading brings back every bit of points and weights in float64 and, with `dtype=torch.float32` for CSV, in
    float32. Padding is not written. Places on the Earth get lon, lat beside x0, x1, x2. The coupling becomes `match`:
    the row of the target atom.

    Raises:
        MissingExtraError: a Parquet file is written without pyarrow.
        OSError: the file cannot be written; what was there before is unchanged.
        TypeError: the points are neither float64 nor float32.
        ValueError: the suffix is another one.

    >>> import tempfile
    >>> from measureflow.datasets import storms
    >>> file = Path(tempfile.mkdtemp()) / "season.csv"
    >>> write_pairs(storms(years=2024), file)
    >>> read_pairs(file).names
    ('2024',)
    """
    file = Path(path)
    WRITERS[_suffix(file)](pairs, file)


def _suffix(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix not in READERS:
        raise ValueError(
            f"{file}: expected a name that ends in {', '.join(READERS)}, got {file.suffix or 'no suffix'!r}"
        )
    return suffix

"""Arrays of pairs: NPZ, one array for each column of a table."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from measureflow.datasets.columns import TEXT, Columns, as_floats, choose_columns, from_pairs, to_pairs
from measureflow.errors import FileFormatError
from measureflow.files import atomic_write
from measureflow.measures import MeasurePairs


def read_npz(path: Path, kind: np.dtype | None = None) -> MeasurePairs:
    """Pairs from an NPZ file, in the dtype of its coordinates unless `kind` is given; rows count from 0.

    Nothing in the file is ever run: arrays of Python objects are refused.

    Raises:
        FileFormatError: the file, an array or a row is wrong; it is named.
    """
    try:
        # NumPy leaves a file open that it cannot read, unless it is given an open one.
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise FileFormatError(f"{path}: expected an NPZ file of named arrays, got a single array (NPY)")
            arrays = {name: _array(archive, name, path) for name in choose_columns(archive.files, str(path))}
    except FileFormatError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise FileFormatError(f"{path}: not an NPZ file, or one cut short: {error}") from error
    rows = {name: len(array) for name, array in arrays.items()}
    for name, count in rows.items():
        if count != rows["pair"]:
            raise FileFormatError(f"{path}: {name}: expected {rows['pair']} rows as in pair, got {count}")
    text = {name: _text(array, name, path) for name, array in arrays.items() if name in TEXT}
    numbers = {name: _numbers(array, name, path, kind) for name, array in arrays.items() if name not in TEXT}
    return to_pairs(Columns(text, numbers, lambda row: f"{path}, row {row}"), str(path))


def _array(archive: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    try:
        array = archive[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            advice = "store text as .astype(str), numbers as .astype(float)"
            raise FileFormatError(f"{path}: {name}: an array of Python objects is not read; {advice}") from error
        raise
    except MemoryError as error:
        raise FileFormatError(f"{path}: {name}: the array says that it is larger than memory: {error}") from error
    if array.ndim != 1:
        raise FileFormatError(f"{path}: {name}: expected one value a row, got an array of shape {array.shape}")
    return array


def _text(array: np.ndarray, name: str, path: Path) -> list[str]:
    if array.dtype.kind == "S":
        try:
            array = np.char.decode(array, "utf-8")
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path}: {name}: the text is not UTF-8") from error
    if array.dtype.kind not in "Uiu":
        raise FileFormatError(f"{path}: {name}: expected text or whole numbers, got {array.dtype}")
    return [str(value) for value in array.tolist()]


def _numbers(array: np.ndarray, name: str, path: Path, kind: np.dtype | None) -> np.ndarray:
    if array.dtype.kind not in "fiu":
        raise FileFormatError(f"{path}: {name}: expected numbers, got {array.dtype}")
    return as_floats(array, kind)


def write_npz(pairs: MeasurePairs, path: Path) -> None:
    """Pairs to a compressed NPZ file, numbers in the dtype of the points."""
    columns = from_pairs(pairs)
    arrays: dict[str, Any] = {name: np.array(values, dtype=str) for name, values in columns.text.items()}
    arrays |= columns.numbers
    # Given a name instead of an open file, NumPy appends .npz where it does not end so, as .NPZ.
    with atomic_write(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(file, **arrays)

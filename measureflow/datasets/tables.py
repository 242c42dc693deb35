"""Tables of pairs: CSV and Parquet."""

import csv
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from measureflow.datasets.columns import TEXT, Columns, as_floats, choose_columns, from_pairs, to_pairs
from measureflow.errors import FileFormatError, MissingExtraError
from measureflow.files import atomic_write
from measureflow.measures import MeasurePairs

if TYPE_CHECKING:
    from _csv import Reader

# Rows of text that stand in memory at once; a text cell takes some ten times the room of a number.
_CHUNK = 100_000


def read_csv(path: Path, kind: np.dtype | None = None) -> MeasurePairs:
    """Pairs from a CSV file: UTF-8, commas, a header; numbers are read in float64 unless `kind` says float32.

    Raises:
        FileFormatError: the file or a row is wrong; the line is named.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            columns = _csv_columns(str(path), csv.reader(file, strict=True), kind or np.dtype(np.float64))
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}, line {_undecodable(path)}: the text is not UTF-8; save it as such") from error
    return to_pairs(columns, str(path))


def _csv_columns(file: str, reader: "Reader", kind: np.dtype) -> Columns:
    rows = _csv_rows(file, reader)
    _, header = next(rows, (0, None))
    if header is None:
        raise FileFormatError(f"{file}: the file is empty; expected a header such as pair,side,x0,x1,x2")
    wanted = choose_columns(header, file)
    places = [(name, header.index(name)) for name in wanted]
    lines: list[int] = []
    text: dict[str, list[str]] = {name: [] for name in wanted if name in TEXT}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted if name not in TEXT}
    while chunk := list(islice(rows, _CHUNK)):
        for line, row in chunk:
            if len(row) != len(header):
                raise FileFormatError(
                    f"{file}, line {line}: expected {len(header)} cells as in the header, got {len(row)}"
                )
        lines += [line for line, _ in chunk]
        for name, k in places:
            cells = [row[k] for _, row in chunk]
            if name in TEXT:
                text[name] += cells
            else:
                parts[name].append(_floats(cells, file, name, lines[-len(chunk) :]))
    numbers = {name: as_floats(np.concatenate([np.empty(0), *part]), kind) for name, part in parts.items()}
    return Columns(text, numbers, lambda row: f"{file}, line {lines[row]}")


def _csv_rows(file: str, reader: "Reader") -> Iterator[tuple[int, list[str]]]:
    """Rows with the line on which each begins; empty lines are passed over."""
    begin = 1
    try:
        for row in reader:
            if row:
                yield begin, row
            begin = reader.line_num + 1
    except csv.Error as error:
        raise FileFormatError(f"{file}, line {begin}: the row cannot be read as CSV: {error}") from error


def _floats(cells: Sequence[str], file: str, name: str, lines: Sequence[int]) -> np.ndarray:
    try:
        return np.fromiter(map(_number, cells), np.float64, len(cells))
    except ValueError:
        line, cell = next((line, cell) for line, cell in zip(lines, cells, strict=True) if not _is_number(cell))
        got = repr(cell) if cell else "an empty cell"
        raise FileFormatError(f"{file}, line {line}: {name}: expected a number, got {got}") from None


def _number(cell: str) -> float:
    if "_" in cell:
        raise ValueError("Python would read 1_5 as 15")
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _undecodable(path: Path) -> int:
    with open(path, "rb") as file:
        for line, text in enumerate(file, start=1):
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                return line
    return 1


def write_csv(pairs: MeasurePairs, path: Path) -> None:
    """Pairs to a CSV file; numbers are written with the digits that bring back every bit in float64 and float32."""
    columns = from_pairs(pairs)
    # A float32 is written as the float64 of the same value, so that no reader rounds it twice.
    cells = {**columns.text, **{name: values.tolist() for name, values in columns.numbers.items()}}
    # Before Python 3.13 the csv module leaves a lone carriage return unquoted, which readers take for a line's end.
    quoting = csv.QUOTE_NONNUMERIC if any("\r" in name for name in pairs.names) else csv.QUOTE_MINIMAL
    with atomic_write(path) as partial, open(partial, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n", quoting=quoting)
        writer.writerow(cells)
        writer.writerows(zip(*cells.values(), strict=True))


def _parquet() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError("Parquet files need pyarrow: pip install 'measureflow[parquet]'") from error
    return pyarrow, parquet


def read_parquet(path: Path, kind: np.dtype | None = None) -> MeasurePairs:
    """Pairs from a Parquet file, in the dtype of its coordinates unless `kind` is given; rows count from 0.

    Raises:
        FileFormatError: the file or a row is wrong; the row is named.
        MissingExtraError: pyarrow is not installed.
    """
    pyarrow, parquet = _parquet()
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            wanted = choose_columns(file.schema_arrow.names, str(path))
            table = file.read(columns=wanted)
    except FileFormatError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileFormatError(f"{path}: not a Parquet file, or one cut short: {reason}") from error
    text, numbers = {}, {}
    for name in wanted:
        column = table.column(name)
        if name in TEXT:
            text[name] = _parquet_text(pyarrow, column, name, str(path))
        else:
            numbers[name] = _parquet_numbers(pyarrow, column, name, str(path), kind)
    return to_pairs(Columns(text, numbers, lambda row: f"{path}, row {row}"), str(path))


def _parquet_text(pyarrow: ModuleType, column: Any, name: str, file: str) -> list[str]:
    types = pyarrow.types
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_null(kind):
        return [""] * len(column)
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind)):
        raise FileFormatError(f"{file}: {name}: expected a column of text or whole numbers, got {column.type}")
    try:
        return ["" if value is None else str(value) for value in column.to_pylist()]
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{file}: {name}: the text is not UTF-8") from error


def _parquet_numbers(pyarrow: ModuleType, column: Any, name: str, file: str, kind: np.dtype | None) -> np.ndarray:
    types = pyarrow.types
    if not (types.is_floating(column.type) or types.is_integer(column.type)):
        raise FileFormatError(f"{file}: {name}: expected a column of numbers, got {column.type}")
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise FileFormatError(f"{file}, row {row}: {name}: expected a number, got an empty cell")
    return as_floats(column.to_numpy(), kind)


def write_parquet(pairs: MeasurePairs, path: Path) -> None:
    """Pairs to a Parquet file, numbers in the dtype of the points.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    pyarrow, parquet = _parquet()
    columns = from_pairs(pairs)
    with atomic_write(path) as partial:
        parquet.write_table(pyarrow.table({**columns.text, **columns.numbers}), partial, write_page_checksum=True)

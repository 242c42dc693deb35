"""benchmarks/README.md from benchmarks/results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measureflow.files import atomic_write

PAGE = Path(__file__).parent / "README.md"
TITLES = {
    "attention": "Attention: blocks against the dense matrix",
    "flow": "Flow: exact flows and batched solvers against torchdiffeq on the dense field",
    "transport": "Exact W2 against scipy's assignment",
    "construction": "Construction over the number of pairs",
}
HEAD = """# Benchmarks

`make bench` runs these side by side on one machine and writes this page and `results/*.json`. Contenders take turns
and their answers are compared before any time counts; seconds are medians of at least five runs, ratios are medians of
the ratios within a round, with the smallest and the largest in brackets. Above 1, measureflow is faster.
"""


def write_page(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the page from what `timing.read_results` gives, by benchmark."""
    parts = [HEAD]
    for name, result in results.items():
        lines = _built(result["rows"]) if name == "construction" else _compared(result["rows"])
        parts += [f"## {TITLES[name]}", "", *lines, "", _where(result["machine"]), ""]
    with atomic_write(PAGE) as file:
        file.write_text("\n".join(parts), encoding="utf-8")


def _compared(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| problem | measureflow | reference | ratio | largest difference |", "| --- | --: | --: | --: | --: |"]
    for row in rows:
        ours, reference = row["seconds"]
        low, high = row["spread"]
        lines.append(
            f"| {row['problem']} | {seconds(ours)} ({row['ours']}) | {seconds(reference)} ({row['reference']}) "
            f"| {row['ratio']:.2g} ({low:.2g} to {high:.2g}) | {row['difference']:.0e} |"
        )
    return lines


def _built(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| problem | time | fastest, slowest | time per pair | layers | W2 (rad) |"]
    lines.append("| --- | --: | --: | --: | --: | --: |")
    for row in rows:
        low, high = row["spread"]
        lines.append(
            f"| {row['problem']} | {seconds(row['seconds'])} | {seconds(low)}, {seconds(high)} "
            f"| {seconds(row['seconds'] / row['pairs'])} | {row['layers']} | {row['w2']:.0e} |"
        )
    return lines


def _where(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {machine['system']}, "
        f"Python {machine['python']}, {versions}."
    )


def seconds(value: float) -> str:
    """A time with two digits and its unit.

    >>> seconds(0.00123), seconds(12.3)
    ('1.2 ms', '12 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.2g} {unit}" if value < 99.5 * size else f"{value / size:.0f} {unit}"
    return f"{value * 1e6:.2g} µs"

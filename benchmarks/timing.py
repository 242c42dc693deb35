"""Fair timing: contenders take turns, their answers are compared, and a ratio is reported with its spread."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measureflow.files import atomic_write

RESULTS = Path(__file__).parent / "results"
VERSIONS = ("measureflow", "torch", "torchdiffeq", "POT", "numpy", "scipy")


@dataclass(frozen=True)
class Row:
    """One problem, solved by measureflow and by a reference.

    Args:
        problem: what, and how large.
        ours, reference: the two ways.
        seconds: medians of both.
        ratio: median over rounds of reference / ours: above 1, measureflow is faster.
        spread: smallest and largest of these ratios.
        runs: rounds that were timed; one more warms up.
        difference: largest difference between the two answers.
    """

    problem: str
    ours: str
    reference: str
    seconds: tuple[float, float]
    ratio: float
    spread: tuple[float, float]
    runs: int
    difference: float


def compare(
    problem: str,
    ours: tuple[str, Callable[[], Tensor]],
    reference: tuple[str, Callable[[], Tensor]],
    *,
    tolerance: float,
    runs: int = 5,
) -> Row:
    """Time two ways to one answer.

    Args:
        problem: what, and how large.
        ours, reference: name and work; the work returns its answer.
        tolerance: largest difference allowed between the answers.
        runs: rounds; in each both ways run once, and which one is first alternates.

    Raises:
        AssertionError: the answers differ by more: a timing of two different things means nothing.
    """
    difference = float((ours[1]() - reference[1]()).abs().max())
    if not difference <= tolerance:
        raise AssertionError(f"{problem}: expected answers within {tolerance:g}, they differ by {difference:g}")
    taken: tuple[list[float], list[float]] = ([], [])
    for k in range(runs):
        for which in (0, 1) if k % 2 == 0 else (1, 0):
            began = time.perf_counter()
            (ours, reference)[which][1]()
            taken[which].append(time.perf_counter() - began)
    ratios = [theirs / mine for mine, theirs in zip(*taken, strict=True)]
    medians = (statistics.median(taken[0]), statistics.median(taken[1]))
    spread = (min(ratios), max(ratios))
    return Row(problem, ours[0], reference[0], medians, statistics.median(ratios), spread, runs, difference)


def machine() -> dict[str, Any]:
    """Where and with what the timings were taken."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in VERSIONS},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_results(name: str, rows: list[Any]) -> None:
    """Write rows and machine to benchmarks/results/NAME.json."""
    content = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    with atomic_write(RESULTS / f"{name}.json") as file:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_results(name: str) -> Mapping[str, Any] | None:
    """What `write_results` has written, if anything."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

"""Construction over the number of pairs at a fixed number of atoms."""

import statistics
import time
from dataclasses import dataclass

import measureflow as mf


@dataclass(frozen=True)
class Built:
    """One problem, constructed several times.

    Args:
        problem: what, and how large.
        pairs: N.
        seconds: median of whole calls, certificate included.
        spread: fastest and slowest of them.
        runs: calls that were timed.
        layers: of the transformer.
        w2: the certificate's largest W2 (rad).
    """

    problem: str
    pairs: int
    seconds: float
    spread: tuple[float, float]
    runs: int
    layers: int
    w2: float


def run(quick: bool) -> list[Built]:
    """Clusters to clusters (d = 3) over N at n = 16, the largest of the specified cases, and storms."""
    sizes = ((2, 8), (4, 8)) if quick else ((4, 16), (8, 16), (16, 16), (32, 16), (8, 64))
    problems = {f"clusters, N = {N}, n = {n}": mf.datasets.clusters(N, n, 3, seed=0) for N, n in sizes}
    if not quick:
        problems["five seasons of storms"] = mf.datasets.storms(years=range(2020, 2025))
    return [_build(problem, pairs, 2 if quick else 5) for problem, pairs in problems.items()]


def _build(problem: str, pairs: mf.MeasurePairs, runs: int) -> Built:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        theta = mf.construct(pairs, seed=0)
        seconds.append(time.perf_counter() - began)
    middle, spread = statistics.median(seconds), (min(seconds), max(seconds))
    return Built(problem, len(pairs), middle, spread, runs, len(theta.layers), theta.certificate.worst)

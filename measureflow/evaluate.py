"""How far off a measure map is: transport errors by pair, simple rules to compare with, sampling noise."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from measureflow import sphere
from measureflow.baselines import BASELINES, baseline_measures
from measureflow.files import atomic_write
from measureflow.flow import push_forward
from measureflow.measures import MeasurePairs, TokenMeasure
from measureflow.progress import progress_over
from measureflow.transformer import Transformer
from measureflow.transport.entropic import sinkhorn_divergence
from measureflow.transport.exact import wasserstein

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Metric:
    """What a column of a report holds.

    Args:
        label: name in tables and figures.
        formula: its definition in one line.
        power: of the radian that its unit is; lengths (power 1) are also given in km on the globe.
    """

    label: str
    formula: str
    power: int = 1


BLUR = 0.05
"""Radians (319 km on the Earth): below this length the Sinkhorn divergence does not tell atoms apart."""

METRICS = {
    "w2": Metric("W2", "(min_P Σ_ij P_ij d(x_i, y_j)²)^(1/2) over the plans P from the image to the target, exact"),
    "w1": Metric("W1", "min_P Σ_ij P_ij d(x_i, y_j), exact"),
    "sinkhorn": Metric(
        "Sinkhorn divergence",
        "S(image, target), S(a, b) = OT(a, b) - (OT(a, a) + OT(b, b)) / 2, OT(a, b) = min_P Σ_ij P_ij d(x_i, y_j)² / 2 "
        f"+ ε KL(P | ab'), ε = ({BLUR} rad)², below 0 by the solver's error",
        power=2,
    ),
    "mean_error": Metric("mean error", "Σ_i a_i d(x_i, target of source atom i)"),
    "max_error": Metric("max error", "max_i d(x_i, target of source atom i)"),
}
"""Metrics by name, in the order of a report; d is the geodesic distance (angle), a_i the weight of an atom.

The errors need a known coupling.
"""

BLOCK = 2**18
"""Costs of pairs that Sinkhorn iterates on at once: 2 MiB in float64, which a cache holds."""

HALVINGS = 5
"""Random halvings of each target whose W2 is averaged for the sampling noise."""

COVERAGE = 0.95
"""Of the bootstrap intervals."""


@dataclass(frozen=True, eq=False)
class Report:
    """Errors of a measure map on N pairs, beside those of rules that have learned nothing.

    Lengths are in radians; `str(report)`, `table` and `plot` give km where the data are places on the globe.

    Args:
        names: of the pairs.
        scores: by metric (see `METRICS`), a value per pair. The errors are missing where no coupling is known.
        baselines: the same for each rule (see `measureflow.baselines.BASELINES`), by its name.
        noise: W2 (rad) between two random halves of the target's atoms, the mean over 5 halvings: what two samples of
            half the size differ by although they come from one measure. NaN for a target of one atom.
        globe: the points are places on the Earth.
        train: what the baselines have learned from, in words.
        notes: what was left out, and why.
        seed: of the draws.
        bootstrap: number of resamples behind the intervals.
    """

    names: tuple[str, ...]
    scores: Mapping[str, Float[Tensor, " N"]]
    baselines: Mapping[str, Mapping[str, Float[Tensor, " N"]]]
    noise: Float[Tensor, " N"]
    globe: bool
    train: str
    notes: tuple[str, ...]
    seed: int
    bootstrap: int

    @property
    def w2(self) -> Float[Tensor, " N"]:
        """Exact W2 per pair (radians)."""
        return self.scores["w2"]

    def interval(self, values: Float[Tensor, " N"]) -> tuple[float, float] | None:
        """95 % interval of the mean over pairs, by the percentile bootstrap; None for fewer than two pairs.

        Pairs are drawn with repeats, the same draws for all values, so that intervals can be compared. Pairs
        without a value (NaN) are left out.
        """
        values = values[~values.isnan()]
        if len(values) < 2:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(len(values), (self.bootstrap, len(values)), generator=generator)
        tail = (1 - COVERAGE) / 2
        low, high = torch.quantile(values[drawn].mean(-1), values.new_tensor([tail, 1 - tail])).tolist()
        return low, high

    def methods(self, metric: str = "w2") -> dict[str, Float[Tensor, " N"]]:
        """Values per pair of the map, of each baseline and, for W2, of the noise; by name, in radians.

        Raises:
            ValueError: there is no such metric, or it needs a coupling that is not known.
        """
        if metric not in self.scores:
            known = ", ".join(self.scores)
            why = "needs a known coupling" if metric in METRICS else "is not a metric"
            raise ValueError(f"metric: {metric!r} {why}; this report has {known}")
        noise = {"noise": self.noise} if metric == "w2" else {}
        baselines = {name: scores[metric] for name, scores in self.baselines.items()}
        return {"map": self.scores[metric], **baselines, **noise}

    def unit(self, metric: str = "w2") -> tuple[str, float]:
        """Unit that a metric is shown in, and how many of it a value of 1 in the report is."""
        power = METRICS[metric].power
        if power == 1 and self.globe:
            return "km", sphere.EARTH_RADIUS_KM
        return ("rad", 1.0) if power == 1 else (f"rad{'⁰¹²³'[power]}", 1.0)

    def table(self, metric: str = "w2") -> Table:
        """A table for the terminal: a row per pair, a column for the map and for each baseline, and their means.

        Raises:
            ValueError: there is no such metric, or it needs a coupling that is not known.
        """
        methods, (unit, scale) = self.methods(metric), self.unit(metric)
        table = Table(title=f"{METRICS[metric].label} ({unit})", show_footer=True, title_justify="left")
        table.add_column("pair", footer="mean", overflow="fold")
        for name, values in methods.items():
            table.add_column(name, footer=_number(mean_of(values) * scale), justify="right")
        for i, pair in enumerate(self.names):
            table.add_row(escape(pair), *(_number(float(values[i]) * scale) for values in methods.values()))
        return table

    def __str__(self) -> str:
        """Means, intervals, units and formulas in plain text."""
        count = "1 pair" if len(self.names) == 1 else f"{len(self.names)} pairs"
        lines = [f"{count}, mean over pairs [95 % interval, {self.bootstrap} resamples, seed {self.seed}]"]
        for metric in self.scores:
            unit, scale = self.unit(metric)
            lines += ["", f"{METRICS[metric].label} ({unit}) = {METRICS[metric].formula}"]
            for name, values in self.methods(metric).items():
                interval = self.interval(values)
                between = f"[{', '.join(_number(end * scale) for end in interval)}]" if interval else ""
                lines.append(f"  {name:<12} {_number(mean_of(values) * scale):>9}  {between}".rstrip())
        lines += ["", f"noise: W2 between two random halves of each target, mean of {HALVINGS} halvings"]
        lines += [f"{name}: {BASELINES[name]}" for name in self.baselines]
        lines += [f"baselines learned from: {self.train}", *self.notes]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: per pair, mean and interval of everything, in radians; null for what there is not."""

        def summary(values: Tensor) -> dict[str, Any]:
            interval = self.interval(values)
            mean = mean_of(values)
            return {
                "mean": None if mean != mean else mean,
                "interval": None if interval is None else list(interval),
                "per_pair": [None if v != v else v for v in values.tolist()],
            }

        def all_of(scores: Mapping[str, Tensor]) -> dict[str, Any]:
            return {metric: summary(values) for metric, values in scores.items()}

        return {
            "names": list(self.names),
            "unit": "rad",
            "km_per_rad": sphere.EARTH_RADIUS_KM if self.globe else None,
            "map": all_of(self.scores),
            "baselines": {name: all_of(scores) for name, scores in self.baselines.items()},
            "noise": summary(self.noise),
            "formulas": {metric: METRICS[metric].formula for metric in self.scores},
            "train": self.train,
            "notes": list(self.notes),
            "seed": self.seed,
            "bootstrap": self.bootstrap,
            "coverage": COVERAGE,
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` as a JSON file, whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        with atomic_write(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")

    def plot(self, path: str | os.PathLike[str] | None = None, *, metric: str = "w2") -> "Figure":
        """Draw a metric by pair on a log axis, with baselines and noise; see `measureflow.plotting.report`.

        Raises:
            ValueError: metric or suffix do not fit.
            OSError: the file cannot be written.
        """
        from measureflow.plotting.report import draw_report  # matplotlib is slow to load

        return draw_report(self, path, metric=metric)


def evaluate(
    theta_or_map: Transformer | Callable[[TokenMeasure], TokenMeasure],
    pairs: MeasurePairs,
    *,
    train: MeasurePairs | None = None,
    neighbours: int = 1,
    seed: int = 0,
    bootstrap: int = 1000,
    progress: bool = False,
) -> Report:
    """Measure how far a transformer, or any measure map, leaves the sources from their targets.

    Args:
        theta_or_map: a transformer, or a function that is given the N sources as one batch and moves their atoms,
            each staying in its row.
        pairs: the N pairs to judge on.
        train: the pairs that the map was fitted on, for the baselines to learn from. None: each pair is compared with
            rules learned from all the other pairs (leave one out), which the report says.
        neighbours: the baseline "nearest" takes the mean of the targets of so many nearest training atoms.
        seed: of climatology's draws, the halves and the bootstrap.
        bootstrap: resamples for the intervals.
        progress: show a bar, or a line without a terminal, when scoring takes more than a second.

    Raises:
        ValueError: dimensions do not fit, the map returns another shape, or a number is out of range.
        TypeError: the map is not callable, or returns something else than a TokenMeasure.
        FlowError: the flow of the transformer cannot be continued.
        NotConvergedError: an exact distance was not reached; the pair is named by its position.

    >>> from measureflow.datasets import storms
    >>> report = evaluate(lambda source: source, storms(years=[2023, 2024]))
    >>> (report.w2 * sphere.EARTH_RADIUS_KM).round().tolist()
    [2484.0, 2216.0]
    """
    _check(theta_or_map, pairs, train, bootstrap)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        image = _image(theta_or_map, pairs)
        past = None if train is None else train.to(pairs.source.points.dtype)
        rules, notes = baseline_measures(pairs, past, neighbours=neighbours, generator=generator)
        scores = {}
        with progress_over("evaluate", len(rules) + 2, shown=progress) as advance:
            for name, measure in {"map": image, **rules}.items():
                scores[name] = _scores(measure, pairs)
                advance(name)
            noise = _noise(pairs.target, generator)
            advance("noise")
    if pairs.coupling is None:
        notes.append("mean and max error: left out, the pairs have no known coupling")
    learned = "for each pair all the others (leave one out)"
    if train is not None:
        learned = f"the {len(train)} pairs given as train"
    own = scores.pop("map")
    return Report(tuple(pairs.names), own, scores, noise, pairs.globe, learned, tuple(notes), seed, bootstrap)


def mean_of(values: Float[Tensor, " N"]) -> float:
    """Mean over the pairs that have a value; NaN where none has.

    >>> mean_of(torch.tensor([1.0, torch.nan, 3.0]))
    2.0
    """
    return float(values[~values.isnan()].mean())


def _number(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"


def _check(theta_or_map: object, pairs: MeasurePairs, train: MeasurePairs | None, bootstrap: int) -> None:
    if not callable(theta_or_map) and not isinstance(theta_or_map, Transformer):
        raise TypeError(f"expected a Transformer or a function of a TokenMeasure, got {type(theta_or_map).__name__}")
    for what, given in (("pairs", pairs), ("train", train)):
        if not isinstance(given, MeasurePairs) and (what == "pairs" or given is not None):
            raise TypeError(f"{what}: expected MeasurePairs, got {type(given).__name__}")
    if isinstance(theta_or_map, Transformer) and theta_or_map.dim != pairs.dim:
        raise ValueError(f"pairs: expected d = {theta_or_map.dim}, as the transformer, got d = {pairs.dim}")
    if train is not None and train.dim != pairs.dim:
        raise ValueError(f"train: expected d = {pairs.dim}, as the pairs, got d = {train.dim}")
    if train is not None and train.source.points.device != pairs.source.points.device:
        raise ValueError(
            f"train: expected it on {pairs.source.points.device}, as the pairs, got {train.source.points.device}"
        )
    if bootstrap < 1:
        raise ValueError(f"bootstrap: expected at least 1 resample, got {bootstrap}")


def _image(theta_or_map: Any, pairs: MeasurePairs) -> TokenMeasure:
    if isinstance(theta_or_map, Transformer):
        return push_forward(theta_or_map, pairs.source)
    image = theta_or_map(pairs.source)
    if not isinstance(image, TokenMeasure):
        raise TypeError(f"the map: expected it to return a TokenMeasure, got {type(image).__name__}")
    expected, got = tuple(pairs.source.points.shape), tuple(image.points.shape)
    if got != expected:
        raise ValueError(f"the map: expected it to return points of shape {expected}, as the sources, got {got}")
    moved = (image.weights > 0) != (pairs.source.weights > 0)
    if bool(moved.any()):
        pair, row = (int(i) for i in moved.nonzero()[0])
        raise ValueError(
            f"the map: pair {pairs.names[pair]!r}, row {row}: expected the atoms of the source to keep their rows, "
            f"got weight {float(image.weights[pair, row]):.3g} for {float(pairs.source.weights[pair, row]):.3g}"
        )
    return image


def _scores(image: TokenMeasure, pairs: MeasurePairs) -> dict[str, Float[Tensor, " N"]]:
    found = {
        "w2": wasserstein(image, pairs.target, p=2.0),
        "w1": wasserstein(image, pairs.target, p=1.0),
        "sinkhorn": _sinkhorn(image, pairs.target),
    }
    if pairs.coupling is not None:
        rows = pairs.coupling.clamp(min=0).unsqueeze(-1).expand_as(image.points)
        error = sphere.distance(image.points, pairs.target.points.gather(1, rows))
        real = image.weights > 0
        found["mean_error"] = (image.weights * error).sum(-1)
        found["max_error"] = torch.where(real, error, 0).amax(-1)
    return {metric: values.double().cpu() for metric, values in found.items()}


def _sinkhorn(image: TokenMeasure, target: TokenMeasure) -> Float[Tensor, " N"]:
    size = image.weights.shape[-1] * target.weights.shape[-1]
    blocks = torch.arange(len(image)).split(max(1, BLOCK // size))
    return torch.cat([sinkhorn_divergence(image[rows], target[rows], blur=BLUR) for rows in blocks])


def _noise(target: TokenMeasure, generator: torch.Generator) -> Float[Tensor, " N"]:
    """W2 between two random halves of each target's atoms, halves of c // 2 and c - c // 2 atoms."""
    real = target.weights > 0
    rank = torch.full((HALVINGS, *real.shape), torch.inf, dtype=torch.float64)
    rank[:, real.cpu()] = torch.rand(HALVINGS, int(real.sum()), generator=generator, dtype=torch.float64)
    order = rank.argsort(-1).argsort(-1).to(real.device)
    first = order < (target.counts // 2).unsqueeze(-1)
    several = target.counts > 1
    halves = []
    for half in (first, real & ~first):
        weights = torch.where(half[:, several], target.weights[several], 0)
        weights = weights / weights.sum(-1, keepdim=True)
        halves.append(TokenMeasure(target.points[several].expand(*weights.shape, -1), weights))
    noise = torch.full((len(target),), torch.nan, dtype=torch.float64)
    if bool(several.any()):
        noise[several.cpu()] = wasserstein(*halves, p=2.0).double().mean(0).cpu()
    return noise

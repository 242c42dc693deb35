"""A report as a picture: the error of each pair on a log axis, beside the baselines and the sampling noise."""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from measureflow.evaluate import METRICS, Report, mean_of
from measureflow.plotting.labels import MARGIN, NAME, SMALL, TITLE, text_width, write
from measureflow.plotting.style import FAINT, INK, OKABE_ITO, QUIET, check_figure_file, finish, new_figure, page

PLOT_WIDTH, FOOT = 6.6, 0.75  # inches
ROW, CLOSE_ROW, TALLEST, MEANS = 0.34, 0.22, 13.0, 1.0  # inches: a pair; one of many; all of them; their means
ROOMY = 16  # more pairs than this are set closer

# Shape and colour both tell the methods apart. The map, filled, lies on top.
MARKS: dict[str, dict[str, Any]] = {
    "map": {"marker": "o", "color": OKABE_ITO[0], "markersize": 7.0, "zorder": 6},
    "identity": {"marker": "s", "color": OKABE_ITO[6], "markersize": 8.0, "markerfacecolor": "none"},
    "nearest": {"marker": "v", "color": OKABE_ITO[3], "markersize": 8.0, "markerfacecolor": "none"},
    "climatology": {"marker": "D", "color": OKABE_ITO[1], "markersize": 6.5, "markerfacecolor": "none"},
    "mean target": {"marker": "^", "color": OKABE_ITO[2], "markersize": 8.0, "markerfacecolor": "none"},
    "noise": {"marker": "|", "color": QUIET, "markersize": 11.0, "markeredgewidth": 3.0, "zorder": 1.5},
}


def draw_report(
    report: Report,
    file: str | os.PathLike[str] | None = None,
    *,
    metric: str = "w2",
    title: str | None = None,
) -> Figure:
    """Draw a row of marks per pair and, for several pairs, their means with 95 % intervals.

    A value of 0 (or a Sinkhorn divergence that rounding has made negative) has no place on a log axis: its mark stands
    left of it, above "0". Where pairs are too
    many to name each, every second, third, ... is named.

    Args:
        report: what `evaluate` has returned.
        file: .png, .pdf or .svg to save it in.
        metric: which of the report's metrics.
        title: one line above the picture.

    Raises:
        ValueError: metric or suffix do not fit.
        OSError: the file cannot be written.
    """
    check_figure_file(file)
    unit, scale = report.unit(metric)
    methods = report.methods(metric)
    methods = {name: methods[name].numpy() * scale for name in MARKS if name in methods}
    n = len(report.names)
    row = ROW if n <= ROOMY else min(CLOSE_ROW, TALLEST / n)
    lowest = n - 0.3 + (MEANS / row if n > 1 else 0.0)
    with page():
        figure = new_figure(PLOT_WIDTH)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_ylim(lowest, -0.7)
        _label_rows(axes, report.names, row, lowest)
        left = 2 * MARGIN + max(text_width(figure, text) for text in axes.get_yticklabels())
        figure.set_figwidth(width := left + PLOT_WIDTH + MARGIN)
        head = 0.15 if title is None else 0.57
        if title is not None:
            text = write(figure, MARGIN, -0.15, title, size=TITLE, va="top", weight="bold")
            text.set_fontsize(TITLE * min(1.0, (width - 2 * MARGIN) / text_width(figure, text)))
        _legend(figure, list(methods), left, -head - 0.12)
        head += 0.35
        figure.set_figheight(height := head + row * (lowest + 0.7) + FOOT)
        axes.set_position((left / width, FOOT / height, PLOT_WIDTH / width, 1 - (head + FOOT) / height))
        zero = _log_axis(axes, np.concatenate(list(methods.values())))
        axes.set_xlabel(f"{METRICS[metric].label} ({unit}), log axis", fontsize=NAME)
        for name, values in methods.items():
            shown = np.where(values <= 0, zero, values)
            axes.plot(shown, np.arange(n), **_look(name, row), linestyle="", clip_on=False)
        if n > 1:
            axes.axhline(n - 0.3, color=QUIET, linewidth=0.8)
            for k, name in enumerate(methods):
                y = n - 0.3 + (k + 1) / (len(methods) + 1) * MEANS / row
                _mean(axes, report, name, metric, scale, y, zero)
        return finish(figure, file)


def _look(name: str, row: float) -> dict[str, Any]:
    look = {"markeredgewidth": 1.4, **MARKS[name]}
    size = min(1.0, 0.3 + row / 0.3)
    return {**look, "markersize": look["markersize"] * size}


def _mean(axes: Axes, report: Report, name: str, metric: str, scale: float, y: float, zero: float) -> None:
    values = report.methods(metric)[name]
    middle, *ends = (zero if v <= 0 else v * scale for v in (mean_of(values), *(report.interval(values) or ())))
    look = _look(name, ROW)
    axes.plot(ends, [y] * len(ends), color=look["color"], linewidth=1.8, clip_on=False)
    # White inside, so that the line does not cross the mark.
    filled = {**look, "markerfacecolor": look["color"] if name == "map" else "white"}
    axes.plot([middle], [y], **filled, clip_on=False)


def _label_rows(axes: Axes, names: Sequence[str], row: float, lowest: float) -> None:
    n, every = len(names), math.ceil(0.14 / row)
    places, labels = [float(i) for i in range(0, n, every)], list(names[::every])
    if n > 1:
        places.append((lowest + n - 0.3) / 2)
        labels.append("mean, 95 %")
    # The formatter of a log axis would read `$` as mathematics.
    axes.set_yticks(places, labels, parse_math=False, fontsize=min(NAME, 50 * row * every), color=INK)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.spines["left"].set_visible(False)
    for i in range(n):
        axes.axhline(i, color=FAINT, linewidth=0.6, zorder=0)


def _legend(figure: Figure, methods: Sequence[str], x: float, y: float) -> None:
    for name in methods:
        text = write(figure, x + 0.2, y, name, size=SMALL, va="center_baseline")
        figure.add_artist(Line2D([x + 0.08], [y], transform=text.get_transform(), linestyle="", **_look(name, ROW)))
        x += 0.2 + text_width(figure, text) + 0.26


def _log_axis(axes: Axes, values: np.ndarray) -> float:
    """Set up the axis for these values, and give the place on it of those that have no logarithm."""
    positive = values[values > 0]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.1, 1.0)
    pad = 1.08 * (high / low) ** 0.03
    start, end = low / pad, high * pad
    subs = (1.0, 2.0, 5.0) if math.log10(high / low) < 2.5 else (1.0,)
    ticks = [t for t in LogLocator(subs=subs, numticks=9).tick_values(start, end) if start <= t <= end]
    if len(ticks) < 2:
        ticks = [t for t in MaxNLocator(4).tick_values(start, end) if start <= t <= end]
    labels = [_number(t) for t in ticks]
    zero = start / (end / start) ** 0.06
    if bool((values <= 0).any()):
        axes.axvline(start, color=QUIET, linewidth=0.8)
        ticks, labels = [zero, *ticks], ["≤ 0" if bool((values < 0).any()) else "0", *labels]
    axes.set_xscale("log")
    axes.set_xlim(min(ticks[0], start), end)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, labels)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    return zero


def _number(value: float) -> str:
    if 1e-3 <= value < 1e5:
        return f"{value:.6g}"
    return f"$\\mathdefault{{10^{{{round(math.log10(value))}}}}}$"

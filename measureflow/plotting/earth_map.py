"""The flat map: longitude and latitude in degrees, with coastlines."""

import os
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.ticker import FixedLocator, FuncFormatter

from measureflow.measures import MeasurePairs, TokenMeasure
from measureflow.plotting.coastlines import land_on_map
from measureflow.plotting.labels import MARGIN, header, label_marks
from measureflow.plotting.projections import map_pieces, to_lonlat
from measureflow.plotting.scene import scene_of
from measureflow.plotting.style import (
    COAST,
    FAINT,
    LAND,
    SEA,
    check_figure_file,
    finish,
    new_figure,
    page,
    pair_colours,
)
from measureflow.plotting.tokens import dot_areas, mixed_order
from measureflow.trajectory import Trajectory


def draw_map(
    given: Trajectory | MeasurePairs | TokenMeasure,
    file: str | os.PathLike[str] | None = None,
    *,
    targets: TokenMeasure | None = None,
    names: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw measures on S² on a flat map of the whole sphere (equirectangular), a trajectory with its paths.

    A path across the date line is cut there and goes on at the other edge of the map. Coastlines are drawn for
    places on the Earth. Marks as in `draw_sphere`.

    Args:
        given: a trajectory, pairs (sources as dots, targets as rings) or measures, with d = 3.
        file: .png, .pdf or .svg to save it in.
        targets: where the measures should end; one per measure.
        names: of the measures, written as they are.
        title: one line above the picture.

    Raises:
        ValueError: d is not 3; targets, names or suffix do not fit.
        OSError: the file cannot be written.

    >>> import torch
    >>> figure = draw_map(TokenMeasure(torch.eye(3), globe=True))
    """
    check_figure_file(file)
    scene = scene_of(given, targets, names)
    if scene.dim != 3:
        raise ValueError(f"a map needs d = 3, got d = {scene.dim}; draw_sphere draws any d")
    with page():
        width, map_height, foot = 10.0, 4.575, 0.7
        figure = new_figure(width)
        colours = pair_colours(scene.places.shape[1])
        head = header(figure, scene.names, colours, title) + 0.08
        figure.set_figheight(height := head + map_height + foot)
        axes = figure.add_axes((0.55 / width, foot / height, (width - 0.85) / width, map_height / height))
        axes.set(xlim=(-180, 180), ylim=(-90, 90), aspect="equal", facecolor=SEA if scene.globe else "white")
        for axis, hemispheres, step in ((axes.xaxis, "EW", 60), (axes.yaxis, "NS", 30)):
            # The edges carry no label: 180 degrees stands on both, and the poles are lines.
            axis.set_major_locator(FixedLocator([float(k * step) for k in range(-2, 3)]))
            axis.set_major_formatter(FuncFormatter(_degrees(hemispheres)))
        axes.tick_params(length=0, labelsize=10)
        axes.spines[:].set(visible=True, color=FAINT)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.set_axisbelow(False)
        if scene.globe:
            axes.add_patch(PathPatch(land_on_map(), facecolor=LAND, edgecolor=COAST, linewidth=0.5, zorder=0.5))

        order = mixed_order(scene.weights)
        areas = 0.7 * dot_areas(scene.weights, order)
        by_pair = [colours[i] for i in order[0]]
        lonlat = to_lonlat(scene.places)
        marks = ["token" if scene.targets is None else "source"]
        if len(lonlat) > 1:
            marks = ["start", "end"]
            for pair, colour in enumerate(colours):
                real = scene.weights[pair] > 0
                line = _broken([piece for track in lonlat[:, pair, real].swapaxes(0, 1) for piece in map_pieces(track)])
                axes.add_line(Line2D(*line.T, color=colour, alpha=0.5, linewidth=0.9, zorder=3))
            axes.scatter(*lonlat[0][order].T, s=0.3 * areas, c=by_pair, linewidths=0, alpha=0.55, zorder=4)
        axes.scatter(*lonlat[-1][order].T, s=areas, c=by_pair, linewidths=0.4, edgecolors="white", zorder=6)
        if scene.targets is not None and scene.target_weights is not None:
            order = mixed_order(scene.target_weights)
            ring_areas = 1.2 * dot_areas(scene.target_weights, order)
            rings = {"facecolors": "none", "edgecolors": [colours[i] for i in order[0]], "linewidths": 0.9}
            axes.scatter(*to_lonlat(scene.targets)[order].T, s=ring_areas, zorder=5, **rings)
            marks.append("target")
        label_marks(figure, marks, MARGIN, 0.22)
        return finish(figure, file)


def _degrees(hemispheres: str) -> Callable[[float, int | None], str]:
    def label(value: float, _: int | None) -> str:
        letter = "" if value in (0, 180, -180) else hemispheres[0] if value > 0 else hemispheres[1]
        return f"{abs(value):.0f}°{letter}"

    return label


def _broken(pieces: Sequence[np.ndarray]) -> np.ndarray:
    gap = np.full((1, 2), np.nan)
    return np.concatenate([part for piece in pieces for part in (piece, gap)])

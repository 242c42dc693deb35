"""Tokens on the circle (d = 2): angle against time."""

import os
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MultipleLocator

from measureflow.measures import TokenMeasure
from measureflow.plotting.labels import MARGIN, NAME, SMALL, header, label_marks
from measureflow.plotting.projections import map_pieces
from measureflow.plotting.scene import scene_of
from measureflow.plotting.stages import stage_spans
from measureflow.plotting.style import FAINT, QUIET, check_figure_file, finish, new_figure, page, pair_colours
from measureflow.trajectory import Trajectory


def draw_circle(
    path: Trajectory,
    file: str | os.PathLike[str] | None = None,
    *,
    targets: TokenMeasure | None = None,
    names: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the angles of tokens on the circle against time; a path through 180 degrees goes on at the other edge.

    Args:
        path: what `flow` has returned, with d = 2.
        file: .png, .pdf or .svg to save it in.
        targets: where the measures should end, drawn as rings at the right; one per measure.
        names: of the measures, written as they are.
        title: one line above the picture.

    Raises:
        ValueError: d is not 2; targets, names or suffix do not fit.
        OSError: the file cannot be written.
    """
    check_figure_file(file)
    scene = scene_of(path, targets, names)
    if scene.dim != 2:
        raise ValueError(f"angle against time needs d = 2, got d = {scene.dim}; draw_sphere draws any d")
    with page():
        width, plot_height, foot = 8.0, 4.2, 0.85
        figure = new_figure(width)
        colours = pair_colours(scene.places.shape[1])
        head = header(figure, scene.names, colours, title) + 0.25
        figure.set_figheight(height := head + plot_height + foot)
        axes = figure.add_axes((0.85 / width, foot / height, (width - 1.15) / width, plot_height / height))
        first, last = float(scene.times[0]), float(scene.times[-1])
        axes.set(xlim=(first, last if last > first else first + 1), ylim=(-180, 180))
        axes.set_xlabel("time", fontsize=NAME)
        axes.set_ylabel("angle", fontsize=NAME)
        axes.yaxis.set_major_locator(MultipleLocator(90))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}°".replace("-", "−")))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
        spans = stage_spans(path)
        for stage, begin, _ in spans if any(path.stages) else []:
            axes.axvline(begin, color=FAINT, linewidth=0.7, zorder=1)
            if len(spans) <= 8:
                axes.text(
                    begin, 184, f" {stage}", parse_math=False, fontsize=SMALL, color=QUIET, va="bottom", clip_on=False
                )

        angles = np.degrees(np.arctan2(scene.places[..., 1], scene.places[..., 0]))
        for pair, colour in enumerate(colours):
            for row in np.flatnonzero(scene.weights[pair] > 0):
                for time, angle in _pieces(scene.times, angles[:, pair, row]):
                    axes.add_line(Line2D(time, angle, color=colour, linewidth=1.1, alpha=0.8, zorder=2))
        if scene.targets is not None and scene.target_weights is not None:
            look = {"s": 42, "facecolors": "none", "linewidths": 1.3, "clip_on": False, "zorder": 5}
            for pair, colour in enumerate(colours):
                ends = scene.targets[pair, scene.target_weights[pair] > 0]
                place = np.degrees(np.arctan2(ends[:, 1], ends[:, 0]))
                axes.scatter(np.full(len(place), axes.get_xlim()[1]), place, edgecolors=colour, **look)
            label_marks(figure, ["target"], MARGIN, 0.22)
        return finish(figure, file)


def _pieces(times: np.ndarray, angles: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    # The cut at 180 degrees is the map's, with time in the place of latitude.
    return [(piece[:, 1], piece[:, 0]) for piece in map_pieces(np.stack([angles, times], -1))]

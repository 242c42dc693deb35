"""Trajectories and measures on the sphere, seen from one side."""

import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

from measureflow.measures import MeasurePairs, TokenMeasure
from measureflow.plotting.globe import add_ball, add_targets, add_tokens, move_tokens, move_trails, turn_ball
from measureflow.plotting.labels import MARGIN, SMALL, header, label_marks, write
from measureflow.plotting.projections import camera, facing
from measureflow.plotting.scene import Scene, chart_of, scene_of
from measureflow.plotting.style import QUIET, check_figure_file, finish, new_figure, page, pair_colours
from measureflow.plotting.tokens import dot_areas, mixed_order
from measureflow.trajectory import Trajectory


def draw_sphere(
    given: Trajectory | MeasurePairs | TokenMeasure,
    file: str | os.PathLike[str] | None = None,
    *,
    targets: TokenMeasure | None = None,
    names: Sequence[str] | None = None,
    view: tuple[float | int, float | int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw measures on the sphere in orthographic projection; a trajectory with its paths.

    A path fades towards its start, which is a small pale dot; its end is a dot, a target is a hollow ring. The Earth
    has coastlines, and what is behind it is hidden; behind any other ball things are faded. d = 2 is drawn as a circle
    whose paths run from the inside to the rim (`draw_circle` shows angle against time); d > 3 by its three principal
    axes (`scene.chart_of`), and the page says how much of the variance they keep.

    Args:
        given: a trajectory, pairs (sources as dots, targets as rings) or measures.
        file: .png, .pdf or .svg to save it in.
        targets: where the measures should end; one per measure.
        names: of the measures, written as they are.
        view: longitude and latitude (degrees) of the middle of the page; None faces the mean of start and end.
        title: one line above the picture.

    Raises:
        ValueError: targets, names or suffix do not fit.
        OSError: the file cannot be written.

    >>> import torch
    >>> figure = draw_sphere(TokenMeasure(torch.eye(3)), title="Three corners")
    """
    check_figure_file(file)
    scene = scene_of(given, targets, names)
    with page():
        chart, note = chart_of(scene)
        figure = new_figure(side := 6.4)
        head = header(figure, scene.names, pair_colours(scene.places.shape[1]), title)
        figure.set_figheight(height := head + side + (foot := 0.45))
        axes = figure.add_axes((0.0, foot / height, 1.0, side / height))
        space = scene.places @ chart.T
        marks = draw_ball(axes, scene, space, chart, seen_from(scene, space, view), width=side)
        label_marks(figure, marks, MARGIN, 0.24)
        if note:
            write(figure, side - MARGIN, 0.24, note, size=SMALL, va="center_baseline", ha="right", color=QUIET)
        return finish(figure, file)


def seen_from(
    scene: Scene, space: Float[ndarray, "T N n 3"], view: tuple[float | int, float | int] | None
) -> Float[ndarray, "3 3"]:
    """The camera of a still picture: the one asked for, or one that faces the mean of start and end."""
    if scene.dim == 2:
        return np.eye(3)
    return camera(*(view or facing(space[[0, -1]], scene.weights)))


def draw_ball(
    axes: Axes,
    scene: Scene,
    space: Float[ndarray, "T N n 3"],
    chart: Float[ndarray, "3 d"],
    rotation: Float[ndarray, "3 3"],
    *,
    width: float,
    with_targets: bool = True,
) -> list[str]:
    """Draw paths from their first to their last point on a ball; give the kinds of marks that were used.

    Args:
        axes: to draw on.
        scene: what is drawn.
        space: points in R^3, as the chart shows them.
        chart: of the targets.
        rotation: the camera's.
        width: of the ball on the page, in inches.
        with_targets: whether to draw the targets, if the scene has some.
    """
    scale = min(1.0, 0.45 + 0.55 * width / 6)
    colours = pair_colours(space.shape[1])
    ball = add_ball(axes, globe=scene.globe, scale=scale)
    if scene.dim != 2:
        turn_ball(ball, rotation)
    order = mixed_order(scene.weights)
    areas = dot_areas(scene.weights, order, width)
    by_pair = [colours[i] for i in order[0]]
    seen = space @ rotation.T
    trails = colours if len(space) > 1 else []
    dots = add_tokens(axes, by_pair, areas, globe=scene.globe, trails=trails, scale=scale)
    move_tokens(dots, seen[-1][order])
    marks = ["token" if scene.targets is None else "source"]
    if trails:
        marks = ["start", "end"]
        if scene.dim == 2:
            seen = seen * np.linspace(0.6, 1, len(seen))[:, None, None, None]
        paths = seen.transpose(1, 2, 0, 3)
        move_trails(dots, [path[real] for path, real in zip(paths, scene.weights > 0, strict=True)])
        starts = add_tokens(axes, by_pair, 0.3 * areas, globe=scene.globe, scale=0.0)
        move_tokens(starts, seen[0][order])
        starts.near.set(alpha=0.55, zorder=5.5)
    if with_targets and scene.targets is not None and scene.target_weights is not None:
        order = mixed_order(scene.target_weights)
        ring_colours = [colours[i] for i in order[0]]
        rings = add_targets(
            axes, ring_colours, 1.7 * dot_areas(scene.target_weights, order, width), globe=scene.globe, scale=scale
        )
        move_tokens(rings, (scene.targets @ chart.T @ rotation.T)[order])
        marks.append("target")
    return marks

"""A construction stage by stage: one small ball after each."""

import math
import os
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from measureflow.measures import TokenMeasure
from measureflow.plotting.labels import MARGIN, NAME, SMALL, header, label_marks, write
from measureflow.plotting.scene import chart_of, scene_of
from measureflow.plotting.sphere import draw_ball, seen_from
from measureflow.plotting.style import QUIET, check_figure_file, finish, new_figure, page, pair_colours
from measureflow.trajectory import Trajectory

COLUMNS = 4
SIDE, CAPTION = 2.5, 0.42  # inches: a ball, and the words above it


def draw_stages(
    path: Trajectory,
    file: str | os.PathLike[str] | None = None,
    *,
    targets: TokenMeasure | None = None,
    names: Sequence[str] | None = None,
    view: tuple[float | int, float | int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the start, and the tokens after each stage of a transformer with their paths within it.

    Layers in a row with the same stage are one stage. All balls are seen from the same side. Store enough times
    (`flow(theta, measures, times=theta.even_times(200))`): between them paths are great circles.

    Args:
        path: what `flow` has returned.
        file: .png, .pdf or .svg to save it in.
        targets: where the measures should end, drawn as rings on the first and the last ball; one per measure.
        names: of the measures, written as they are.
        view: longitude and latitude (degrees) of the middle of each ball; None faces the mean of start and end.
        title: one line above the picture.

    Raises:
        ValueError: targets, names or suffix do not fit.
        OSError: the file cannot be written.
    """
    check_figure_file(file)
    scene = scene_of(path, targets, names)
    spans = stage_spans(path)
    with page():
        chart, note = chart_of(scene)
        colours = pair_colours(scene.places.shape[1])
        rows = math.ceil((len(spans) + 1) / COLUMNS)
        columns = math.ceil((len(spans) + 1) / rows)
        width, foot = SIDE * columns + 0.2, 0.35
        figure = new_figure(width)
        head = header(figure, scene.names, colours, title)
        figure.set_figheight(height := head + rows * (SIDE + CAPTION) + foot)
        rotation = seen_from(scene, scene.places @ chart.T, view)
        captions = [("start", float(scene.times[0])), *((stage, end) for stage, _, end in spans)]
        for k, (stage, time) in enumerate(captions):
            row, column = divmod(k, columns)
            left, low = 0.1 + column * SIDE, height - head - (row + 1) * (SIDE + CAPTION)
            axes = figure.add_axes((left / width, low / height, SIDE / width, SIDE / height))
            begin = spans[k - 1][1] if k > 0 else time
            inside = scene.times[(scene.times > begin) & (scene.times < time)]
            times = [begin, *inside, time]
            points = np.stack([path.at(float(t)).points.detach().double().cpu().numpy() for t in times])
            space = points.reshape(len(points), *scene.places.shape[1:]) @ chart.T
            last = k == len(captions) - 1
            draw_ball(axes, scene, space, chart, rotation, width=SIDE, with_targets=last or k == 0)
            above, right = low + SIDE + 0.06, left + SIDE - 0.15
            write(figure, left + 0.15, above, stage, size=NAME, weight="bold", va="bottom")
            write(figure, right, above, f"t = {time:.3g}", size=SMALL, va="bottom", ha="right", color=QUIET)
        label_marks(figure, ["start", "end", *(["target"] if scene.targets is not None else [])], MARGIN, 0.18)
        if note:
            write(figure, width - MARGIN, 0.18, note, size=SMALL, va="center_baseline", ha="right", color=QUIET)
        return finish(figure, file)


def stage_spans(path: Trajectory) -> list[tuple[str, float, float]]:
    """Stage, begin and end of each run of layers with one stage, within the stored times.

    Layers without a stage are called after their number.
    """
    first, last = float(path.times[0]), float(path.times[-1])
    spans: list[tuple[str, float, float]] = []
    for k, stage in enumerate(path.stages):
        begin, end = max(path.switch_times[k], first), min(path.switch_times[k + 1], last)
        name = stage or f"layer {k}"
        if begin >= end:
            continue
        if spans and spans[-1][0] == name:
            begin = spans.pop()[1]
        spans.append((name, begin, end))
    return spans

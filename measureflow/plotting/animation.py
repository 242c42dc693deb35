"""Movies of a trajectory: tokens on a turning ball, with their trails, their targets, time and stage."""

import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy import ndarray

from measureflow import sphere
from measureflow.files import atomic_write
from measureflow.measures import TokenMeasure
from measureflow.plotting.globe import add_ball, add_targets, add_tokens, move_tokens, move_trails, turn_ball
from measureflow.plotting.labels import MARGIN, SMALL, header, label_marks, write
from measureflow.plotting.movie_files import WRITERS, Frame, check_movie_file
from measureflow.plotting.projections import camera, facing
from measureflow.plotting.scene import Scene, chart_of, scene_of
from measureflow.plotting.style import FAINT, INK, PAGE, QUIET, new_figure, page, pair_colours
from measureflow.plotting.tokens import dot_areas, mixed_order
from measureflow.progress import progress_over
from measureflow.trajectory import Trajectory

STILL = (0.03, 0.1)  # shares of the movie that stand still at the start and at the end
INWARD = 0.25  # how far the trail of a token on the circle reaches towards the centre


def animate(
    path: Trajectory,
    file: str | os.PathLike[str],
    *,
    targets: TokenMeasure | None = None,
    names: Sequence[str] | None = None,
    seconds: float | int = 12,
    fps: float | int = 25,
    size: tuple[int, int] = (720, 720),
    pace: str = "distance",
    turn: float | int = 60,
    trail: float | int = 1,
    view: tuple[float | int, float | int] | None = None,
    title: str | None = None,
    progress: bool = True,
) -> Path:
    """Make a movie of tokens that move on the sphere; equal arguments give equal bytes (with the same ffmpeg).

    Between stored times tokens follow great circles, so store enough of them: `flow(theta, measures, times=300)`.
    The first and the last picture stand still for a moment while the camera goes on turning. Tokens behind the Earth
    are hidden, those behind any other ball are faded. d = 2 is drawn as a circle, without camera; d > 3 by its three
    principal axes (`scene.chart_of`), and the page says how much of the variance they keep.

    Args:
        path: what `flow` has returned.
        file: ends in .mp4 (needs ffmpeg: pip install measureflow[mp4]) or .gif.
        targets: where the measures should end, drawn as hollow rings; one per measure.
        names: of the measures, written as they are.
        seconds: length of the movie.
        fps: frames a second; at most 50 in a gif.
        size: width and height in pixels, at least 64 each; odd ones are rounded up to even ones, which mp4 needs.
        pace: "distance" gives each frame about the same mean displacement of tokens (a construction spends most of
            its time where little moves); "time" gives each frame the same time.
        turn: degrees by which the camera moves eastward around the ball in all.
        trail: seconds of the movie that a trail shows; 0 draws none.
        view: longitude and latitude (degrees) of the middle of the page, half-way through the movie; None faces the
            mean of start and end.
        title: one line above the picture.
        progress: show a bar when it takes more than a second.

    Returns:
        The path of the file.

    Raises:
        ValueError: unknown suffix or pace, no frames, a size, targets or names that do not fit, or a token jumps to
            its antipode between two stored times.
        MissingExtraError: an mp4 is asked for and there is no ffmpeg.
        OSError: the file cannot be written; what was there before is unchanged.

    >>> import tempfile, torch
    >>> from measureflow.flow import flow
    >>> from measureflow.transformer import Layer, Transformer, constant_drift
    >>> theta = Transformer([Layer(perceptron=constant_drift(torch.tensor([0.0, 0.0, 1.0])), stage="rise")])
    >>> path = flow(theta, TokenMeasure(torch.eye(3)), times=20)
    >>> animate(path, Path(tempfile.mkdtemp()) / "rise.gif", seconds=0.2, size=(96, 96), progress=False).name
    'rise.gif'
    """
    frames = _frame_count(seconds, fps)
    width, height = _even(size)
    if not (0 <= trail < math.inf and math.isfinite(turn)):
        raise ValueError(f"trail, turn: expected seconds of at least 0 and finite degrees, got {trail} and {turn}")
    if not isinstance(path, Trajectory):
        raise TypeError(f"path: expected the Trajectory that `flow` returns, got {type(path).__name__}")
    scene = scene_of(path, targets, names)
    times = frame_times(path, frames, pace)
    check_movie_file(file, fps)
    writer = WRITERS[Path(file).suffix.lower()]
    with page():
        draw = _painter(path, scene, times, (width, height), round(trail * fps), turn, view, title)
        # The palette of a gif needs some frames before the first.
        samples = [draw(i) for i in sorted({0, frames // 3, 2 * frames // 3, frames - 1})]
        with progress_over("animate", frames, shown=progress) as advance, atomic_write(file) as partial:

            def drawn() -> Iterator[Frame]:
                for i in range(frames):
                    yield draw(i)
                    advance(path.stage_at(times[i]))

            writer(partial, drawn(), fps, samples, [*PAGE, *pair_colours(len(scene.weights))])
    return Path(file)


def frame_times(path: Trajectory, frames: int, pace: str) -> list[float]:
    """The time that each frame of a movie shows; the first and last few show the start and the end.

    By distance, no two frames in a row are further apart than L / (m - 1) in mean displacement of tokens, where L is
    the mean length of their paths and m the number of frames that do not stand still; they are exactly as far apart
    where both lie between the same two stored times, and closer only where tokens turn between the two.

    Args:
        path: the trajectory.
        frames: number of frames.
        pace: "distance" or "time", see `animate`.

    Raises:
        ValueError: no such pace.
    """
    if pace not in ("distance", "time"):
        raise ValueError(f"pace: expected 'distance' or 'time', got {pace!r}")
    times = path.times.detach().double().cpu().numpy()
    before, after = (int(share * frames) for share in STILL)
    moving = np.linspace(0, 1, frames - before - after) if frames > 1 else np.ones(1)
    share = np.concatenate([np.zeros(before), moving, np.ones(after)])
    gone = np.concatenate([[0.0], np.cumsum(_displacements(path))])
    if pace == "time" or gone[-1] == 0:
        gone = times - times[0]
    if gone[-1] == 0:
        return [float(times[0])] * frames
    # Stretches where nothing moves are passed over.
    shown = np.interp(share * gone[-1], gone, times)
    shown[share == 0], shown[share == 1] = times[0], times[-1]
    return [float(t) for t in shown.clip(times[0], times[-1])]


def _displacements(path: Trajectory) -> Float[ndarray, " steps"]:
    """Mean angle by which tokens move between stored times, all measures alike."""
    points = path.points.detach()
    step = (sphere.distance(points[:-1], points[1:]) * path.weights.detach()).sum(-1)
    return step.reshape(len(points) - 1, path.weights[..., 0].numel()).mean(-1).double().cpu().numpy()


def _frame_count(seconds: float | int, fps: float | int) -> int:
    if not (0 < seconds < math.inf and 0 < fps < math.inf):
        raise ValueError(f"seconds, fps: expected positive numbers, got {seconds} and {fps}")
    frames = round(seconds * fps)
    if frames == 0:
        raise ValueError(f"{seconds} seconds at {fps} frames a second are no frames; make it longer")
    return frames


def _even(size: tuple[int, int]) -> tuple[int, int]:
    if not (
        isinstance(size, Sequence) and len(size) == 2 and all(isinstance(side, int) and side >= 64 for side in size)
    ):
        raise ValueError(f"size: expected width and height of at least 64 pixels, got {size}")
    return size[0] + size[0] % 2, size[1] + size[1] % 2


def _painter(
    path: Trajectory,
    scene: Scene,
    times: list[float],
    size: tuple[int, int],
    trail: int,
    turn: float | int,
    view: tuple[float | int, float | int] | None,
    title: str | None,
) -> Callable[[int], Frame]:
    """A function that draws frame i; every frame has exactly `size` pixels."""
    width, height = size
    # The page is 7.2 inches wide or high, whichever is less, so that letters and dots grow with the movie.
    dpi = min(size) / 7.2
    figure = new_figure((width + 0.01) / dpi, (height + 0.01) / dpi, dpi)
    canvas: Any = figure.canvas
    chart, note = chart_of(scene)
    colours = pair_colours(scene.places.shape[1])
    head = header(figure, scene.names, colours, title)
    if scene.targets is not None:
        label_marks(figure, ["target"], MARGIN, 0.82)
    show_time = _footer(figure, path, times, note)
    figure_height, foot = figure.get_figheight(), 0.75
    axes = figure.add_axes((0.0, foot / figure_height, 1.0, 1 - (head + foot) / figure_height))
    flat = scene.dim == 2

    order = mixed_order(scene.weights)
    ball = add_ball(axes, globe=scene.globe)
    dots = add_tokens(
        axes, [colours[i] for i in order[0]], dot_areas(scene.weights, order), globe=scene.globe, trails=colours
    )
    rings, ends, ring_order = None, None, None
    if scene.targets is not None and scene.target_weights is not None:
        ring_order = mixed_order(scene.target_weights)
        ends = scene.targets @ chart.T
        areas = 1.6 * dot_areas(scene.target_weights, ring_order)
        rings = add_targets(axes, [colours[i] for i in ring_order[0]], areas, globe=scene.globe)
    middle = view or facing(scene.places[[0, -1]] @ chart.T, scene.weights)
    recent: deque[tuple[int, ndarray]] = deque(maxlen=trail + 1)

    def places(i: int) -> Float[ndarray, "steps N n 3"]:
        """Where the tokens are since the frame before, in steps as short as the scene's; the last is the frame's."""
        points = path.at(times[i]).points.detach().double().cpu().numpy().reshape(1, *scene.places.shape[1:])
        between = (scene.times > times[max(i - 1, 0)]) & (scene.times < times[i])
        return np.concatenate([scene.places[between], points]) @ chart.T

    def draw(i: int) -> Frame:
        wanted = range(max(0, i - trail), i + 1)
        known = dict(recent)
        recent.clear()
        recent.extend((k, known[k] if k in known else places(k)) for k in wanted)
        rotation = np.eye(3)
        if not flat:
            share = i / max(len(times) - 1, 1)
            rotation = camera(middle[0] + turn * (share - 0.5), middle[1])
            turn_ball(ball, rotation)
        steps = [part if k > wanted[0] else part[-1:] for k, part in recent]
        seen = np.concatenate(steps) @ rotation.T
        move_tokens(dots, seen[-1][order])
        if rings is not None and ends is not None and ring_order is not None:
            move_tokens(rings, (ends @ rotation.T)[ring_order])
        if len(seen) > 1:
            if flat:
                # On a circle trails would hide each other: the past lies further in.
                shown = [np.linspace(k - 1, k, len(part) + 1)[1:] for k, part in zip(wanted, steps, strict=True)]
                age = (i - np.concatenate(shown)) / trail
                seen = seen * (1 - INWARD * age[:, None, None, None])
            paths = seen.transpose(1, 2, 0, 3)
            move_trails(dots, [path[real] for path, real in zip(paths, scene.weights > 0, strict=True)])
        show_time(i)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()

    return draw


def _footer(figure: Figure, path: Trajectory, times: list[float], note: str) -> Callable[[int], None]:
    """Stage, time, and a line of the movie's length in pieces, one a stage, that fills as it plays."""
    left, right = MARGIN, figure.get_figwidth() - MARGIN
    stage = write(figure, left, 0.42, "", size=13, weight="bold", va="bottom")
    clock = write(figure, right, 0.42, "", size=13, va="bottom", ha="right", color=QUIET)
    if note:
        write(figure, right, 0.82, note, size=SMALL, va="center_baseline", ha="right", color=QUIET)
    stages = [path.stage_at(t) for t in times]
    switches = [0, *(i for i in range(1, len(times)) if stages[i] != stages[i - 1]), len(times)]
    unit, gap = (right - left) / len(times), 0.03
    line = {"transform": figure.dpi_scale_trans, "linewidth": 3.0, "solid_capstyle": "butt"}
    spans = [(left + a * unit, left + b * unit - gap) for a, b in pairwise(switches)]
    for begin, end in spans:
        figure.add_artist(Line2D([begin, end], [0.28, 0.28], color=FAINT, **line))
    filled = [Line2D([], [], color=INK, **line) for _ in spans]
    for bar in filled:
        figure.add_artist(bar)
    digits = max(0, 2 - math.floor(math.log10(times[-1]))) if times[-1] > 0 else 0

    def show(i: int) -> None:
        current = bisect_right(switches, i) - 1
        for k, ((begin, end), bar) in enumerate(zip(spans, filled, strict=True)):
            upto = end if k < current else min(end, left + (i + 1) * unit)
            bar.set_data(*(([begin, upto], [0.28, 0.28]) if k <= current and upto > begin else ([], [])))
        stage.set_text(stages[i])
        clock.set_text(f"t = {times[i]:.{digits}f}")

    return show

"""The ball on the page: disc, graticule, land, and the tokens on it, which can be turned and moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, PathPatch
from matplotlib.path import Path
from numpy import ndarray

from measureflow.plotting.coastlines import land_from
from measureflow.plotting.projections import is_front, split_at_horizon
from measureflow.plotting.style import BALL, COAST, FAINT, LAND, QUIET, SEA

FADED = 0.16  # opacity of what is behind a ball without land; behind the Earth nothing shows
TAIL = (0.75, 0.5, 0.3, 0.15)  # opacity of the parts of a trail, newest first


@dataclass(frozen=True, eq=False)
class Ball:
    """What changes on the page when the ball is turned."""

    near: Line2D
    far: Line2D
    land: PathPatch | None


@dataclass(frozen=True, eq=False)
class Tokens:
    """What changes on the page when tokens move: dots and trails, in front and behind."""

    near: PathCollection
    far: PathCollection | None
    near_trails: Sequence[Sequence[Line2D]]
    far_trails: Sequence[Sequence[Line2D]]


def add_ball(axes: Axes, *, globe: bool, scale: float = 1.0) -> Ball:
    """Draw the unit disc that the sphere is on the page; the Earth gets land.

    Args:
        axes: to draw on; they become square and without frame.
        globe: whether to draw land.
        scale: of line widths.
    """
    axes.set(xlim=(-1.02, 1.02), ylim=(-1.02, 1.02), aspect="equal")
    axes.axis("off")
    disc = Circle((0, 0), 1, facecolor=SEA if globe else BALL, edgecolor="none", zorder=0)
    axes.add_patch(disc)
    axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor=QUIET, linewidth=0.9 * scale, zorder=9))
    land = None
    if globe:
        land = PathPatch(Path([(0, 0)]), facecolor=LAND, edgecolor=COAST, linewidth=0.5 * scale, zorder=3)
        axes.add_patch(land)
        land.set_clip_path(disc)
    grid = {"color": FAINT, "linewidth": 0.6 * scale, "solid_capstyle": "butt"}
    (near,) = axes.plot([], [], zorder=4, **grid)
    (far,) = axes.plot([], [], zorder=1, alpha=0.0 if globe else 0.45, **grid)
    return Ball(near, far, land)


def turn_ball(ball: Ball, rotation: Float[ndarray, "3 3"]) -> None:
    """Show the ball as a camera (`projections.camera`) sees it."""
    for lines, part in zip((ball.near, ball.far), split_at_horizon(_graticule() @ rotation.T), strict=True):
        lines.set_data(*_broken(part))
    if ball.land is not None:
        ball.land.set_path(land_from(rotation))


def add_targets(
    axes: Axes, colours: Sequence[str], areas: Float[ndarray, " k"], *, globe: bool, scale: float = 1.0
) -> Tokens:
    """Hollow rings, to be placed by `move_tokens`."""
    return _dots(axes, {"facecolors": "none", "edgecolors": colours, "linewidths": 1.1 * scale}, areas, globe, 6.0)


def add_tokens(
    axes: Axes,
    colours: Sequence[str],
    areas: Float[ndarray, " k"],
    *,
    globe: bool,
    trails: Sequence[str] = (),
    scale: float = 1.0,
) -> Tokens:
    """Filled dots and, for each colour in `trails`, a trail; to be placed by `move_tokens` and `move_trails`.

    Args:
        axes: of a ball.
        colours, areas: of each dot; areas in points squared.
        globe: what is behind the Earth is hidden, behind any other ball faded.
        trails: colours of the trails, one a pair.
        scale: of line widths.
    """
    dots = _dots(axes, {"facecolors": colours, "edgecolors": "white", "linewidths": 0.4 * scale}, areas, globe, 7.0)

    def lines(opacity: float, zorder: float) -> list[list[Line2D]]:
        look = {"linewidth": 1.1 * scale, "solid_capstyle": "butt", "solid_joinstyle": "round", "zorder": zorder}
        return [[axes.plot([], [], color=colour, alpha=opacity * a, **look)[0] for a in TAIL] for colour in trails]

    return Tokens(dots.near, dots.far, lines(1.0, 5.0), [] if globe else lines(FADED, 1.5))


def move_tokens(tokens: Tokens, seen: Float[ndarray, "k 3"]) -> None:
    """Place the dots, as a camera sees them: each either in front or behind."""
    front = is_front(seen)[:, None]
    tokens.near.set_offsets(np.where(front, seen[:, :2], np.nan))
    if tokens.far is not None:
        tokens.far.set_offsets(np.where(front, np.nan, seen[:, :2]))


def move_trails(tokens: Tokens, seen: Sequence[Float[ndarray, "m T 3"]]) -> None:
    """Place the trails of each pair, oldest point first, fading with age; what is behind is cut at the horizon."""
    for pair, paths in enumerate(seen):
        near, far = split_at_horizon(paths)
        steps = near.shape[1] - 1
        ends = [steps - round(steps * share) for share in np.linspace(0, 1, len(TAIL) + 1)]
        for part, (end, begin) in enumerate(pairwise(ends)):
            tokens.near_trails[pair][part].set_data(*_broken(near[:, begin : end + 1]))
            if tokens.far_trails:
                tokens.far_trails[pair][part].set_data(*_broken(far[:, begin : end + 1]))


def _dots(axes: Axes, look: dict[str, object], areas: ndarray, globe: bool, zorder: float) -> Tokens:
    nowhere = np.zeros((len(areas), 2))

    def scatter(**options: object) -> PathCollection:
        return axes.scatter(*nowhere.T, s=areas, **look, **options)  # type: ignore[arg-type]

    return Tokens(scatter(zorder=zorder), None if globe else scatter(zorder=2, alpha=FADED), [], [])


def _broken(paths: Float[ndarray, "m T 2"]) -> Float[ndarray, "2 l"]:
    """One line through all paths, broken between them: one artist draws faster than many."""
    gap = np.full((len(paths), 1, 2), np.nan)
    return np.concatenate([paths, gap], axis=1).reshape(-1, 2).T


@cache
def _graticule() -> Float[ndarray, "m T 3"]:
    """Meridians every 30 degrees from 75 south to 75 north, and parallels every 30 degrees."""
    along = np.radians(np.linspace(0, 360, 145))
    polar = np.radians(np.linspace(-75, 75, 145))
    parallels = [np.broadcast_to(np.radians(lat), along.shape) for lat in range(-60, 61, 30)]
    meridians = [np.broadcast_to(np.radians(lon), polar.shape) for lon in range(0, 360, 30)]
    lam = np.stack([along] * len(parallels) + meridians)
    phi = np.stack([*parallels, *[polar] * len(meridians)])
    return np.stack([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)], -1)

"""How every figure looks: one set of matplotlib settings, colours by pair, text as given, files at once."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from measureflow.files import atomic_write

# Okabe and Ito's colours, distinct for colour-blind readers (jfly.uni-koeln.de/color); the strongest on white first.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
INK, QUIET, FAINT = "#222222", "#767676", "#D5D9DE"
SEA, LAND, COAST, BALL = "#F1F6FA", "#E4DFD3", "#A8A294", "#F8F9FB"
NAMED = 16  # more pairs than this are labelled by first and last only
SUFFIXES = (".png", ".pdf", ".svg")

_SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 11.0,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "svg.hashsalt": "measureflow",
    "svg.fonttype": "none",
}


@contextmanager
def page() -> Iterator[None]:
    """Draw with measureflow's settings, whatever the user's are; the user's come back afterwards.

    >>> before = matplotlib.rcParams["font.size"]
    >>> with page():
    ...     matplotlib.rcParams["font.size"]
    11.0
    >>> matplotlib.rcParams["font.size"] == before
    True
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def new_figure(width: float, height: float, dpi: float = 100.0) -> Figure:
    """A white figure of so many inches with a canvas of its own, unknown to pyplot."""
    figure = Figure((width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def pair_colours(n: int) -> list[str]:
    """Colours of `n` pairs: Okabe and Ito's up to 8, beyond that evenly along viridis without its palest end.

    >>> pair_colours(2)
    ['#0072B2', '#D55E00']
    """
    if n <= len(OKABE_ITO):
        return list(OKABE_ITO[:n])
    return [to_hex(colormaps["viridis"](0.92 * i / (n - 1))) for i in range(n)]


def write(figure: Figure, x: float, y: float, text: str, *, inches: bool = False, **options: object) -> object:
    """Put text on a figure as it is: `$` and `_` are characters, not formulas.

    Args:
        figure: to write on.
        x, y: shares of its width and height, or inches from its lower left corner.
        text: one line.
        inches: whether x and y are inches.
        options: of matplotlib's Text.
    """
    transform = figure.dpi_scale_trans if inches else figure.transFigure
    return figure.text(x, y, text, transform=transform, parse_math=False, **options)  # type: ignore[arg-type]


def label_pairs(
    figure: Figure, names: Sequence[str], colours: Sequence[str], left: float, top: float, size: float = 10.0
) -> float:
    """Write a coloured dot and its name for each pair, in rows from the left; give the height used.

    More than 16 pairs are labelled by a row of their colours between the first and the last name.

    Args:
        figure: to write on.
        names, colours: of the pairs.
        left, top: inches from the left and lower edge of the page; the first row hangs from `top`.
        size: of the letters, in points.
    """
    em = size / 72
    right = figure.get_figwidth() - left
    x, y = left, top - 0.75 * em
    if len(names) > NAMED:
        entries = [(names[0], list(colours)), (names[-1], [])]
    else:
        entries = [(name, [colour]) for name, colour in zip(names, colours, strict=True)]
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # Agg's canvas has one
    for name, dots in entries:
        text = write(figure, 0, 0, name, inches=True, size=size, va="center")
        text_width = text.get_window_extent(renderer).width / figure.dpi  # type: ignore[attr-defined]
        spread = min(0.8 * em, (right - left) / 2 / max(len(dots), 1))
        dots_width = spread * (len(dots) - 1) + 1.2 * em if dots else 0.0
        if x > left and x + dots_width + text_width > right:
            x, y = left, y - 1.6 * em
        if len(dots) > 1:  # the ramp stands between the first and the last name
            text.set_position((x, y))  # type: ignore[attr-defined]
            x += text_width + 0.8 * em
        for dot, colour in enumerate(dots):
            place = ([x + 0.4 * em + dot * spread], [y])
            mark = {"marker": "o", "markersize": 0.72 * size, "markeredgewidth": 0, "color": colour}
            figure.add_artist(Line2D(*place, transform=figure.dpi_scale_trans, **mark))
        x += dots_width
        if len(dots) <= 1:
            text.set_position((x, y))  # type: ignore[attr-defined]
            x += text_width + 1.4 * em
    return top - y + 0.75 * em


def check_figure_file(file: str | os.PathLike[str] | None) -> None:
    """Refuse a name that no figure can be saved under, before anything is drawn.

    Raises:
        ValueError: the suffix is not one of .png, .pdf, .svg.
    """
    if file is not None and Path(file).suffix.lower() not in SUFFIXES:
        raise ValueError(f"{file}: expected a file name that ends in one of {', '.join(SUFFIXES)}")


def finish(figure: Figure, file: str | os.PathLike[str] | None) -> Figure:
    """Save a figure, if a file is given, whole or not at all; equal figures give equal files.

    Raises:
        OSError: the file cannot be written.
    """
    if file is None:
        return figure
    suffix = Path(file).suffix.lower()
    # Dates would make each file another one.
    metadata = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}[suffix]
    with atomic_write(file) as partial:
        figure.savefig(partial, dpi=200, format=suffix[1:], metadata=metadata)
    return figure


def marker_area(weights_per_pair: int, page_width: float) -> float:
    """Area (points squared) of a dot so that the dots of one pair are dense but apart on a ball as wide as the page.

    >>> marker_area(88, 6.0) > marker_area(1000, 6.0)
    True
    """
    return float(min(max(page_width**2 * 72 / math.sqrt(max(weights_per_pair, 1)) / 9, 3.0), 60.0))

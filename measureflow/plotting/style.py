"""How every figure looks: one set of matplotlib settings, colours by pair, text as given, files at once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from measureflow.files import atomic_write

# Okabe and Ito's colours, distinct for colour-blind readers (jfly.uni-koeln.de/color); the strongest on white first.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
INK, QUIET, FAINT = "#222222", "#767676", "#D5D9DE"
SEA, LAND, COAST, BALL = "#F1F6FA", "#E4DFD3", "#A8A294", "#F8F9FB"
PAGE = ("#FFFFFF", INK, QUIET, FAINT, SEA, LAND, COAST, BALL)
SUFFIXES = (".png", ".pdf", ".svg")

_SETTINGS: dict[Any, Any] = {
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


def new_figure(width: float, height: float = 1.0, dpi: float = 100.0) -> Figure:
    """A white figure of so many inches with a canvas of its own, unknown to pyplot; its height may be set later."""
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

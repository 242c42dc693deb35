"""Words on a figure: title, names of pairs, kinds of marks; all text is shown as it was given."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation, Transform

from measureflow.plotting.style import QUIET

MARGIN = 0.3  # inches left free at the sides
NAMED = 16  # more pairs than this are labelled by first and last only
TITLE, NAME, SMALL = 15.0, 12.0, 10.0  # sizes in points


def from_edge(figure: Figure, y: float) -> Transform:
    """Inches from the left and from the lower edge of a page or, where y is negative, down from the upper edge."""
    if y >= 0:
        return figure.dpi_scale_trans
    page: Any = figure.transFigure  # an affine map, though typed as any transform
    return figure.dpi_scale_trans + ScaledTranslation(0, 1, page)


def write(figure: Figure, x: float, y: float, text: str, **options: Any) -> Text:
    """Put text on a figure as it is: `$` and `_` are characters, not formulas. For x and y see `from_edge`."""
    return figure.text(x, y, text, transform=from_edge(figure, y), parse_math=False, **options)


def header(figure: Figure, names: Sequence[str], colours: Sequence[str], title: str | None) -> float:
    """Title, and the names of the pairs with their colours, from the top; give the height (inches) that they take.

    A title or name too long for the page is set in smaller letters. Names run in rows; more than 16 pairs are labelled
    by their colours in a row between the first and the last name.
    """
    down = 0.15
    if title:
        text = write(figure, MARGIN, -down, title, size=TITLE, va="top", weight="bold")
        _fit(figure, text, figure.get_figwidth() - 2 * MARGIN)
        down += 0.42
    if not names:
        return down
    if len(names) <= NAMED:
        return down + _named_dots(figure, names, colours, down)
    return down + _ramp(figure, names, colours, down)


def _named_dots(figure: Figure, names: Sequence[str], colours: Sequence[str], down: float) -> float:
    right = figure.get_figwidth() - MARGIN
    x, y = MARGIN, -down - 0.12
    for name, colour in zip(names, colours, strict=True):
        text = write(figure, 0.0, y, name, size=NAME, va="center_baseline")
        _fit(figure, text, right - MARGIN - 0.2)
        wide = 0.2 + text_width(figure, text)
        if x > MARGIN and x + wide > right:
            x, y = MARGIN, y - 0.27
        text.set_position((x + 0.2, y))
        _dot(figure, x + 0.07, y, color=colour, markersize=8.5)
        x += wide + 0.24
    return 0.3 - y - down - 0.12


def _ramp(figure: Figure, names: Sequence[str], colours: Sequence[str], down: float) -> float:
    y = -down - 0.12
    first = write(figure, MARGIN, y, names[0], size=NAME, va="center_baseline")
    last = write(figure, 0.0, y, names[-1], size=NAME, va="center_baseline")
    for text in (first, last):
        _fit(figure, text, figure.get_figwidth() / 3)
    x = MARGIN + text_width(figure, first) + 0.2
    room = figure.get_figwidth() - MARGIN - x - text_width(figure, last) - 0.2
    step = min(0.13, max(room, 0.0) / len(colours))
    for colour in colours:
        _dot(figure, x, y, color=colour, markersize=7)
        x += step
    last.set_position((x + 0.06, y))
    return 0.3


def label_marks(figure: Figure, marks: Sequence[str], x: float, y: float) -> float:
    """Explain the marks that a picture uses, from (x, y) on (see `from_edge`); give their width in inches.

    A small dot is a start, a dot an end, a token or a source, a ring a target.
    """
    begin = x
    for mark in marks:
        size = {"start": 3.0, "end": 5.5, "token": 5.5, "source": 5.5, "target": 6.5}[mark]
        ring = {"markerfacecolor": "none", "markeredgewidth": 1.1} if mark == "target" else {}
        _dot(figure, x + 0.06, y, color=QUIET, markersize=size, **ring)
        text = write(figure, x + 0.17, y, mark, size=SMALL, va="center_baseline", color=QUIET)
        x += 0.17 + text_width(figure, text) + 0.25
    return x - begin - 0.25


def text_width(figure: Figure, text: Text) -> float:
    """Width in inches of text on a figure."""
    canvas: Any = figure.canvas  # Agg's, which can measure
    return text.get_window_extent(canvas.get_renderer()).width / figure.dpi


def _fit(figure: Figure, text: Text, room: float) -> None:
    width = text_width(figure, text)
    if width > room:
        text.set_fontsize(float(text.get_fontsize()) * room / width)


def _dot(figure: Figure, x: float, y: float, **look: Any) -> None:
    look = {"marker": "o", "markeredgewidth": 0, **look}
    figure.add_artist(Line2D([x], [y], transform=from_edge(figure, y), **look))

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from stories import along_the_equator, at_rest, clusters

from measureflow import sphere
from measureflow.measures import MeasurePairs, TokenMeasure
from measureflow.plotting import draw_circle, draw_map, draw_sphere, draw_stages, pair_colours
from measureflow.plotting.scene import chart_of, scene_of
from measureflow.plotting.stages import stage_spans
from measureflow.plotting.style import OKABE_ITO

ODD_NAMES = ["a_b $x^2$", "[a].csv", "pair[/b] \\alpha"]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def pixels(figure: Figure) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba()).copy()


@pytest.mark.parametrize("d", [2, 3, 5])
@pytest.mark.parametrize("draw", [draw_sphere, draw_stages])
def test_every_dimension_is_drawn(draw, d, tmp_path):
    path = clusters(d)
    figure = draw(path, tmp_path / "f.png", targets=path.start, names=["a", "b"], title="title")
    assert {"title", "a", "b", "target"} <= set(texts(figure))
    assert (tmp_path / "f.png").stat().st_size > 5000
    assert len(np.unique(pixels(figure).reshape(-1, 4), axis=0)) > 50  # not an empty page
    notes = [text for text in texts(figure) if "principal axes" in text]
    assert len(notes) == (d > 3)


@pytest.mark.parametrize("globe", [False, True])
def test_map_and_globe(globe):
    path = clusters(3, globe=globe)
    for draw in (draw_sphere, draw_map, draw_stages):
        assert isinstance(draw(path), Figure)


def test_pairs_and_measures_are_drawn_without_a_path():
    measures = clusters(3).start
    pairs = MeasurePairs(measures, measures, names=["a", "b"])
    for draw in (draw_sphere, draw_map):
        assert {"a", "b", "source", "target"} <= set(texts(draw(pairs)))
        assert "token" in texts(draw(measures[0]))


def test_circle_shows_each_stage_and_cuts_paths_at_180_degrees():
    figure = draw_circle(clusters(2), names=["a", "b"])
    axes = figure.axes[0]
    assert [text.get_text().strip() for text in axes.texts] == ["cluster", "drift"]
    for line in axes.lines:
        assert (np.abs(np.diff(line.get_ydata())) <= 180).all()


def test_stages_in_a_row_are_one_and_each_gets_a_ball():
    path = clusters(3)
    assert [(stage, round(begin, 9), round(end, 9)) for stage, begin, end in stage_spans(path)] == [
        ("cluster", 0.0, 1.0),
        ("drift", 1.0, 1.5),
    ]
    figure = draw_stages(path)
    assert len(figure.axes) == 3
    assert [text for text in texts(figure) if text in ("start", "cluster", "drift")].count("cluster") == 1


def test_padding_is_not_drawn():
    points = sphere.uniform(2, 5, 3, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([[0.2] * 5, [0.5, 0.5, 0.0, 0.0, 0.0]], dtype=torch.float64)
    padded = draw_sphere(TokenMeasure(points, weights), view=(10, 20))
    moved = points.clone()
    moved[1, 2:] = -points[1, 2:]
    assert (pixels(padded) == pixels(draw_sphere(TokenMeasure(moved, weights), view=(10, 20)))).all()
    near = next(c for c in padded.axes[0].collections if c.get_zorder() == 7)
    assert len(near.get_offsets()) == 7


def test_chart_keeps_distances_in_three_dimensions():
    scene = scene_of(clusters(3))
    assert (chart_of(scene)[0] == np.eye(3)).all()
    chart, note = chart_of(scene_of(clusters(5)))
    assert chart.shape == (3, 5)
    assert note.startswith("3 of 5 dimensions")


@pytest.mark.parametrize("view", [(0, 0), (90, 0), (180, 30), (-70, -60), (33, 90)])
@pytest.mark.parametrize("globe", [False, True])
def test_p44_a_dot_is_in_front_or_faded_or_hidden(view, globe):
    measure = TokenMeasure(sphere.uniform(300, 3, generator=torch.Generator().manual_seed(2)), globe=globe)
    figure = draw_sphere(measure, view=view)
    lam, phi = np.radians(view)
    towards = np.array([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)])
    in_front = (measure.points.numpy() @ towards >= 0).sum()
    by_zorder = {c.get_zorder(): c for c in figure.axes[0].collections}
    drawn = {z: np.isfinite(np.ma.filled(c.get_offsets(), np.nan)[:, 0]).sum() for z, c in by_zorder.items()}
    assert drawn[7] == in_front
    if globe:
        assert 2 not in drawn
    else:
        assert drawn[2] == 300 - in_front
        assert by_zorder[2].get_alpha() < 0.2
    # Nothing of the ball lies above a token in front, except the rim.
    assert all(patch.get_zorder() < 7 or patch.get_facecolor()[3] == 0 for patch in figure.axes[0].patches)


def test_p45_path_across_the_date_line_is_two_pieces_on_the_map():
    path = along_the_equator(torch.tensor([170.0, 175.0, -175.0, -170.0]).double(), torch.arange(4).double())
    line = draw_map(path).axes[0].lines[0]
    lon = np.asarray(line.get_xdata())
    assert np.nanmax(np.abs(np.diff(lon))) <= 10
    assert {180.0, -180.0} <= set(lon)


@pytest.mark.parametrize("draw", [draw_sphere, draw_map, draw_stages])
def test_p46_names_and_titles_are_shown_as_they_are(draw):
    figure = draw(clusters(3, n_measures=3), names=ODD_NAMES, title="$unclosed_{ [b]")
    assert {*ODD_NAMES, "$unclosed_{ [b]"} <= set(texts(figure))
    assert not any(text.get_parse_math() for text in figure.texts)
    pixels(figure)


@pytest.mark.parametrize("count", [2, 20])
def test_p46_long_names_and_titles_stay_on_the_page(count):
    figure = draw_sphere(clusters(3, n_measures=count), names=["a long name " * 20] * count, title="word " * 60)
    renderer = figure.canvas.get_renderer()
    for text in figure.texts:
        box = text.get_window_extent(renderer)
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_colours_are_distinct():
    assert pair_colours(8) == list(OKABE_ITO)
    for n in (1, 5, 9, 45):
        assert len(set(pair_colours(n))) == n


def test_many_pairs_are_labelled_by_first_and_last():
    names = [f"pair {i}" for i in range(20)]
    shown = texts(draw_sphere(clusters(3, n_measures=20), names=names))
    assert {"pair 0", "pair 19"} <= set(shown)
    assert "pair 5" not in shown


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_equal_figures_give_equal_files_whatever_the_settings(suffix, tmp_path):
    path = clusters(3, globe=True)
    draw_sphere(path, tmp_path / f"a.{suffix}", names=["a", "b"])
    with matplotlib.rc_context({"savefig.bbox": "tight", "font.size": 30, "lines.linewidth": 9, "figure.dpi": 31}):
        before = dict(matplotlib.rcParams)
        draw_sphere(path, tmp_path / f"b.{suffix}", names=["a", "b"])
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert plt.get_fignums() == []


@pytest.mark.bad_input
def test_bad_input_is_named(tmp_path):
    path = clusters(3)
    with pytest.raises(ValueError, match=r"f\.jpg: .*\.png, \.pdf, \.svg"):
        draw_sphere(path, tmp_path / "f.jpg")
    with pytest.raises(FileNotFoundError, match="no folder"):
        draw_sphere(path, tmp_path / "missing" / "f.png")
    with pytest.raises(ValueError, match="names: expected 2, one per measure, got 1"):
        draw_sphere(path, names=["a"])
    with pytest.raises(TypeError, match="names: expected a sequence of 2 texts"):
        draw_sphere(path, names="ab")
    with pytest.raises(ValueError, match="targets: expected 2, one per measure, got 1"):
        draw_sphere(path, targets=path.start[0])
    with pytest.raises(ValueError, match="targets: expected points in d = 3"):
        draw_sphere(path, targets=clusters(2).start)
    with pytest.raises(TypeError, match="expected a Trajectory"):
        draw_sphere(torch.eye(3))
    with pytest.raises(ValueError, match="a map needs d = 3, got d = 5"):
        draw_map(clusters(5))
    with pytest.raises(ValueError, match="needs d = 2, got d = 3"):
        draw_circle(path)
    assert list(tmp_path.iterdir()) == []


def test_one_measure_at_rest_is_drawn():
    assert isinstance(draw_stages(at_rest(torch.eye(3).double())), Figure)

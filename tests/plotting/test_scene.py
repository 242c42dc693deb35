from dataclasses import replace

import numpy as np
import pytest
import torch
from stories import along_the_equator, at_rest, clusters

from measureflow import sphere
from measureflow.plotting import draw_circle, draw_map, draw_sphere, draw_stages
from measureflow.plotting.scene import ARC, scene_of


def meridian_over_the_pole() -> torch.Tensor:
    """Two stored points 120 degrees apart, on either side of the North Pole."""
    return sphere.from_lonlat(torch.tensor([20.0, -160.0]).double(), torch.tensor([30.0, 30.0]).double())


def test_long_steps_are_drawn_along_great_circles():
    path = replace(at_rest(torch.eye(3).double()[:1]), points=meridian_over_the_pole()[:, None])
    scene = scene_of(path)
    places = scene.places[:, 0, 0]
    np.testing.assert_allclose(np.linalg.norm(places, axis=-1), 1, atol=1e-12)  # no chord through the ball
    normal = np.cross(*path.points[:, 0].numpy())
    np.testing.assert_allclose(places @ normal, 0, atol=1e-12)  # in the plane of the great circle
    steps = np.arccos((places[1:] * places[:-1]).sum(-1).clip(-1, 1))
    # acos loses half of the digits near 1, and steps of 5 degrees are near 1.
    np.testing.assert_allclose(steps, 2 * np.pi / 3 / len(steps), atol=1e-7)
    assert steps.max() <= ARC + 1e-7
    assert (np.diff(scene.times) > 0).all()


def test_stored_points_stay_and_short_steps_get_none_between():
    longitudes, times = torch.tensor([0.0, 4.0, 8.0, 23.0]).double(), torch.tensor([0.0, 1.0, 2.0, 4.0]).double()
    path = along_the_equator(longitudes, times)
    scene = scene_of(path)
    assert scene.times.tolist()[:3] == [0.0, 1.0, 2.0]
    assert len(scene.times) == 6  # 15 degrees in three pieces
    stored = np.isin(scene.times, times.numpy())
    assert (scene.places[stored, 0] == path.points.numpy()).all()


def test_path_over_the_pole_reaches_it_on_the_map():
    path = replace(at_rest(torch.eye(3).double()[:1], globe=True), points=meridian_over_the_pole()[:, None])
    lon, lat = draw_map(path).axes[0].lines[0].get_data()
    lon, lat = np.asarray(lon), np.asarray(lat)
    assert np.nanmax(lat) > 87  # a straight line on the map would stay at 30
    away = lat < 87  # close to the pole a rounding turns the longitude
    np.testing.assert_allclose(np.minimum(np.abs(lon[away] - 20), np.abs(lon[away] + 160)), 0, atol=1e-9)


@pytest.mark.bad_input
@pytest.mark.parametrize("draw", [draw_sphere, draw_map, draw_stages])
def test_a_point_that_is_not_finite_is_named(draw, tmp_path):
    path = clusters(3)
    points = path.points.clone()
    points[5, 1, 4, 0] = float("nan")
    time = f"{float(path.times[5]):.6g}"
    with pytest.raises(ValueError, match=rf"^time {time}, measure 1, row 4: expected a finite point, got \[nan"):
        draw(replace(path, points=points), tmp_path / "f.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bad_input
def test_a_jump_to_the_antipode_is_named():
    path = along_the_equator(torch.tensor([0.0, 180.0]).double(), torch.tensor([0.0, 1.0]).double())
    with pytest.raises(ValueError, match=r"antipodal.*store more times"):
        draw_sphere(path)
    circle = replace(path, points=torch.eye(2).double()[:1] * torch.tensor([1.0, -1.0]).double()[:, None, None])
    with pytest.raises(ValueError, match="antipodal"):
        draw_circle(replace(circle, globe=False))


def test_padding_may_hold_anything():
    path = clusters(3)
    weights = torch.full_like(path.weights, 1 / 5)
    weights[:, 5] = 0
    points = path.points.clone()
    points[:, :, 5] = float("nan")
    scene = scene_of(replace(path, points=points, weights=weights))
    assert np.isfinite(scene.places).all()

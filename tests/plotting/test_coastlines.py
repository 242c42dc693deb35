import numpy as np
import pytest

from measureflow.plotting.coastlines import is_land, land
from measureflow.plotting.globe import add_ball, turn_ball
from measureflow.plotting.projections import camera
from measureflow.plotting.style import LAND, SEA, new_figure, page

ASHORE = {
    "Chad": (18, 15),
    "Kansas": (-98, 39),
    "Brazil": (-52, -10),
    "Siberia": (100, 62),
    "Chukotka": (179, 67.5),
    "Australia": (134, -25),
    "Antarctica": (60, -78),
    "South Pole": (0, -90),
    "Greenland": (-40, 74),
    "Tibet": (88, 32),
}
AFLOAT = {
    "Gulf of Guinea": (0, 0),
    "Atlantic": (-40, 30),
    "Pacific": (-150, -10),
    "date line": (180, 40),
    "North Pole": (0, 90),
    "Indian Ocean": (80, -30),
    "Southern Ocean": (-130, -60),
    "Caspian Sea": (50.5, 42),
    "Bay of Bengal": (88, 14),
}


def on_sphere(lon: float, lat: float) -> np.ndarray:
    lam, phi = np.radians([lon, lat])
    return np.array([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)])


@pytest.mark.parametrize("name", ASHORE)
def test_on_land(name):
    assert is_land(on_sphere(*ASHORE[name]))


@pytest.mark.parametrize("name", AFLOAT)
def test_at_sea(name):
    assert not is_land(on_sphere(*AFLOAT[name]))


def test_share_of_land_is_29_percent():
    x = np.random.default_rng(0).normal(size=(2000, 3))
    share = np.mean([is_land(place / np.linalg.norm(place)) for place in x])
    # 29.2 % of the Earth is land; 2,000 draws are off by 1 % (one standard deviation).
    assert abs(share - 0.292) < 0.03


def test_rings_are_closed_and_steps_short():
    for ring in land().points:
        np.testing.assert_allclose(ring[0], ring[-1], atol=1e-6)
        assert np.linalg.norm(np.diff(ring, axis=0), axis=-1).max() < 0.1


# Antipodes of land, of sea, and of coasts, the poles, and a ring of cameras.
CAMERAS = [(0, 90), (0, -90), (-60, 30), (-82, -32), (-46, 25), (0, 0), (180, 0), (140, -40)]
CAMERAS += [(lon, lat) for lon in range(-170, 180, 40) for lat in (-50, -5, 35)]


@pytest.mark.parametrize("view", CAMERAS)
def test_land_is_filled_and_sea_is_not_from_every_side(view):
    rotation = camera(*view)
    with page():
        figure = new_figure(6.0, 6.0)
        ball = add_ball(figure.add_axes((0, 0, 1, 1)), globe=True)
        turn_ball(ball, rotation)
        figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    for places, colour in ((ASHORE, LAND), (AFLOAT, SEA)):
        expected = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        for name, place in places.items():
            right, up, depth = rotation @ on_sphere(*place)
            if depth < 0.4:  # small seas and capes are thinner than a line there
                continue
            column, row = round(300 + right * 600 / 2.04), round(300 - up * 600 / 2.04)
            near = pixels[row - 1 : row + 2, column - 1 : column + 2].reshape(-1, 3)
            # A line of the graticule may run through a place, but does not cover nine pixels.
            assert (np.abs(near - expected).max(-1) <= 2).any(), name

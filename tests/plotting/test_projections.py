from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from measureflow import sphere
from measureflow.plotting.projections import (
    camera,
    facing,
    is_front,
    map_pieces,
    principal_axes,
    split_at_horizon,
    to_lonlat,
    unfold,
)

ROUNDING = 1e-12  # float64, a handful of products of numbers up to 1

longitudes = st.floats(-360, 360)
latitudes = st.floats(-90, 90)


def uniform(n: int, d: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(n, d))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@given(longitudes, latitudes)
def test_camera_is_a_rotation_that_faces_its_place(lon, lat):
    rotation = camera(lon, lat)
    assert_allclose(rotation @ rotation.T, np.eye(3), atol=ROUNDING)
    assert np.linalg.det(rotation) > 0
    lam, phi = np.radians([lon, lat])
    place = np.array([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)])
    assert_allclose(rotation @ place, [0, 0, 1], atol=ROUNDING)
    assert rotation[1, 2] >= -ROUNDING  # north is up


@given(longitudes, latitudes)
def test_p44_front_is_the_half_within_90_degrees_of_the_camera(lon, lat):
    points = uniform(200, 3)
    rotation = camera(lon, lat)
    angle = np.arccos((points @ rotation[2]).clip(-1, 1))
    clear = np.abs(angle - np.pi / 2) > 1e-9
    assert (is_front(points @ rotation.T) == (angle < np.pi / 2))[clear].all()


@given(longitudes, latitudes)
@settings(max_examples=50)
def test_p44_paths_are_cut_at_the_horizon_from_every_side(lon, lat):
    ends = uniform(40, 3, seed=1).reshape(20, 2, 3)
    t = np.linspace(0, 1, 60)[:, None]
    paths = ends[:, :1] * (1 - t) + ends[:, 1:] * t
    paths /= np.linalg.norm(paths, axis=-1, keepdims=True)
    seen = paths @ camera(lon, lat).T
    near, far = split_at_horizon(seen)
    stored_near, stored_far = near[:, ::2], far[:, ::2]
    front = is_front(seen)
    assert_allclose(stored_near[front], seen[front][:, :2])
    assert_allclose(stored_far[~front], seen[~front][:, :2])
    assert np.isnan(stored_near[~front]).all()
    assert np.isnan(stored_far[front]).all()
    # Both parts meet where they are cut: at the horizon, up to the chord's sagitta.
    both = ~np.isnan(near[..., 0]) & ~np.isnan(far[..., 0])
    assert (both.sum(1) == (np.diff(front, axis=1) != 0).sum(1)).all()
    longest = np.linalg.norm(np.diff(paths, axis=1), axis=-1).max()
    # Radius of a chord's point: sqrt(1 - h²) with h² at most (longest / 2)².
    assert_allclose(np.linalg.norm(near[both], axis=-1), 1, atol=longest**2 / 4)


@given(longitudes, latitudes)
@settings(max_examples=50)
def test_unfolded_rings_keep_the_front_and_stay_outside_behind(lon, lat):
    angle = np.linspace(0, 2 * np.pi, 60)
    centre = uniform(1, 3, seed=5)[0]
    across = np.linalg.svd(centre[None])[2][1:]
    ring = 0.8 * centre + 0.6 * np.cos(angle)[:, None] * across[0] + 0.6 * np.sin(angle)[:, None] * across[1]
    seen = ring @ camera(lon, lat).T
    flat = unfold(seen)
    front = seen[is_front(seen)][:, :2]
    assert all(np.abs(flat - place).sum(-1).min() < ROUNDING for place in front)
    steps = flat[:-1] + (flat[1:] - flat[:-1]) * 0.5
    behind = (np.linalg.norm(flat[:-1], axis=-1) > 1.01) & (np.linalg.norm(flat[1:], axis=-1) > 1.01)
    assert (np.linalg.norm(steps[behind], axis=-1) > 1).all()  # no chord cuts into the disc


def test_facing_puts_the_mean_in_the_middle_and_survives_a_zero_mean():
    places = np.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    assert_allclose(facing(places, np.full((1, 2), 0.5)), (45.0, 0.0), atol=1e-9)
    assert facing(np.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]), np.ones(2)) == (0.0, 0.0)


@pytest.mark.parametrize("d", [3, 4, 5, 9])
def test_principal_axes_keep_most(d):
    x = uniform(300, d, seed=2) * np.linspace(1, 3, d)
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    axes, kept = principal_axes(x, np.ones(300))
    assert_allclose(axes @ axes.T, np.eye(3), atol=ROUNDING)
    # Unit vectors have mean square length 1, so what is kept is the mean square length of the projection,
    assert_allclose((x @ axes.T) ** 2 @ np.ones(3) @ np.ones(300) / 300, kept)
    # which no other three directions exceed.
    for seed in range(20):
        other = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, 3)))[0]
        assert ((x @ other) ** 2).sum() / 300 <= kept + ROUNDING
    assert_allclose(principal_axes(x[::-1], np.ones(300))[0], axes, atol=1e-9)


steps = st.lists(st.tuples(st.floats(-170, 170), st.floats(-20, 20)), min_size=1, max_size=30)


@given(st.floats(-180, 179.9), steps)
def test_p45_map_pieces_meet_the_edges_and_no_line_runs_across(start, walk):
    turns = start + np.cumsum([0.0, *(step for step, _ in walk)])
    lat = np.cumsum([0.0, *(step for _, step in walk)])
    path = np.stack([(turns + 180) % 360 - 180, lat], -1)
    pieces = map_pieces(path)
    for piece in pieces:
        assert (np.abs(piece[:, 0]) <= 180).all()
        assert (np.abs(np.diff(piece[:, 0])) <= 180).all()
    for left, right in pairwise(pieces):
        assert abs(left[-1, 0]) == 180
        assert right[0, 0] == -left[-1, 0]
        assert right[0, 1] == left[-1, 1]
    inner = [*pieces[0][:1], *(row for piece in pieces for row in piece[1 if piece is pieces[0] else 0 :])]
    kept = [row for row in inner if any((row == place).all() for place in path)]
    assert len(kept) >= len(path)  # nothing is lost
    assert len(pieces) - 1 == (np.abs(np.diff(path[:, 0])) > 180).sum()


def test_lonlat_agrees_with_the_sphere():
    x = uniform(100, 3)
    lon, lat = sphere.to_lonlat(torch.tensor(x))
    assert_allclose(to_lonlat(x), torch.stack([lon, lat], -1).numpy(), atol=ROUNDING * 180)

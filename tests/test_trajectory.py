"""Trajectories: stored times, interpolation between them, stages."""

import pytest
import torch
from problems import random_measures, rich_transformer

from measureflow import sphere
from measureflow.flow import flow
from measureflow.measures import TokenMeasure
from measureflow.trajectory import FlowStats, Trajectory
from measureflow.transformer import Layer, Transformer, constant_drift

STATS = FlowStats("rk4", 1, 4, 0.0, 0.0)


@pytest.fixture
def path() -> Trajectory:
    return flow(rich_transformer(3, seed=0), random_measures(2, n=5, d=3, seed=1), times=8)


def between(start: list, end: list) -> Trajectory:
    points = torch.tensor([[start], [end]]).double()
    return Trajectory(
        torch.tensor([0.0, 2.0]).double(), points, torch.ones(1).double(), False, (0.0, 2.0), ("go",), STATS
    )


def test_length_start_end_and_items(path):
    assert len(path) == 8
    assert torch.equal(path.start.points, path.points[0])
    assert torch.equal(path.end.points, path.points[-1])
    assert [torch.equal(mu.points, points) for mu, points in zip(path, path.points, strict=True)] == [True] * 8


def test_at_a_stored_time_is_what_is_stored(path):
    for k, t in enumerate(path.times.tolist()):
        assert torch.equal(path.at(t).points, path.points[k])
        assert torch.equal(path.at(t).weights, path.weights)


def test_between_stored_times_tokens_are_on_the_great_circle():
    middle = between([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]).at(0.5).points[0]
    angle = torch.tensor(torch.pi / 8).double()
    assert torch.allclose(middle, torch.stack([angle.cos(), angle.sin(), torch.zeros(()).double()]), atol=1e-15)


def test_p10_interpolation_takes_the_short_arc_across_180_degrees():
    lon, lat = torch.tensor([179.0, -179.0]).double(), torch.zeros(2).double()
    ends = sphere.from_lonlat(lon, lat)
    lon_middle, _ = sphere.to_lonlat(between(ends[0].tolist(), ends[1].tolist()).at(1.0).points[0])
    assert abs(float(lon_middle)) == pytest.approx(180.0)


def test_interpolation_is_of_second_order_in_the_time_between():
    drift = Transformer([Layer(perceptron=constant_drift(torch.tensor([0.0, 0.0, 1.0]).double()), duration=2.0)])
    mu = random_measures(n=20, d=3, seed=0)
    up = torch.tensor([0.0, 0.0, 1.0]).double()
    errors = [
        float((flow(drift, mu, times=k).at(halfway).points - sphere.drift(mu.points, up, halfway)).abs().max())
        for k, halfway in ((11, 0.9), (21, 0.95))
    ]
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_stage_at_names_the_layer_that_begins_at_a_switch(path):
    assert [path.stage_at(t) for t in (0.0, 0.59, 0.61, 1.0, path.switch_times[-1])] == [
        "mix",
        "mix",
        "bend",
        "push",
        "push",
    ]
    assert path.stage_at(path.switch_times[1]) == "bend"


@pytest.mark.bad_input
def test_times_outside_are_named(path):
    with pytest.raises(ValueError, match=r"t: expected a time in \[0, 1.4\], the stored ones, got 1.5"):
        path.at(1.5)
    with pytest.raises(ValueError, match=r"t: expected a time in \[0, 1.4\], got -1.0"):
        path.stage_at(-1.0)


@pytest.mark.bad_input
def test_p08_antipodal_neighbours_ask_for_more_stored_times():
    with pytest.raises(ValueError, match=r"between the stored times 0 and 2, row 0: .*antipodal.*store more times"):
        between([1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]).at(0.5)


def test_padding_interpolates_to_padding():
    weights = torch.tensor([0.5, 0.5, 0.0]).double()
    mu = TokenMeasure(sphere.project(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()), weights)
    middle = flow(rich_transformer(3, seed=0), mu, times=2).at(0.7)
    assert middle.points[2].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.bad_input
def test_parts_that_do_not_fit_are_named(path):
    parts = {"times": path.times, "points": path.points, "weights": path.weights, "globe": False}
    parts |= {"switch_times": path.switch_times, "stages": path.stages, "stats": STATS}
    for change, message in [
        ({"times": path.times[1:]}, "points: expected one set per time, got 8 for 7 times"),
        ({"weights": path.weights[:1]}, r"weights: expected shape \(2, 5\), got \(1, 5\)"),
        ({"stages": ("a",)}, "switch_times: expected 2 for 1 stages, got 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            Trajectory(**(parts | change))

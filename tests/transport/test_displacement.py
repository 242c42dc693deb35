import pytest
import torch

from measureflow import sphere
from measureflow.measures import TokenMeasure
from measureflow.transport.displacement import displacement
from measureflow.transport.exact import wasserstein
from tests.problems import random_measures


def ragged() -> tuple[TokenMeasure, TokenMeasure]:
    mu, nu = random_measures(2, n=5, d=3, seed=0), random_measures(2, n=4, d=3, seed=1)
    weights = mu.weights * torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return TokenMeasure(mu.points, weights / weights.sum(-1, keepdim=True)), nu


def test_ends_are_the_measures():
    mu, nu = ragged()
    # Masses are off by a rounding, 1e-16, which may be carried a distance of 1: that is 1e-8 in W2.
    assert wasserstein(displacement(mu, nu, 0.0), mu).max() < 1e-7
    assert wasserstein(displacement(mu, nu, 1.0), nu).max() < 1e-7


def test_the_path_has_constant_speed_and_is_shortest():
    mu, nu = ragged()
    whole = wasserstein(mu, nu)
    for s, t in ((0.0, 0.3), (0.2, 0.9), (0.5, 1.0)):
        between = wasserstein(displacement(mu, nu, s), displacement(mu, nu, t))
        torch.testing.assert_close(between, (t - s) * whole, rtol=1e-10, atol=0)


def test_halfway_across_the_date_line_is_at_180_degrees():
    lon = torch.deg2rad(torch.tensor([179.0, -179.0], dtype=torch.float64))
    places = torch.stack([lon.cos(), lon.sin(), torch.zeros_like(lon)], dim=-1)
    middle = displacement(TokenMeasure(places[:1], globe=True), TokenMeasure(places[1:], globe=True), 0.5)
    assert middle.globe
    torch.testing.assert_close(middle.points, torch.tensor([[-1.0, 0, 0]], dtype=torch.float64), rtol=0, atol=1e-15)


def test_points_have_gradients():
    mu, nu = ragged()
    x = mu.points.clone().requires_grad_()
    displacement(TokenMeasure(x, mu.weights), nu, 0.5).points[..., 0].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad[1, 3:] == 0).all()


@pytest.mark.bad_input
def test_antipodal_atoms_are_named():
    generator = torch.Generator().manual_seed(0)
    x = sphere.uniform(2, 1, 3, generator=generator)
    y = torch.stack([x[0], -x[1]])
    with pytest.raises(ValueError, match="pair 1: source row 0 and target row 0 are antipodal"):
        displacement(TokenMeasure(x), TokenMeasure(y), 0.5)


@pytest.mark.bad_input
def test_a_share_outside_the_way_is_an_error():
    mu, nu = ragged()
    with pytest.raises(ValueError, match="between 0 and 1"):
        displacement(mu, nu, 1.5)

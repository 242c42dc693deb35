"""Gradients in the weights with the potentials held fixed (the envelope theorem)."""

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow.measures import TokenMeasure


def slope_in_weights(
    mu: TokenMeasure, nu: TokenMeasure, potentials: tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch m"]]
) -> Float[Tensor, "*batch"]:
    """Zeros (float64) whose gradient in the weights is that of a transport cost with these potentials.

    dW/da = f and dW/db = g, less their means: only a change of the total mass would feel these, and weights count
    as divided by their sum. Padding has no gradient.

    >>> mu = TokenMeasure(torch.eye(2), torch.tensor([0.5, 0.5], requires_grad=True))
    >>> slope_in_weights(mu, mu, (torch.tensor([1.0, 3.0]), torch.zeros(2))).backward()
    >>> mu.weights.grad
    tensor([-1.,  1.])
    """
    total = mu.weights.new_zeros(potentials[0].shape[:-1], dtype=torch.float64)
    for weights, potential in zip((mu.weights, nu.weights), potentials, strict=True):
        inside = weights.double()
        mean = (inside.detach() * potential).sum(-1, keepdim=True)
        slope = torch.where(inside.detach() > 0, potential - mean, 0)
        total = total + (slope * (inside - inside.detach())).sum(-1)
    return total

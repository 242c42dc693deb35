"""The velocity of a layer as one would first write it: dense, one formula, no blocks and no exact flows."""

import torch
from torch import Tensor

import measureflow as mf


def naive_attention(x: Tensor, y: Tensor, weights: Tensor, B: Tensor) -> Tensor:
    """Softmax attention by the full (n, m) matrix of scores."""
    scores = torch.einsum("...id,de,...je->...ij", x, B.mT, y) + torch.log(weights).unsqueeze(-2)
    return torch.softmax(scores, dim=-1) @ y


def naive_velocity(layer: mf.Layer, x: Tensor, weights: Tensor) -> Tensor:
    """Velocity of every token under a layer of softmax heads and a relu perceptron."""
    v = torch.zeros_like(x)
    for head in layer.heads:
        v = v + naive_attention(x, x, weights, head.B) @ head.V.mT
    if layer.perceptron is not None:
        p = layer.perceptron
        v = v + torch.relu(x @ p.U.mT + p.b) @ p.W.mT
    return v - (v * x).sum(-1, keepdim=True) * x

"""Exact flows: layers that are solved in closed form, or to rounding, where an ODE solver would leave its tolerance.

| layer | flow | arXiv 2411.04551 |
| --- | --- | --- |
| relu perceptron with U = 0, no heads | one Möbius map | Lemma 3.2 |
| relu perceptron of gates, no heads | great circles, travel times in closed form | Proposition 4.2 |
| one softmax head, B = 0, V symmetric of rank one | one scalar equation per measure | Lemma 3.3 |
| softmax heads, B = 0, any V; a constant drift | one Möbius map per measure | Lemma 3.5 |

A gate is a group of neurons that share their direction and their drift.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow.exact_flows.even_attention import flow_along_axis, flow_evenly
from measureflow.exact_flows.gates import drift_far, find_gates, flow_through_gates
from measureflow.transformer import Layer

__all__ = ["exact_flow", "has_exact_flow"]

Flow = Callable[[Tensor, Tensor, float], Tensor | None]


def _constant_drift(layer: Layer) -> Flow | None:
    p = layer.perceptron
    if layer.heads or p is None or p.activation != "relu" or bool(p.U.any()):
        return None
    vector = p.W.double() @ p.b.double().relu()
    speed = vector.norm()
    if not bool(speed > 0):
        return lambda points, weights, duration: points
    return lambda points, weights, duration: drift_far(points, vector / speed, speed * duration)


def _gates(layer: Layer) -> Flow | None:
    if layer.heads or layer.perceptron is None:
        return None
    gates = find_gates(layer.perceptron)
    if gates is None:
        return None
    return lambda points, weights, duration: flow_through_gates(gates, points, duration)


def _axis_attention(layer: Layer) -> Flow | None:
    if len(layer.heads) != 1 or layer.perceptron is not None or not layer.heads[0].attends_evenly:
        return None
    V = layer.heads[0].V.double()
    row = V[int(V.diagonal().abs().argmax())]
    if not bool(row.any()):
        return None
    axis = row / row.norm()
    c = axis @ V @ axis
    if bool((V - c * torch.outer(axis, axis)).abs().amax() > 16 * torch.finfo(V.dtype).eps * c.abs()):
        return None
    return lambda points, weights, duration: flow_along_axis(axis, float(c), points, weights, duration)


def _even_attention(layer: Layer) -> Flow | None:
    if not layer.heads or not all(head.attends_evenly for head in layer.heads):
        return None
    V = torch.stack([head.V.double() for head in layer.heads]).sum(0)
    w = torch.zeros_like(V[0])
    p = layer.perceptron
    if p is not None:
        if p.activation != "relu" or bool(p.U.any()):
            return None
        w = p.W.double() @ p.b.double().relu()
    return lambda points, weights, duration: flow_evenly(V, w, points, weights, duration)


# Each entry looks at a layer and returns its flow, (points, weights, duration) -> points, or None. First match wins.
EXACT_FLOWS: dict[str, Callable[[Layer], Flow | None]] = {
    "constant drift": _constant_drift,
    "gates": _gates,
    "even attention of rank one": _axis_attention,
    "even attention": _even_attention,
}


def _recognise(layer: Layer) -> Flow | None:
    # The parameters are read as numbers: no gradient would reach them.
    if any(t.requires_grad for _, t in layer.tensors()):
        return None
    return next((flow for find in EXACT_FLOWS.values() if (flow := find(layer)) is not None), None)


def exact_flow(
    layer: Layer,
    points: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"],
    duration: float | None = None,
) -> Float[Tensor, "*batch n d"] | None:
    """Where a layer carries its tokens, to rounding; None where no exact flow is known.

    None is the answer when the layer is of no kind in the table above, when one of its parameters requires a gradient
    (parameters are read as numbers, and an integrator has to be used to learn them), and, in a perceptron of several
    gates, when some token would meet two of them on its way.

    Computed in float64 and rounded to the dtype of the points. Tokens that only see closed gates are returned bit for
    bit. Gradients reach the points (and, in even attention, the weights). Under a gate they are first derivatives
    only, a second one raises; at a token that begins exactly on the edge of a gate they are one-sided.

    Args:
        layer: one layer.
        points: tokens, unit vectors.
        weights: of the tokens; padding has 0.
        duration: time; the layer's own when None.

    Source: arXiv 2411.04551, Lemmas 3.2, 3.3, 3.5 and Proposition 4.2.

    >>> from measureflow.transformer import constant_drift
    >>> layer = Layer(perceptron=constant_drift(torch.tensor([0.0, 1.0])), duration=1.0)
    >>> exact_flow(layer, torch.tensor([[1.0, 0.0]]), torch.ones(1))  # 1/cosh(1) and tanh(1)
    tensor([[0.6481, 0.7616]])
    """
    flow = _recognise(layer)
    if flow is None:
        return None
    moved = flow(points.double(), weights.double(), layer.duration if duration is None else duration)
    return None if moved is None else moved.to(points.dtype)


def has_exact_flow(layer: Layer) -> bool:
    """The layer is of a kind in the table above, so that `exact_flow` answers.

    For a perceptron of several gates this is not yet certain: it depends on the tokens, and `exact_flow` may be None.

    >>> from measureflow.transformer import saturating_gate
    >>> z = torch.tensor([0.0, 1.0])
    >>> has_exact_flow(Layer(perceptron=saturating_gate(z, 0.2, 0.1, z)))
    True
    """
    return _recognise(layer) is not None

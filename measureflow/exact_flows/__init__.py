"""Exact flows: layers that are solved in closed form, or to rounding, where an ODE solver would leave its tolerance.

| layer | flow | source |
| --- | --- | --- |
| relu perceptron with U = 0, no heads | one Möbius map | arXiv 2411.04551, Lemma 3.2 |
| relu perceptron of gates (neurons that share direction and drift), no heads | great circles, closed-form times | Prop. 4.2 |
| one softmax head, B = 0 and V of rank one and symmetric | one scalar equation per measure | Lemma 3.3 |
| softmax heads, B = 0, any V, and a constant drift | one Möbius map per measure | Lemma 3.5 and Section 3 |
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
    vector = (p.W.double() @ p.b.double().relu()).to(p.W.device)
    speed = vector.norm()
    if not bool(speed > 0):
        return lambda points, weights, duration: points
    return lambda points, weights, duration: drift_far(
        points, (vector / speed).to(points.device), (speed * duration).to(points.device)
    )


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
    flow = _recognise(layer)
    if flow is None:
        return None
    moved = flow(points.double(), weights.double(), layer.duration if duration is None else duration)
    return None if moved is None else moved.to(points.dtype)


def has_exact_flow(layer: Layer) -> bool:
    return _recognise(layer) is not None

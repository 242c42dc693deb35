"""Layers whose perceptron is made of gates: relu neurons that share a direction z and a drift direction w.

Under one gate x' = g(<z, x>) P_x w with g piecewise linear, and every token stays on the great circle through itself
and w. It only remains to find how far it gets: the move of atanh <x, w>, which `sphere.drift` then carries out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from measureflow import sphere
from measureflow.exact_flows.ramp import Ramp, height, travel, travel_time
from measureflow.transformer import Perceptron

# More directions than this are a general perceptron, in which some token sees two of them.
MOST_GATES = 64


@dataclass(frozen=True, eq=False)
class Gate:
    """A drift along `w` at the rate p_j + q_j <z, x> in the j-th of k + 1 pieces.

    Args:
        z: (d,).  w: (d,), unit.
        breaks: (k,) increasing values of <z, x> at which pieces meet.
        p, q: (k + 1,).
    """

    z: Float[Tensor, " d"]
    w: Float[Tensor, " d"]
    breaks: Float[Tensor, " k"]
    p: Float[Tensor, " k1"]
    q: Float[Tensor, " k1"]

    def rate(self, c: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The rate at c = <z, x>."""
        piece = torch.bucketize(c, self.breaks)
        return self.p[piece] + self.q[piece] * c

    def ends(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Values of <z, x> between which a piece lies."""
        edge = self.breaks.new_tensor([math.inf])
        return torch.cat([-edge, self.breaks])[piece], torch.cat([self.breaks, edge])[piece]

    def to(self, points: Tensor) -> "Gate":
        """The gate on the device of the points."""
        return Gate(*(t.to(points.device) for t in (self.z, self.w, self.breaks, self.p, self.q)))


def find_gates(perceptron: Perceptron) -> list[Gate] | None:
    """The gates that a relu perceptron consists of, neurons sorted by direction and drift; None where there are others.

    Other things are neurons without direction (U = 0), or more than MOST_GATES gates.
    """
    if perceptron.activation != "relu":
        return None
    W, U, b = (t.detach().cpu().double().numpy() for t in (perceptron.W.mT, perceptron.U, perceptron.b))
    acting = W.any(1)
    W, U, b = W[acting], U[acting], b[acting]
    if not U.any(1).all():
        return None
    gates, left = [], np.arange(len(W))
    while len(left):
        if len(gates) == MOST_GATES:
            return None
        z, w = U[left[0]], W[left[0]] / np.linalg.norm(W[left[0]])
        along, speed = U[left] @ z / (z @ z), W[left] @ w
        member = _parallel(U[left], along, z) & _parallel(W[left], speed, w)
        gates.append(_gate(z, w, along[member], b[left[member]], speed[member]))
        left = left[~member]
    return gates


def _parallel(rows: np.ndarray, lengths: np.ndarray, direction: np.ndarray) -> np.ndarray:
    size = np.linalg.norm(rows, axis=1)
    return np.linalg.norm(rows - lengths[:, None] * direction, axis=1) <= 16 * np.finfo(np.float64).eps * size


def _gate(z: np.ndarray, w: np.ndarray, along: np.ndarray, b: np.ndarray, speed: np.ndarray) -> Gate:
    """Pieces of g(c) = Σ_k speed_k (along_k c + b_k)_+.

    Sums are exact (fractions): a narrow gate subtracts large numbers, and on a plateau the slopes must cancel to zero.
    """
    at = -b / along
    breaks = np.unique(at)
    slopes = [Fraction(s) * Fraction(a) for s, a in zip(speed, along, strict=True)]
    offsets = [Fraction(s) * Fraction(o) for s, o in zip(speed, b, strict=True)]
    p, q = [], []
    for piece in range(len(breaks) + 1):
        # A neuron of positive direction fires above its break, one of negative direction below.
        fires = np.where(along > 0, np.searchsorted(breaks, at) < piece, np.searchsorted(breaks, at) >= piece)
        p.append(float(sum((o for o, on in zip(offsets, fires, strict=True) if on), Fraction(0))))
        q.append(float(sum((s for s, on in zip(slopes, fires, strict=True) if on), Fraction(0))))
    return Gate(*(torch.from_numpy(np.array(v, dtype=np.float64)) for v in (z, w, breaks, p, q)))


def flow_through_gates(
    gates: Sequence[Gate], points: Float[Tensor, "*batch n d"], duration: float
) -> Float[Tensor, "*batch n d"] | None:
    """Move tokens through gates for a time; None where a token meets two gates on its way.

    Tokens that no gate sees are returned bit for bit.
    """
    if not gates:
        return points
    gates = [gate.to(points) for gate in gates]
    flat = points.reshape(-1, points.shape[-1])
    seen = torch.stack([gate.rate(flat.detach() @ gate.z) != 0 for gate in gates])
    if bool((seen.sum(0) > 1).any()):
        return None
    moved = flat
    for gate, mask in zip(gates, seen, strict=True):
        if not bool(mask.any()):
            continue
        x = flat[mask]
        move = _move(gate, x, duration)
        others = [other for other in gates if other is not gate]
        if others and not bool(_unseen(others, gate, x.detach(), move.detach()).all()):
            return None
        moved = moved.index_put((mask,), drift_far(x, gate.w, move))
    return moved.reshape(points.shape)


def drift_far(
    x: Float[Tensor, "*batch d"], w: Float[Tensor, " d"], s: Float[Tensor, "*#batch"]
) -> Float[Tensor, "*batch d"]:
    """`sphere.drift` for times of any size, in several strides where e^{-2|s|} would underflow."""
    strides = max(1, math.ceil(float(s.detach().abs().amax()) / 300))
    for _ in range(strides):
        x = sphere.drift(x, w, s / strides)
    return x


def _circle(gate: Gate, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u = atanh <x, w>, A = <z, w> and B = <z, e> of tokens other than ±w (there u is infinite and B is 0)."""
    plus, minus = x + gate.w, x - gate.w
    near, far = torch.linalg.vector_norm(plus, dim=-1), torch.linalg.vector_norm(minus, dim=-1)
    # The part across w is taken from the nearer pole, where it is small.
    offset = torch.where((near < far).unsqueeze(-1), plus, minus)
    across = offset - (offset @ gate.w).unsqueeze(-1) * gate.w
    length = torch.linalg.vector_norm(across, dim=-1)
    B = torch.where(length > 0, across @ gate.z / length.where(length > 0, torch.ones_like(length)), 0.0)
    return torch.log(near / far), (gate.z @ gate.w).expand(B.shape), B


def _extent(A: Tensor, B: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest <z, x> on the arcs from u = start to u = end."""
    first, last = height(A, B, start), height(A, B, end)

    def climbs(u: Tensor) -> Tensor:
        return A / torch.cosh(u) > B * torch.tanh(u)

    # <z, x> has one extremum on the half circle, of the sign of B.
    turn = torch.where(climbs(start) != climbs(end), torch.sign(B) * torch.hypot(A, B), first)
    every = torch.stack([first, last, turn])
    return every.amin(0), every.amax(0)


def _unseen(others: Sequence[Gate], gate: Gate, x: Tensor, move: Tensor) -> Bool[Tensor, " k"]:
    """Tokens that meet no gate but one on their way."""
    clear = torch.ones_like(move, dtype=torch.bool)
    for other in others:
        u, A, B = _circle(Gate(other.z, gate.w, other.breaks, other.p, other.q), x)
        low, high = _extent(A, B, u, u + move)
        below, above = torch.bucketize(low, other.breaks), torch.bucketize(high, other.breaks)
        clear &= (below == above) & (other.p[below] == 0) & (other.q[below] == 0)
    return clear


def _move(gate: Gate, x: Float[Tensor, "k d"], duration: float) -> Float[Tensor, " k"]:
    """How far atanh <x, w> moves in the duration, for tokens that the gate sees."""
    with torch.no_grad():
        u, A, B = _circle(gate, x)
        c = x @ gate.z
        piece = torch.bucketize(c, gate.breaks)
        move = gate.p[piece] * duration
        low, high = _extent(A, B, u, u + move)
        bottom, top = gate.ends(piece)
        # Tokens at ±w rest.
        on_plateau = (gate.q[piece] == 0) & (low >= bottom) & (high <= top) | ~u.isfinite()
        crossing = ~on_plateau
    if not bool(crossing.any()):
        return move
    return move.masked_scatter(crossing, _cross(gate, x[crossing], duration))


def _cross(gate: Gate, x: Float[Tensor, "k d"], duration: float) -> Float[Tensor, " k"]:
    """The same for tokens that are on a ramp or pass from piece to piece."""
    u, A, B = _circle(gate, x)
    with torch.no_grad():
        legs, move = _legs(gate, u, A, B, duration)
    if not x.requires_grad:
        return move
    return _Move.apply(u, B, move, *_sensitivity(gate, legs, u.detach(), B.detach(), move))  # type: ignore[no-any-return]


def _legs(gate: Gate, u: Tensor, A: Tensor, B: Tensor, duration: float) -> tuple[list[tuple[Ramp, Tensor]], Tensor]:
    """Ways of the tokens through the pieces, one piece after the other, and their whole moves."""
    sign = torch.sign(gate.rate(height(A, B, u)))
    marks = _crossings(gate, u, A, B, sign)
    begin, left, done = torch.zeros_like(u), torch.full_like(u, duration), sign == 0
    legs = []
    for end in [*marks, torch.full_like(u, torch.inf)]:
        inside = torch.where(end.isfinite(), (begin + end) / 2, begin + 1)
        piece = torch.bucketize(height(A, B, u + sign * inside), gate.breaks)
        ramp = Ramp(u + sign * begin, gate.p[piece], gate.q[piece], A, B)
        level = ramp.q == 0
        time = torch.where(level, (end - begin) / ramp.p.abs(), torch.inf)
        sloping = ~level & ~done & end.isfinite()
        if bool(sloping.any()):
            time = time.masked_scatter(sloping, travel_time(ramp.at(sloping), (sign * (end - begin))[sloping]))
        stops = ~done & ~(time <= left)
        stride = torch.where(done, torch.zeros_like(end), torch.where(stops, ramp.p.abs() * left, end - begin))
        solve = stops & ~level
        if bool(solve.any()):
            moves = travel(ramp.at(solve), left[solve], (end - begin)[solve])
            stride = stride.masked_scatter(solve, moves.abs())
        legs.append((ramp, sign * stride))
        begin, left, done = begin + stride, left - time, done | stops
        if bool(done.all()):
            break
    return legs, sign * begin


def _crossings(gate: Gate, u: Tensor, A: Tensor, B: Tensor, sign: Tensor) -> Float[Tensor, "m k"]:
    """Distances in u, ascending, at which tokens cross a break on their way: A sinh u + B = break cosh u.

    Infinite where there are fewer than two crossings of a break ahead.
    """
    c = gate.breaks.unsqueeze(-1)
    square = (A - c) * (A + c) + B * B
    # (A - c) E² + 2 B E - (A + c) = 0 in E = e^u, by the formula without cancellation.
    half = -(B + torch.where(B < 0, -1.0, 1.0) * square.clamp(min=0).sqrt())
    roots = torch.stack([half / (A - c), -(A + c) / half])
    ahead = sign * (torch.log(roots) - u)
    return torch.where((square >= 0) & (ahead > 0), ahead, torch.inf).flatten(0, 1).sort(0).values


def _sensitivity(
    gate: Gate, legs: Sequence[tuple[Ramp, Tensor]], u: Tensor, B: Tensor, move: Tensor
) -> tuple[Tensor, Tensor]:
    """Derivatives of the move by u and by B.

    The travel time T(u, u + move, B) is constant, with dT/du = -1/rate at the start and 1/rate at the end.
    """
    ramp, end = legs[0][0], u + move
    last = gate.rate(height(ramp.A, B, end))
    with torch.enable_grad():
        free = B.clone().requires_grad_()
        total = u.new_zeros(())
        for leg, stride in legs:
            sloping = (leg.q != 0) & (stride != 0)
            on_leg = leg._replace(B=free).at(sloping)
            total = total + travel_time(on_leg, stride[sloping]).sum()
        (by_B,) = torch.autograd.grad(total, free) if total.requires_grad else (torch.zeros_like(B),)
    # A token that has come to rest to the last bit is on a break: A sech² u du - B sech u tanh u du + sech u dB = 0.
    rest = last == 0
    edge = ramp.A / torch.cosh(end) - B * torch.tanh(end)
    at_rest = -1 / torch.where(rest, edge, torch.ones_like(edge))
    return last / ramp.rate(u) - 1, torch.where(rest, at_rest, -last * by_B)


class _Move(torch.autograd.Function):
    """Gives the move, found without a graph, its first derivatives; a second derivative raises."""

    @staticmethod
    def forward(ctx, u: Tensor, B: Tensor, move: Tensor, by_u: Tensor, by_B: Tensor) -> Tensor:
        ctx.save_for_backward(by_u, by_B)
        return move.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        by_u, by_B = ctx.saved_tensors
        return grads[0] * by_u, grads[0] * by_B, None, None, None

r"""Tokens on the ramp of a gate: closed-form travel times and their inverse.

A token drifts along the great circle through `w` at the rate p + q <z, x>. With u = atanh <x, w> (e^u = cot of half the
angle to `w`), A = <z, w> and B = <z, e>, e the direction of the token across `w`,

    u' = p + q (A tanh u + B sech u).

Let E_0 = e^{u_0}, R = e^{u - u_0}, a = (p + qA) E_0, b = qB, c = (p - qA) / E_0 and D(R) = aR² + 2bR + c. In the inner
time σ, dt = (E_0 R + 1 / (E_0 R)) dσ, the ratio follows the Riccati equation dR/dσ = D(R), R(0) = 1, so that

    t = E_0 ∫R dσ + ∫dσ/R / E_0
    a ∫R dσ = ½ ln(D(R)/D(1)) - b σ,     c ∫dσ/R = ln R - ½ ln(D(R)/D(1)) - b σ

and σ is an inverse tangent, circular or hyperbolic. Where a (or c) is too small to divide by, that integral is taken by
Gauss-Legendre quadrature of the explicit solution instead. Source: arXiv 2411.04551, proof of Proposition 4.2, where
the paper has a gate without saturation.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

# 48 nodes integrate e^x over 40 units of x, which is from one rounding of a rest point to order 1, to rounding.
_NODES, _MASSES = (torch.from_numpy(a) / 2 for a in np.polynomial.legendre.leggauss(48))
_TINY = 1e-100


class Ramp(NamedTuple):
    """A start and a linear rate p + q <z, x> for each of k tokens.

    Args:
        u: where each token is on its great circle, atanh <x, w>.
        p, q: offset and slope of the rate.
        A, B: <z, w> and <z, e>.
    """

    u: Float[Tensor, " k"]
    p: Float[Tensor, " k"]
    q: Float[Tensor, " k"]
    A: Float[Tensor, " k"]
    B: Float[Tensor, " k"]

    def at(self, mask: Bool[Tensor, " k"]) -> "Ramp":
        """The tokens of a mask."""
        return Ramp(*(value[mask] for value in self))

    def rate(self, u: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """The rate u' of tokens that have arrived at `u`."""
        return self.p + self.q * height(self.A, self.B, u)


class _Riccati(NamedTuple):
    """dR/dσ = D(R) = aR² + 2bR + c from R = 1: `start` = D(1), `slope` = D'(1)/2, `square` = b² - ac."""

    a: Tensor
    b: Tensor
    c: Tensor
    start: Tensor
    slope: Tensor
    square: Tensor
    root: Tensor
    lower: Tensor

    def at(self, mask: Tensor) -> "_Riccati":
        """The tokens of a mask."""
        return _Riccati(*(value[mask] for value in self))


def height(A: Tensor, B: Tensor, u: Tensor) -> Tensor:
    """<z, x> of the token at `u`: A tanh u + B sech u."""
    return A * torch.tanh(u) + B / torch.cosh(u)


def _riccati(ramp: Ramp) -> _Riccati:
    grow = torch.exp(ramp.u)
    a, b, c = (ramp.p + ramp.q * ramp.A) * grow, ramp.q * ramp.B, (ramp.p - ramp.q * ramp.A) / grow
    start, slope = a + 2 * b + c, a + b
    square = b * b - a * c
    root = square.abs().clamp(min=_TINY).sqrt()
    # slope - root; times slope + root it is a D(1), which avoids the cancellation beside an unstable rest point.
    steep = slope > 0
    lower = torch.where(steep, a * start / (slope + root).where(steep, torch.ones_like(a)), slope - root)
    return _Riccati(a, b, c, start, slope, square, root, lower)


def _inner_time(f: _Riccati, rise: Tensor) -> Tensor:
    """σ at which R = 1 + rise: tanh(root σ)/root = rise / (D(1) + slope · rise); infinite beyond a rest point."""
    one = torch.ones_like(rise)
    sign = torch.sign(rise)
    middle = f.start + f.slope * rise
    before = middle * sign > 0
    slow = rise / torch.where(before, middle, one)
    small = f.square * slow * slow
    series = before & (small.abs() < 1e-3)
    x = torch.where(series, small, torch.zeros_like(small))
    nearly_double = slow * (1 + x * (1 / 3 + x * (1 / 5 + x * (1 / 7 + x * (1 / 9 + x / 11)))))
    near, far = f.start + f.lower * rise, f.start + (f.lower + 2 * f.root) * rise
    reached = (near * sign > 0) & (far * sign > 0)
    real = torch.log1p(2 * f.root * rise / torch.where(reached, near, one) * reached) / (2 * f.root)
    turn = torch.atan2(f.root * rise * sign, middle * sign) / f.root
    branch = torch.where(f.square < 0, turn, torch.where(reached, real, torch.inf))
    return torch.where(series, nearly_double, branch)


def _ratio(f: _Riccati, inner: Tensor) -> Tensor:
    """R at the inner times (..., k)."""
    decay = torch.exp(-2 * f.root * inner)
    late = (2 * f.root * inner > 1) & (f.square > 0)
    swing = -torch.expm1(-2 * f.root * inner) / (2 * f.root)
    early = f.start * swing / ((1 + decay) / 2 - f.slope * swing)
    settled = f.start * (1 - decay) / (decay * (f.root + f.slope) - f.lower)
    # Elsewhere the angles would be huge, and their sines slow.
    angle = torch.where(f.square < 0, f.root * inner, 0.0)
    arc = torch.sin(angle) / f.root
    turning = f.start * arc / (torch.cos(angle) - f.slope * arc)
    return 1 + torch.where(f.square < 0, turning, torch.where(late, settled, early))


def travel_time(ramp: Ramp, move: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Times that tokens take from u to u + move along their ramps; infinite where a rest point lies between.

    Args:
        ramp: k tokens.
        move: of the sign of the token's rate.
    """
    inner = _inner_time(_riccati(ramp), torch.expm1(move))
    arrives = inner.isfinite() & (inner > 0) & (move != 0)
    inner = torch.where(arrives, inner, torch.zeros_like(inner))
    # Seen from -w, u and the rate change sign: that swaps R and 1/R, A and -A.
    mirror = Ramp(-ramp.u, -ramp.p, -ramp.q, -ramp.A, ramp.B)
    time = sum(
        torch.exp(side.u) * _integral(_riccati(side), length, inner, arrives)
        for side, length in ((ramp, move), (mirror, -move))
    )
    return torch.where(arrives, time, torch.where(move == 0, 0.0, torch.inf).to(move.dtype))


def _integral(f: _Riccati, move: Tensor, inner: Tensor, arrives: Tensor) -> Tensor:
    """∫R dσ over the inner time in which ln R becomes `move`."""
    rise = torch.expm1(move)
    start = torch.where(arrives, f.start, torch.ones_like(f.start))
    # D(R)/D(1) - 1; at a rest point it is -1 up to rounding.
    growth = (rise * (2 * f.slope + f.a * rise) / start).clamp(min=torch.finfo(move.dtype).eps - 1)
    # Dividing by a loses a factor |b| / (|a| R) of accuracy.
    flat = 2 * f.a.abs() * torch.exp(move.clamp(min=0)) <= f.b.abs()
    value = (torch.log1p(growth) / 2 - f.b * inner) / torch.where(flat, torch.ones_like(f.a), f.a)
    flat = flat & arrives
    return value.masked_scatter(flat, _quadrature(f.at(flat), inner[flat])) if bool(flat.any()) else value


def _quadrature(f: _Riccati, inner: Tensor) -> Tensor:
    """∫R dσ from the explicit solution."""
    # After 20 / root the token rests to rounding, and the integrand is constant.
    span = torch.where(f.square > 0, torch.minimum(inner, 20 / f.root), inner)
    nodes, masses = _NODES.to(span.device), _MASSES.to(span.device)
    values = _ratio(f, (nodes + 0.5).unsqueeze(-1) * span)
    return (masses.unsqueeze(-1) * values).sum(0) * span + (inner - span) * _ratio(f, span)


def travel(ramp: Ramp, time: Float[Tensor, " k"], longest: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Invert `travel_time`: the moves u(time) - u(0), of length at most `longest`.

    Newton's method on the time, each step along the Riccati flow (exact beside a rest point) or, where that would run
    into ±w, along the present rate (exact far from one). Where neither the time left nor the step shrinks, the bracket
    is halved.
    """
    fastest = ramp.p.abs() + ramp.q.abs() * torch.hypot(ramp.A, ramp.B)
    # A move of 300 ends at ±w to e^-300 wherever it starts; e^(2 · 300) is still a number.
    high = torch.minimum(longest, fastest * time).clamp(max=300)
    at, low, last_left, last_step = high * 0, high * 0, high * 0 + torch.inf, high * 0 + torch.inf
    moves, active = torch.zeros_like(time), torch.arange(len(time), device=time.device)
    for _ in range(100):
        sign = torch.sign(ramp.rate(ramp.u))
        here = ramp._replace(u=ramp.u + sign * at)
        left = time - travel_time(ramp, sign * at)
        low, high = torch.where(left >= 0, at, low), torch.where(left >= 0, high, at)
        newton = sign * here.rate(here.u) * left
        f = _riccati(here)
        jump = sign * torch.log(_ratio(f, left / (2 * torch.cosh(here.u))))
        # Short of the rest point, where travel times are only rounding errors.
        rest = sign * torch.log(1 - f.start / f.lower)
        jump = torch.where((rest > 0) & (f.square > 0), torch.minimum(jump, 0.9999 * rest), jump)
        step = torch.where((at + jump > low) & (at + jump < high), jump, newton)
        inside = (at + step >= low) & (at + step <= high)
        # The last step is still taken, and its error is quadratic.
        moves[active] = sign * torch.where(inside, at + step, at)
        settled = (inside & (step.abs() <= 1e-13 * (1 + at))) | (high - low <= 1e-15 * (1 + at))
        if bool(settled.all()):
            break
        good = inside & ((left.abs() < 0.9 * last_left) | (step.abs() < 0.5 * last_step))
        new = torch.where(good, at + step, (low + high) / 2)
        ramp = ramp.at(~settled)
        active, time, at, low, high, last_left, last_step = (
            value[~settled] for value in (active, time, new, low, high, left.abs(), step.abs())
        )
    return moves

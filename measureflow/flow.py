"""The flow of measures under a transformer: the continuity equation, solved for every token."""

import math
import time as clock
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow.measures import TokenMeasure
from measureflow.progress import progress_over
from measureflow.solvers import Tally, advance, choose_solver
from measureflow.trajectory import FlowStats, Trajectory
from measureflow.transformer import Transformer


def flow(
    theta: Transformer,
    measures: TokenMeasure,
    times: int | Sequence[float] | Float[Tensor, " T"] | None = None,
    *,
    solver: str = "exact",
    rtol: float | None = None,
    atol: float | None = None,
    steps: int | None = None,
    adjoint: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Trajectory:
    r"""Move measures under a transformer.

        d_t mu + div(mu v[mu]) = 0,   v[mu](t, x) = P_x ( Σ_h V_h A_{B_h}[mu](x) + W act(U x + b) )

    Every layer is solved from its own start with its own parameters. Tokens are projected on the sphere after each
    accepted step (in effect: see `measureflow.solvers`), and the largest drift before that is in `stats`. Atoms of
    weight 0 stay where they are.

    Args:
        theta: the transformer.
        measures: one measure or a batch of any shape; theta moves all of them at once.
        times: which times to store. None: start and end, with memory that does not grow with the number of steps.
            k: k times evenly over [0, T] (`theta.even_times(k)` spreads them evenly over layers instead). Or
            increasing numbers in [0, T].
        solver: "exact" takes the exact flow of each layer that has one and dopri8 for the others. "euler", "rk4"
            take fixed steps. Any other of torchdiffeq's names (dopri8, dopri5, bosh3, fehlberg2, adaptive_heun;
            midpoint, heun2, heun3, explicit_adams, implicit_adams, fixed_adams; scipy_solver) is that solver.
        rtol, atol: tolerances of adaptive solvers, relative and absolute, judged per measure as a root mean square
            over its coordinates; None is 1e-10 and 1e-12 in float64 (dopri8: 1e-12 and 1e-13), 1e-5 and 1e-6 in
            float32 (for solvers of order 2 and 3: 1e-6 and 1e-8, 1e-4 and 1e-5).
        steps: steps per layer of fixed-step solvers; None is 32.
        adjoint: compute gradients by solving backward in time (torchdiffeq's adjoint) instead of through the steps.
            It needs less memory, but the backward solve expands errors wherever the flow contracts: clustering by
            a factor e^c costs a factor e^c of accuracy. Without it the gradient is that of the discrete steps,
            exact to rounding, and each layer is computed again in the backward pass rather than kept.
            Layers whose parameters require a gradient are solved numerically, even where they have an exact flow.
        options: more options of torchdiffeq's solver, such as {"first_step": 0.01}.
        progress: show a bar over layers when it takes more than a second, or a line per stage without a terminal.

    Raises:
        ValueError: dimensions, times or settings do not fit.
        TypeError: theta is not a transformer, or dtypes or devices differ.
        FlowError: the flow cannot be continued; time, layer and measure are named.

    Source: arXiv 2411.04551, equations (1.1) and (1.2).

    >>> from measureflow.transformer import Layer, constant_drift
    >>> theta = Transformer([Layer(perceptron=constant_drift(torch.tensor([0.0, 1.0])), duration=2.0)])
    >>> path = flow(theta, TokenMeasure(torch.tensor([[1.0, 0.0]])), times=3)
    >>> path.points[:, 0, 1]  # tanh t
    tensor([0.0000, 0.7616, 0.9640])
    """
    _check(theta, measures)
    chosen = choose_solver(
        solver, measures.points.dtype, rtol=rtol, atol=atol, steps=steps, adjoint=adjoint, options=options
    )
    stored_times = _stored_times(times, theta.duration)
    switch_times = theta.switch_times
    padded = bool((measures.weights == 0).any())
    points, tally, began = measures.points, Tally(measures.points), clock.perf_counter()
    stored = [points] if stored_times[0] == 0 else []
    with progress_over("flow", len(theta.layers), shown=progress) as advance_bar:
        for k, layer in enumerate(theta.layers):
            begin, end = switch_times[k], switch_times[k + 1]
            if begin >= stored_times[-1]:
                break
            inside = [t for t in stored_times if begin < t <= end]
            now = begin
            for t in dict.fromkeys([*inside, min(end, stored_times[-1])]):
                place = _place(k, layer.stage, now)
                points = advance(
                    layer, points, measures.weights, t - now, chosen, padded=padded, place=place, tally=tally
                )
                now = t
                if t in inside:
                    stored.append(points)
            advance_bar(layer.stage)
    stats = FlowStats(
        solver, tally.steps, tally.evaluations, float(tally.off_sphere.amax()), clock.perf_counter() - began
    )
    return Trajectory(
        torch.tensor(stored_times, dtype=torch.float64),
        torch.stack(stored),
        measures.weights,
        measures.globe,
        tuple(switch_times),
        tuple(layer.stage for layer in theta.layers),
        stats,
    )


def push_forward(
    theta: Transformer,
    measures: TokenMeasure,
    *,
    solver: str = "exact",
    rtol: float | None = None,
    atol: float | None = None,
    steps: int | None = None,
    adjoint: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> TokenMeasure:
    """The measures that a transformer makes of these: the end of `flow`, whose arguments these are.

    >>> from measureflow.transformer import Layer, constant_drift
    >>> theta = Transformer([Layer(perceptron=constant_drift(torch.tensor([0.0, 1.0])))])
    >>> push_forward(theta, TokenMeasure(torch.tensor([[1.0, 0.0]]))).points
    tensor([[0.6481, 0.7616]])
    """
    return flow(
        theta,
        measures,
        solver=solver,
        rtol=rtol,
        atol=atol,
        steps=steps,
        adjoint=adjoint,
        options=options,
        progress=progress,
    ).end


def _place(k: int, stage: str, begin: float) -> Callable[[float], str]:
    name = f"layer {k} ({stage})" if stage else f"layer {k}"
    return lambda since: f"time {begin + since:.6g}, {name}"


def _check(theta: Transformer, measures: TokenMeasure) -> None:
    if not isinstance(theta, Transformer):
        raise TypeError(f"theta: expected a Transformer, got {type(theta).__name__}; Transformer([layer]) makes one")
    if not isinstance(measures, TokenMeasure):
        raise TypeError(f"measures: expected a TokenMeasure, got {type(measures).__name__}")
    if theta.dim != measures.dim:
        raise ValueError(f"expected one dimension, got theta in d = {theta.dim} and measures in d = {measures.dim}")
    points = measures.points
    for k, layer in enumerate(theta.layers):
        for name, tensor in layer.tensors():
            if tensor.dtype != points.dtype or tensor.device != points.device:
                raise TypeError(
                    f"layer {k}, {name}: expected {points.dtype} on {points.device} as the measures have, "
                    f"got {tensor.dtype} on {tensor.device}; theta.to(...) and measures.to(...) convert"
                )


def _stored_times(times: int | Sequence[float] | Tensor | None, duration: float) -> list[float]:
    if times is None:
        return [0.0, duration]
    if isinstance(times, int | Integral):
        last = int(times) - 1
        if last < 1:
            raise ValueError(f"times: expected at least 2 (start and end), got {times}")
        return [duration * (k / last) for k in range(last + 1)]
    given = [float(t) for t in times]
    if not given:
        raise ValueError("times: expected at least one, got none")
    for k, t in enumerate(given):
        # The end may be written in any way that rounds to it.
        if not (0 <= t <= duration or math.isclose(t, duration, rel_tol=1e-12)):
            raise ValueError(f"times: expected numbers in [0, {duration:.6g}], got {t} at position {k}")
        if k and t <= given[k - 1]:
            raise ValueError(f"times: expected increasing numbers, got {t} after {given[k - 1]} at position {k}")
    return [*given[:-1], min(given[-1], duration)]

"""Moving tokens through one layer for a time: fixed steps, and torchdiffeq's solvers kept on the sphere.

Solvers see the velocity extended off the sphere by f(r x) = r v(x), token by token. A Runge-Kutta step from r x is
then r times the step from x, so a solver that drifts off the sphere and is projected at the end moves tokens exactly
as one that is projected after each accepted step. Projecting costs no order.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchdiffeq import odeint, odeint_adjoint
from torchdiffeq._impl.odeint import SOLVERS
from torchdiffeq._impl.scipy_wrapper import ScipyWrapperODESolver
from torchdiffeq._impl.solvers import AdaptiveStepsizeODESolver

from measureflow.culling import culled_velocity
from measureflow.errors import FlowError
from measureflow.exact_flows import exact_flow
from measureflow.transformer import Layer

Velocity = Callable[[Tensor], Tensor]


def _euler(v: Velocity, x: Tensor, h: float) -> Tensor:
    return x + h * v(x)


def _rk4(v: Velocity, x: Tensor, h: float) -> Tensor:
    k1 = v(x)
    k2 = v(x + h / 2 * k1)
    k3 = v(x + h / 2 * k2)
    k4 = v(x + h * k3)
    return x + h / 6 * (k1 + 2 * (k2 + k3) + k4)


FIXED_STEP: Mapping[str, Callable[[Velocity, Tensor, float], Tensor]] = {"euler": _euler, "rk4": _rk4}
SOLVER_NAMES = ("exact", *dict.fromkeys([*FIXED_STEP, *SOLVERS]))
FALLBACK = "dopri8"  # for layers without an exact flow
DEFAULT_STEPS = 32  # a layer
DEFAULT_TOLERANCES = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-5, 1e-6)}  # rtol, atol
# Constructions are carried to 1e-9 through caps a hundred times smaller; solvers of order 8 do it at little cost.
HIGH_ORDER_TOLERANCES = {torch.float64: (1e-12, 1e-13), torch.float32: (1e-5, 1e-6)}
# Solvers of order 2 and 3 would take 1e5 steps per unit of time for 1e-10.
LOW_ORDER_TOLERANCES = {torch.float64: (1e-6, 1e-8), torch.float32: (1e-4, 1e-5)}
STEP_LIMIT = 100_000  # between two stored times or switches
# torchdiffeq's defaults, order 12 and 4 corrections a step, want far smaller steps than the velocity does.
ADAMS_OPTIONS = {"max_order": 5, "max_iters": 30}

# What this module sets itself; all other arguments of torchdiffeq's solver classes may be given as options.
_OWN_ARGUMENTS = {"self", "func", "y0", "rtol", "atol", "norm", "step_t", "jump_t", "step_size", "grid_constructor"}
_OWN_ARGUMENTS |= {"interp", "implicit", "kwargs", "unused_kwargs"}
_COMPLAINTS = "Functional iteration did not converge|lsoda"


@dataclass(frozen=True)
class Solver:
    """A solver with its settings, checked; made by `choose_solver`."""

    name: str
    rtol: float
    atol: float
    steps: int
    adjoint: bool
    options: Mapping[str, Any]


def choose_solver(
    name: str,
    dtype: torch.dtype,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    steps: int | None = None,
    adjoint: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Solver:
    """Check a solver's name and settings and fill in the defaults.

    Raises:
        ValueError: no solver has that name, or a setting is out of range or means nothing to that solver.
        TypeError: the measures are neither float64 nor float32.

    >>> choose_solver("rk4", torch.float64).steps
    32
    """
    if name not in SOLVER_NAMES:
        raise ValueError(f"solver: expected one of {', '.join(SOLVER_NAMES)}, got {name!r}")
    if dtype not in DEFAULT_TOLERANCES:
        raise TypeError(f"measures: expected float64 or float32 points, got {dtype}")
    kind: type = SOLVERS[FALLBACK if name == "exact" else name]
    adaptive = issubclass(kind, AdaptiveStepsizeODESolver | ScipyWrapperODESolver)
    judges = adaptive or name in ("implicit_adams", "fixed_adams")
    for setting, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not judges:
            raise ValueError(f"{setting}: solver {name!r} takes fixed steps and no tolerance; set `steps`")
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{setting}: expected a number in [0, 1), got {value}")
    if rtol == 0 and atol == 0:
        raise ValueError("rtol, atol: expected at least one of them above 0")
    if steps is not None and adaptive:
        raise ValueError(f"steps: solver {name!r} chooses its own steps; set `rtol` and `atol`")
    if steps is not None and not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"steps: expected a whole number of at least 1 per layer, got {steps}")
    if adjoint and name in FIXED_STEP:
        raise ValueError(f"adjoint: solver {name!r} is differentiated directly; take one of torchdiffeq's others")
    known = set() if name in FIXED_STEP else _option_names(kind)
    for option in options or {}:
        if option not in known:
            valid = ", ".join(sorted(known)) or "none"
            raise ValueError(f"options: solver {name!r} has no option {option!r}; it has {valid}")
    order = getattr(kind, "order", 5)
    table = LOW_ORDER_TOLERANCES if order < 4 else HIGH_ORDER_TOLERANCES if order >= 8 else DEFAULT_TOLERANCES
    standard = table[dtype]
    return Solver(
        name,
        standard[0] if rtol is None else rtol,
        standard[1] if atol is None else atol,
        DEFAULT_STEPS if steps is None else steps,
        adjoint,
        dict(options or {}),
    )


def _option_names(kind: type) -> set[str]:
    names = {name for parent in kind.__mro__ for name in inspect.signature(parent.__init__).parameters}
    return names - _OWN_ARGUMENTS - {"args"}


class Tally:
    """What a flow has cost so far; the drift stays a tensor, so that counting never waits for the device."""

    def __init__(self, like: Tensor) -> None:
        self.steps: int | None = 0
        self.evaluations = 0
        self.off_sphere = like.new_zeros(like.shape[:-2])

    def count_step(self, *_: object) -> None:
        """Add a step; torchdiffeq calls this with time, state and step."""
        if self.steps is not None:
            self.steps += 1


class Field:
    """The velocity under one layer as solvers call it: extended off the sphere, zero on padding, counted, guarded.

    Args:
        layer: what moves the tokens.
        weights: (*batch, n).
        padded: some weights are 0.
        place: what an error says about where the flow is, given the time since the piece began.
    """

    def __init__(
        self,
        layer: Layer,
        weights: Float[Tensor, "*batch n"],
        padded: bool,
        place: Callable[[float], str],
        tally: Tally,
    ) -> None:
        self.layer, self.weights, self.place, self.tally = layer, weights, place, tally
        self.real = (weights.detach() > 0).unsqueeze(-1) if padded else None
        self.velocity = culled_velocity(layer, self.real)
        self.errors: Tensor | None = None
        self.attempts = 0
        # torchdiffeq looks for these by name; a solver that lacks one of the hooks would warn if it were always set.
        self.callback_step: Callable[..., None]
        self.callback_accept_step: Callable[..., None]
        self.callback_step_adjoint: Callable[..., None]

    def __call__(self, t: Tensor | None, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        self.tally.evaluations += 1
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        v = length * self.velocity(y / length, self.weights)
        return v if self.real is None else torch.where(self.real, v, torch.zeros_like(v))

    def norm(self, error: Float[Tensor, "*batch n d"]) -> Float[Tensor, ""]:
        """Largest over the measures of the root mean square over their atoms: a measure alone sets its own error."""
        # Detached: the step sizes are no part of the derivative, and the root of an error of 0 has an infinite slope.
        square = error.detach().square().sum((-2, -1))
        count = error.shape[-2] if self.real is None else self.real.sum((-2, -1))
        self.errors = square / (count * error.shape[-1])
        return self.errors.amax().sqrt()

    def guard(self, t: Tensor, y: Tensor, dt: Tensor) -> None:
        """Stop an adaptive solver that cannot go on; called before each step it tries, forward in time."""
        self.attempts += 1
        finite = y.isfinite().flatten(-2).all(-1)
        if not bool(finite.all()):
            self.stop(float(t), "the tokens are no longer finite", (~finite).long())
        self._guard_step(float(t), float(dt), self.errors)

    def guard_adjoint(self, t: Tensor, y: object, dt: Tensor) -> None:
        """The same for the backward solve of the adjoint, whose steps go down in time."""
        self.attempts += 1
        self._guard_step(float(t), float(dt), None, " in the backward solve of the adjoint")

    def _guard_step(self, t: float, dt: float, errors: Tensor | None, where: str = "") -> None:
        if errors is not None and not bool(errors.isfinite().all()):
            self.stop(t, "the velocity is not finite", (~errors.isfinite()).long())
        if not abs(t) + dt > abs(t):
            advice = "loosen rtol and atol, or take solver='rk4'"
            self.stop(t, f"the step shrank to nothing{where}, as at a jump of the velocity; {advice}", errors)
        if self.attempts > STEP_LIMIT:
            self.stop(t, f"more than {STEP_LIMIT} steps{where}; loosen rtol and atol", errors)

    def stop(self, t: float, cause: str, badness: Tensor | None) -> NoReturn:
        """End the flow in one line.

        Raises:
            FlowError: always.
        """
        who = ""
        if badness is not None and badness.ndim:
            index = torch.unravel_index(badness.argmax(), badness.shape)
            who = f", measure {', '.join(str(int(i)) for i in index)}"
        raise FlowError(f"{self.place(t)}{who}: {cause}")


def advance(
    layer: Layer,
    points: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"],
    duration: float,
    solver: Solver,
    *,
    padded: bool,
    place: Callable[[float], str],
    tally: Tally,
) -> Float[Tensor, "*batch n d"]:
    """Move tokens under one layer for a time, and project them on the sphere at its end.

    Where a gradient is wanted (and not by the adjoint) what happens inside is not kept but computed again in the
    backward pass, so memory does not grow with the number of steps but with the number of calls.

    Raises:
        FlowError: tokens or velocity are no longer finite, or an adaptive solver's step shrank to nothing or its
            step limit was reached.
        ValueError: a gradient is wanted of scipy's solver without the adjoint.
    """
    tensors = [weights, *(tensor for _, tensor in layer.tensors())]
    learning = torch.is_grad_enabled() and (points.requires_grad or any(t.requires_grad for t in tensors))
    if learning and solver.name == "scipy_solver" and not solver.adjoint:
        raise ValueError("solver: 'scipy_solver' has no gradient of its own; set adjoint=True or take another solver")

    def move(start: Tensor) -> Tensor:
        field = Field(layer, weights, padded, place, tally)
        end = _move(field, start, duration, solver, [t for t in tensors if t.requires_grad])
        if field.real is not None:
            end = torch.where(field.real, end, start)
        end = _projected(end, tally)
        if not bool((tally.off_sphere <= 1).all()):
            off = float(tally.off_sphere.amax())
            cause = f"a token left the sphere, off by {off:.3g}; take smaller steps or a lower tolerance"
            field.stop(duration, cause if math.isfinite(off) else "the tokens are no longer finite", tally.off_sphere)
        return end

    if learning and not solver.adjoint:
        return checkpoint(move, points, use_reentrant=False, preserve_rng_state=False)
    return move(points)


def _move(field: Field, points: Tensor, duration: float, solver: Solver, learned: list[Tensor]) -> Tensor:
    if solver.name == "exact":
        moved = exact_flow(field.layer, points, field.weights, duration)
        if moved is not None:
            field.tally.count_step()
            return moved
    if solver.name in FIXED_STEP:
        steps = max(1, math.ceil(solver.steps * duration / field.layer.duration - 1e-9))
        for _ in range(steps):
            points = FIXED_STEP[solver.name](lambda x: field(None, x), points, duration / steps)
            points = _projected(points, field.tally)
            field.tally.count_step()
        return points
    return _move_by_torchdiffeq(field, points, duration, solver, learned)


def _projected(points: Tensor, tally: Tally) -> Tensor:
    length = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    tally.off_sphere = torch.maximum(tally.off_sphere, (length.detach() - 1).abs().amax((-2, -1)))
    return points / length


def _move_by_torchdiffeq(
    field: Field, points: Tensor, duration: float, solver: Solver, learned: list[Tensor]
) -> Tensor:
    method = FALLBACK if solver.name == "exact" else solver.name
    options: dict[str, Any] = (ADAMS_OPTIONS if method.endswith("adams") else {}) | dict(solver.options)
    backward = dict(options)
    if issubclass(SOLVERS[method], AdaptiveStepsizeODESolver):
        # A step ends exactly where the piece does: torchdiffeq would step beyond and interpolate with lower order.
        options |= {"norm": field.norm, "step_t": [duration]}
        backward |= {"step_t": [0.0]}
        field.callback_step, field.callback_accept_step = field.guard, field.tally.count_step
        field.callback_step_adjoint = field.guard_adjoint
    elif method == "scipy_solver":
        field.tally.steps = None
    else:
        steps = max(1, math.ceil(solver.steps * duration / field.layer.duration - 1e-9))
        options["norm"] = field.norm
        options["grid_constructor"] = backward["grid_constructor"] = lambda f, y, t: _even_grid(t, steps)
        field.callback_step = field.tally.count_step
    times = torch.tensor([0.0, duration], dtype=torch.float64, device=points.device)
    settings: dict[str, Any] = {"rtol": solver.rtol, "atol": solver.atol, "method": method, "options": options}
    if solver.adjoint:
        settings |= {"adjoint_params": tuple(learned), "adjoint_options": backward}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_COMPLAINTS)
        solve: Callable[..., Any] = odeint_adjoint if solver.adjoint else odeint
        try:
            path = solve(field, points, times, **settings)
        except UserWarning as complaint:
            field.stop(0.0, f"{method}: {complaint}", None)
    if len(path) < 2:
        field.stop(0.0, f"{method} did not reach the end; loosen rtol and atol or take another solver", None)
    return path[-1]


def _even_grid(times: Tensor, steps: int) -> Tensor:
    shares = torch.linspace(0, 1, steps + 1, dtype=times.dtype, device=times.device)
    grid = times[0] + shares * (times[-1] - times[0])
    grid[-1] = times[-1]
    return grid

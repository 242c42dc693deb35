"""How attention weighs keys: one frozen dataclass a kernel, all in the table KERNELS.

With scores s_ij = <B x_i, y_j> and key weights w_j a kernel gives row i the numbers p_ij, and attention is
A_B[mu](x_i) = Σ_j p_ij y_j. Keys of weight 0 have log-weight -inf and take no part.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow.errors import NotConvergedError

Scores = Float[Tensor, "*batch n m"]
LogWeights = Float[Tensor, "*batch 1 m"]
LogQueries = Float[Tensor, "*batch n 1"]
SINKHORN_LIMIT = 10_000
"""Most normalisations of Sinkhorn attention before it gives up."""
NEWTON_EVERY = 8
"""Sweeps of Sinkhorn attention from one trial of Newton's method to the next."""


@dataclass(frozen=True)
class Kernel(ABC):
    """A way to weigh keys.

    `by_row`: a row of p depends on its own scores only, so that rows can be taken in blocks.
    """

    by_row: ClassVar[bool] = True

    @abstractmethod
    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: LogQueries | None) -> Scores:
        """p_ij of the attention Σ_j p_ij y_j.

        Args:
            scores: s_ij.
            log_weights: log w_j, -inf for padding.
            log_queries: log-weights of the queries, -inf for padding; None for kernels that go by row.
        """


@dataclass(frozen=True)
class Softmax(Kernel):
    """p_ij = w_j e^{s_ij} / Σ_k w_k e^{s_ik}, with exponents shifted by the row's largest."""

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: LogQueries | None) -> Scores:
        return torch.softmax(scores + log_weights, dim=-1)


@dataclass(frozen=True)
class Unnormalised(Kernel):
    """p_ij = w_j e^{s_ij} (the USA model of Geshkovski et al., "A mathematical perspective on Transformers").

    Infinite for scores above 709 in float64, 88 in float32.
    """

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: LogQueries | None) -> Scores:
        return torch.exp(scores + log_weights)


@dataclass(frozen=True)
class Sigmoid(Kernel):
    """p_ij = w_j / (1 + e^{-s_ij - bias})."""

    bias: float = 0.0

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: LogQueries | None) -> Scores:
        return torch.exp(log_weights) * torch.sigmoid(scores + self.bias)


@dataclass(frozen=True)
class Linear(Kernel):
    """p_ij = w_j s_ij."""

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: LogQueries | None) -> Scores:
        return torch.exp(log_weights) * scores


@dataclass(frozen=True)
class Hardmax(Kernel):
    """The keys of largest score, by their weights: the limit of softmax as B grows.

    Scores within 16 roundings of the largest count as equal to it, so that ties do not hang on the order of sums.
    The choice is piecewise constant: queries and B are cut off from gradients.
    """

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: LogQueries | None) -> Scores:
        scores = scores.detach()
        present = scores.masked_fill(torch.isneginf(log_weights), -torch.inf)
        tie = 16 * torch.finfo(scores.dtype).eps * scores.abs().amax(-1, keepdim=True)
        return torch.softmax(log_weights.masked_fill(present < present.amax(-1, keepdim=True) - tie, -torch.inf), -1)


@dataclass(frozen=True)
class Sinkhorn(Kernel):
    """Doubly stochastic attention: p_ij = u_i e^{s_ij} w_j v_j with Σ_j p_ij = 1 and Σ_i q_i p_ij = w_j.

    q are the weights of the queries; both measures count with total mass 1. Rows and columns are normalised in turn,
    rows first, in the log domain. All scores of a measure are needed at once.

    Args:
        iterations: exactly so many normalisations, differentiated one by one (1 is softmax; the last of an even
            number leaves the columns right, of an odd number the rows). None goes on to the limit, whose gradients
            come from its equations.
        tolerance: of the limit, in column mass (summed, of total 1); rounding, 32 eps (1 + largest |s|), where that
            is more.

    Raises:
        ValueError: iterations or tolerance are not positive.
        NotConvergedError: the tolerance is not reached after 10,000 normalisations.

    Source: Sander, Ablin, Blondel, Peyré, "Sinkformers: Transformers with doubly stochastic attention".
    """

    by_row: ClassVar[bool] = False
    iterations: int | None = None
    tolerance: float = 1e-9

    def __post_init__(self) -> None:
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, or None for the limit, got {self.iterations}")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance: expected a positive number, got {self.tolerance}")

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: LogQueries | None) -> Scores:
        if log_queries is None:
            log_queries = torch.zeros_like(scores[..., :1])
        log_w = torch.log_softmax(log_weights, dim=-1)
        log_q = torch.log_softmax(log_queries, dim=-2)
        if self.iterations is not None:
            return _alternate(scores, log_w, log_q, self.iterations)
        with torch.no_grad():
            v = _limit(scores, log_w, log_q, self.tolerance)
        if scores.requires_grad or log_w.requires_grad or log_q.requires_grad:
            # Newton steps from the limit carry its derivatives: one is right to first order, the second makes that
            # third order. Their values, rounding at best, are left out.
            for _ in range(2):
                moved = newton_step(scores, log_w, log_q, v)
                v = v.detach() + (moved - moved.detach())
        return torch.softmax(scores + log_w + v, dim=-1)


def _column_step(log_p: Tensor, log_w: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Column masses in logarithms, and what to add to the columns; 0 for padding."""
    mass = torch.logsumexp(log_p + log_q, dim=-2, keepdim=True)
    padding = torch.isneginf(log_w)
    return mass, torch.where(padding, 0.0, log_w - torch.where(padding, 0.0, mass))


def _alternate(scores: Tensor, log_w: Tensor, log_q: Tensor, iterations: int) -> Tensor:
    log_p = torch.log_softmax(scores + log_w, dim=-1)
    for k in range(1, iterations):
        log_p = log_p + _column_step(log_p, log_w, log_q)[1] if k % 2 else torch.log_softmax(log_p, dim=-1)
    return torch.exp(log_p)


def _limit(scores: Tensor, log_w: Tensor, log_q: Tensor, tolerance: float) -> Tensor:
    """log v_j of the limit, (*batch, 1, m)."""
    log_k, w = scores + log_w, torch.exp(log_w)
    tolerance = max(tolerance, 32 * torch.finfo(scores.dtype).eps * (1 + float(scores.abs().amax())))

    def step_and_error(v: Tensor) -> tuple[Tensor, Tensor]:
        mass, step = _column_step(torch.log_softmax(log_k + v, dim=-1), log_w, log_q)
        return step, (torch.exp(mass) - w).abs().sum(-1, keepdim=True)

    v = torch.zeros_like(log_w)
    step, error = step_and_error(v)
    for k in range(1, SINKHORN_LIMIT // 2):
        if bool(error.amax() < tolerance):
            return v
        v = v + step
        step, error = step_and_error(v)
        if k % NEWTON_EVERY == 0:
            # Alternating slows down as B grows, at the end of which Newton's method takes a few steps; far from the
            # limit it may lead astray, so a measure takes a step of it only if that halves its error.
            trial = newton_step(scores, log_w, log_q, v)
            trial_step, trial_error = step_and_error(trial)
            better = trial_error < error / 2
            v, step, error = (
                torch.where(better, new, old) for new, old in ((trial, v), (trial_step, step), (trial_error, error))
            )
    raise NotConvergedError(
        f"Sinkhorn attention: column masses are off by {float(error.amax()):.3g} after {SINKHORN_LIMIT} "
        f"normalisations, expected {tolerance:.3g}; raise the tolerance, fix the iterations or make B smaller"
    )


def newton_step(scores: Tensor, log_w: Tensor, log_q: Tensor, v: Tensor) -> Tensor:
    """One Newton step on log v for the column masses Σ_i q_i p_ij(v) = w_j, rows being normalised exactly."""
    p = torch.softmax(scores + log_w + v, dim=-1)
    w = torch.exp(log_w)
    mass = (torch.exp(log_q) * p).sum(-2, keepdim=True)
    root = torch.sqrt(torch.where(mass.detach() > 0, mass, 1.0))
    m = torch.exp(log_q / 2) * p / root
    # The Jacobian diag(mass) - p^T q p, scaled to 1 - m^T m, is singular along v + constant, which changes no p:
    # adding the projection on that direction makes it regular. A ridge of its rounding errors keeps it so where B is
    # so large that p is a permutation.
    along = w / root
    size = v.shape[-1]
    ridge = 1 + 4 * size * torch.finfo(v.dtype).eps
    jacobian = ridge * torch.eye(size, dtype=v.dtype, device=v.device) - m.mT @ m + along.mT @ along
    return v - torch.linalg.solve(jacobian, ((mass - w) / root).mT).mT / root


KERNELS: dict[str, type[Kernel]] = {
    "softmax": Softmax,
    "unnormalised": Unnormalised,
    "sigmoid": Sigmoid,
    "linear": Linear,
    "hardmax": Hardmax,
    "sinkhorn": Sinkhorn,
}
"""Every kernel by its name; tests run over this table."""


def get_kernel(kernel: Kernel | str) -> Kernel:
    """A kernel by its name, with its defaults; a kernel is returned as it is.

    Raises:
        ValueError: there is no kernel of that name.

    >>> get_kernel("softmax")
    Softmax()
    """
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")
    return KERNELS[kernel]()

"""How attention weighs keys: one frozen dataclass a kernel, all in the table KERNELS.

With scores s_ij = <B x_i, y_j> and key weights w_j a kernel gives row i the numbers p_ij, and attention is
A_B[mu](x_i) = Σ_j p_ij y_j. Keys of weight 0 have log-weight -inf and take no part.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow.errors import NotConvergedError

Scores = Float[Tensor, "*batch n m"]
LogWeights = Float[Tensor, "*#batch 1 m"]


@dataclass(frozen=True)
class Kernel(ABC):
    """A way to weigh keys. `by_row`: a row of p depends on its own scores only, so rows can be taken in blocks."""

    @abstractmethod
    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: Float[Tensor, "*#batch n 1"]) -> Scores:
        """p_ij of the attention Σ_j p_ij y_j.

        Args:
            scores: s_ij.
            log_weights: log w_j, -inf for padding.
            log_queries: log-weights of the queries, which only doubly stochastic kernels use.
        """

    @property
    def by_row(self) -> bool:
        """Whether each row of p depends on its own scores only."""
        return True


@dataclass(frozen=True)
class Softmax(Kernel):
    """p_ij = w_j e^{s_ij} / Σ_k w_k e^{s_ik}, with exponents shifted by the row's largest."""

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: Tensor) -> Scores:
        return torch.softmax(scores + log_weights, dim=-1)


@dataclass(frozen=True)
class Unnormalised(Kernel):
    """p_ij = w_j e^{s_ij} (the USA model of "A mathematical perspective on Transformers"); overflows for s > 709."""

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: Tensor) -> Scores:
        return torch.exp(scores + log_weights)


@dataclass(frozen=True)
class Sigmoid(Kernel):
    """p_ij = w_j / (1 + e^{-s_ij - bias})."""

    bias: float = 0.0

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: Tensor) -> Scores:
        return torch.exp(log_weights) * torch.sigmoid(scores + self.bias)


@dataclass(frozen=True)
class Linear(Kernel):
    """p_ij = w_j s_ij."""

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: Tensor) -> Scores:
        return torch.exp(log_weights) * scores


@dataclass(frozen=True)
class Hardmax(Kernel):
    """The keys of largest score, by their weights: the limit of softmax at infinite B. Its gradient in B is 0."""

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: Tensor) -> Scores:
        present = scores.masked_fill(torch.isneginf(log_weights), -torch.inf)
        top = present >= present.detach().amax(-1, keepdim=True)
        chosen = torch.exp(log_weights) * top
        return chosen / chosen.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Sinkhorn(Kernel):
    """Doubly stochastic attention (Sander et al., "Sinkformers"): p_ij = u_i e^{s_ij} v_j w_j with Σ_j p_ij = 1 and
    Σ_i q_i p_ij = w_j for query weights q, by alternating normalisations in the log domain, rows first.

    One iteration is softmax. It needs all rows at once.

    Args:
        iterations: normalisations, of rows and columns in turn, at most.
        tolerance: stop when both marginals are off by less (of total mass 1). With fewer than 10 iterations, which
            asks for a truncated Sinkformer, nothing is checked.

    Raises:
        NotConvergedError: the tolerance is not reached.
    """

    iterations: int = 10_000
    tolerance: float = 1e-9

    @property
    def by_row(self) -> bool:
        """Columns are normalised too."""
        return False

    def probabilities(self, scores: Scores, log_weights: LogWeights, log_queries: Tensor) -> Scores:
        log_p = scores + log_weights
        columns = torch.zeros_like(log_weights)
        for k in range(self.iterations):
            if k % 2 == 0:
                log_p = log_p - torch.logsumexp(log_p, dim=-1, keepdim=True)
                continue
            mass = torch.logsumexp(log_p + log_queries, dim=-2, keepdim=True)
            columns = torch.where(torch.isneginf(log_weights), 0.0, log_weights - mass)
            off = (torch.exp(mass) - torch.exp(log_weights)).detach().abs().sum(-1).amax()
            if self.iterations >= 10 and bool(off < self.tolerance):
                return torch.exp(log_p)
            log_p = log_p + columns
        if self.iterations >= 10:
            raise NotConvergedError(
                f"Sinkhorn attention: not converged to {self.tolerance:g} in {self.iterations} iterations; allow more"
            )
        return torch.exp(log_p)


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


def kernel_to_json(kernel: Kernel) -> dict[str, Any]:
    """Name and settings of a kernel, as JSON values."""
    name = next(name for name, kind in KERNELS.items() if type(kernel) is kind)
    return {"name": name} | {f.name: getattr(kernel, f.name) for f in fields(kernel)}

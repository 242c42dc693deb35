"""Which dots are drawn, in which order, and how large."""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray


def mixed_order(weights: Float[ndarray, "N n"]) -> tuple[Int[ndarray, " k"], Int[ndarray, " k"]]:
    """Pairs and rows of all atoms that are no padding, pairs taking turns so that none covers another as a whole.

    >>> [index.tolist() for index in mixed_order(np.array([[0.5, 0.5], [1.0, 0.0]]))]
    [[0, 1, 0], [0, 0, 1]]
    """
    row, pair = np.nonzero(weights.T > 0)
    return pair, row


def dot_areas(
    weights: Float[ndarray, "N n"], order: tuple[Int[ndarray, " k"], Int[ndarray, " k"]], width: float = 6.0
) -> Float[ndarray, " k"]:
    """Areas (points squared) of the dots: in proportion to weight, smaller the more there are.

    Args:
        weights: of the atoms.
        order: of the dots, from `mixed_order`.
        width: of the ball, in inches.
    """
    masses = weights[order]
    typical = min(max(420 / np.sqrt(len(masses)), 6.0), 60.0) * (width / 6.0) ** 2
    return np.maximum(typical * masses / np.median(masses), 1.0)

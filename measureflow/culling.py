"""The velocity under a layer without the neurons that see no token.

Constructions have layers of thousands of relu neurons, each active on a small cap of the sphere, so that nearly all
are exactly zero on any one measure. Leaving those out changes no more than the order of a sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from measureflow import sphere
from measureflow.transformer import Layer, Perceptron

FEWEST_NEURONS = 64  # below that, finding out costs more than it saves
SLACK = 1.5  # a measure may spread to this many times its radius before the neurons are looked through again
LEEWAY = 1e-3  # and by this angle, for measures of one point
MARGIN = 1e-9  # neurons this close (relative to |u| + |b|) to being active somewhere on the cap are kept


@dataclass(frozen=True, eq=False)
class SeenNeurons:
    """Per measure, the neurons that can be active on a cap around it; the same number for all, the rest at zero.

    Args:
        centre: (*batch, 1, d) of the caps.  reach: (*batch, 1) largest squared chord from the centre.
        W: (*batch, k, d).  U: (*batch, k, d).  b: (*batch, 1, k).
    """

    centre: Float[Tensor, "*batch 1 d"]
    reach: Float[Tensor, "*batch 1"]
    W: Float[Tensor, "*batch k d"]
    U: Float[Tensor, "*batch k d"]
    b: Float[Tensor, "*batch 1 k"]

    def cover(self, points: Float[Tensor, "*batch n d"], real: Bool[Tensor, "*batch n 1"] | None) -> bool:
        """Are all tokens on the caps?"""
        return bool((_square_chords(points, self.centre, real) <= self.reach).all())

    def velocity(self, points: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """W relu(U x + b) in R^d, not yet projected."""
        return torch.relu(points @ self.U.mT + self.b) @ self.W


def _square_chords(points: Tensor, centre: Tensor, real: Tensor | None) -> Tensor:
    square = (points.detach() - centre).square().sum(-1)
    return square if real is None else square * real.squeeze(-1)


def seen_neurons(
    perceptron: Perceptron, points: Float[Tensor, "*batch n d"], real: Bool[Tensor, "*batch n 1"] | None = None
) -> SeenNeurons | None:
    """The neurons of a relu perceptron that can be active near the tokens; None where that is more than half.

    Args:
        perceptron: with activation "relu".
        points: unit vectors.
        real: False on padding; None where there is none.
    """
    x, U, b = points.detach(), perceptron.U.detach(), perceptron.b.detach()
    mean = (x if real is None else x * real).sum(-2, keepdim=True)
    # Any centre is right; where tokens have no mean direction the cap is the whole sphere and nothing is left out.
    centre = mean / torch.linalg.vector_norm(mean, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    chord = _square_chords(x, centre, real).amax(-1, keepdim=True).sqrt()
    radius = (SLACK * 2 * torch.asin((chord / 2).clamp_max(1)) + LEEWAY).clamp_max(torch.pi)
    # The largest <u, x> on the cap is |u| cos(max(angle(u, centre) - radius, 0)).
    size = torch.linalg.vector_norm(U, dim=-1)
    cosine = ((centre @ U.mT).squeeze(-2) / size.clamp_min(torch.finfo(x.dtype).tiny)).clamp(-1, 1)
    rim = cosine * radius.cos() + (1 - cosine**2).sqrt() * radius.sin()
    highest = size * torch.where(cosine >= radius.cos(), torch.ones_like(rim), rim) + b
    seen = highest > -MARGIN * (size + b.abs())
    most = max(int(seen.sum(-1).amax()), 1)
    if 2 * most > len(b):
        return None
    index = seen.to(x.dtype).topk(most, dim=-1).indices.sort(dim=-1).values
    reach = 4 * (radius / 2).sin().square()
    W, U, b = perceptron.W.mT[index], perceptron.U[index], perceptron.b[index].unsqueeze(-2)
    return SeenNeurons(centre, reach, W, U, b)


def culled_velocity(layer: Layer, real: Bool[Tensor, "*batch n 1"] | None) -> Callable[[Tensor, Tensor], Tensor]:
    """`layer.velocity`, made faster where most neurons of its perceptron see no token.

    The neurons are chosen again whenever a token leaves the cap for which they were chosen. To look for that waits
    for the result, so it is done on the CPU only, where waiting costs nothing.
    """
    p = layer.perceptron
    if p is None or p.activation != "relu" or len(p.b) < FEWEST_NEURONS or p.b.device.type != "cpu":
        return layer.velocity
    heads = replace(layer, perceptron=None) if layer.heads else None
    seen: SeenNeurons | None = None
    worthwhile = True

    def velocity(points: Tensor, weights: Tensor) -> Tensor:
        nonlocal seen, worthwhile
        if worthwhile and (seen is None or not seen.cover(points, real)):
            seen = seen_neurons(p, points, real)
            worthwhile = seen is not None
        if seen is None:
            return layer.velocity(points, weights)
        v = sphere.tangent(points, seen.velocity(points))
        return v if heads is None else v + heads.velocity(points, weights)

    return velocity

"""Problems with known answers, for every solver, dtype and room."""

import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from measureflow import sphere
from measureflow.measures import TokenMeasure
from measureflow.transformer import Head, Layer, Perceptron, Transformer


def simplex_cone(n: int, d: int, cosine: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """`n` unit vectors of R^d, d >= n, any two of which have the same cosine > -1/(n-1)."""
    gram = (1 - cosine) * torch.eye(n, dtype=torch.float64) + cosine
    return torch.nn.functional.pad(torch.linalg.cholesky(gram), (0, d - n)).to(dtype)


def equiangular(
    n: int, beta: float, start: float, duration: float, dtype: torch.dtype = torch.float64
) -> tuple[Transformer, TokenMeasure, float]:
    """Softmax attention with V = I, B = beta I on n tokens of equal cosines, and the cosine they reach.

    r' = 2 e^{beta r} (1 - r) ((n-1) r + 1) / (e^beta + (n-1) e^{beta r})   (Geshkovski et al., "A mathematical
    perspective on Transformers"). The expected value comes from that scalar equation, solved to 1e-13.
    """
    identity = torch.eye(n, dtype=dtype)
    theta = Transformer([Layer([Head(identity, beta * identity)], duration=duration)])

    def speed(_, r):
        grown = torch.exp(torch.as_tensor(beta * (r - 1))).numpy()
        return 2 * grown * (1 - r) * ((n - 1) * r + 1) / (1 + (n - 1) * grown)

    solution = solve_ivp(speed, (0, duration), [start], method="DOP853", rtol=1e-13, atol=1e-14)
    return theta, TokenMeasure(simplex_cone(n, n, start, dtype)), float(solution.y[0, -1])


def rich_transformer(d: int, seed: int, dtype: torch.dtype = torch.float64) -> Transformer:
    """Three layers with everything: two heads, softmax and not; perceptrons of two activations; both together."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) / d**0.5

    def perceptron(m: int, activation: str) -> Perceptron:
        return Perceptron(draw(d, m), draw(m, d), draw(m), activation)

    return Transformer(
        [
            Layer([Head(draw(d, d), 2 * draw(d, d)), Head(draw(d, d), draw(d, d))], duration=0.6, stage="mix"),
            Layer([Head(draw(d, d), draw(d, d))], perceptron(5, "tanh"), duration=0.3, stage="bend"),
            Layer(perceptron=perceptron(4, "softplus"), duration=0.5, stage="push"),
        ]
    )


def rotated(theta: Transformer, Q: Tensor) -> Transformer:
    """The transformer seen from a rotated frame: it moves Q x as `theta` moves x."""
    layers = []
    for layer in theta.layers:
        heads = [Head(Q @ h.V @ Q.mT, Q @ h.B @ Q.mT, h.kernel) for h in layer.heads]
        p = layer.perceptron
        turned = None if p is None else Perceptron(Q @ p.W, p.U @ Q.mT, p.b, p.activation)
        layers.append(Layer(heads, turned, layer.duration, layer.stage))
    return Transformer(layers)


def random_measures(*batch: int, n: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> TokenMeasure:
    """Uniform tokens with unequal weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*batch, n, generator=generator, dtype=torch.float64) + 0.2
    points = sphere.uniform(*batch, n, d, generator=generator)
    return TokenMeasure(points, weights / weights.sum(-1, keepdim=True)).to(dtype)

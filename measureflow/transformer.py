"""Transformers on the sphere: piecewise-constant parameters theta : [0, T] -> (V, B, W, U, b).

A token moves by

    x' = P_x ( Σ_h V_h A_{B_h}[mu](x) + W act(U x + b) ),      P_x = I - x x^T

(arXiv 2411.04551, equation (1.2); several heads add). Each constant piece is one layer, each change a switch.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from measureflow import sphere
from measureflow.attention import Kernel, attend, get_kernel

ACTIVATIONS = {"relu": torch.relu, "softplus": torch.nn.functional.softplus, "tanh": torch.tanh}


@dataclass(frozen=True, eq=False)
class Head:
    """An attention head: adds V A_B[mu](x) to the velocity.

    Args:
        V, B: (d, d).
        kernel: how keys are weighed, a name or a Kernel of `measureflow.attention`.

    Raises:
        ValueError: shapes differ from (d, d), or the kernel has no such name.
        TypeError: V and B are not floating-point tensors of one dtype.
    """

    V: Float[Tensor, "d d"]
    B: Float[Tensor, "d d"]
    kernel: Kernel | str = "softmax"
    attends_evenly: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_tensors(V=(self.V, ("d", "d")), B=(self.B, ("d", "d")))
        object.__setattr__(self, "kernel", get_kernel(self.kernel))
        # With B = 0 softmax attention is the barycentre, which needs no scores.
        even = self.kernel == get_kernel("softmax") and not self.B.requires_grad and not bool(self.B.any())
        object.__setattr__(self, "attends_evenly", even)

    def velocity(
        self, points: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*batch n"]
    ) -> Float[Tensor, "*batch #n d"]:
        """V A_B[mu](x) in R^d, not yet projected."""
        if self.attends_evenly:
            attended = (weights.unsqueeze(-1) * points).sum(-2, keepdim=True)
        else:
            attended = attend(points, points, weights, self.B, kernel=self.kernel, query_weights=weights)
        return attended @ self.V.mT


@dataclass(frozen=True, eq=False)
class Perceptron:
    """A perceptron of m neurons: adds W act(U x + b) to the velocity.

    Args:
        W: (d, m).  U: (m, d).  b: (m,).
        activation: "relu", "softplus" or "tanh".

    Raises:
        ValueError: shapes do not fit, or the activation has no such name.
        TypeError: W, U and b are not floating-point tensors of one dtype.
    """

    W: Float[Tensor, "d m"]
    U: Float[Tensor, "m d"]
    b: Float[Tensor, " m"]
    activation: str = "relu"

    def __post_init__(self) -> None:
        _check_tensors(W=(self.W, ("d", "m")), U=(self.U, ("m", "d")), b=(self.b, ("m",)))
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")

    def velocity(self, points: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """W act(U x + b) in R^d, not yet projected."""
        return ACTIVATIONS[self.activation](points @ self.U.mT + self.b) @ self.W.mT


def constant_drift(w: Float[Tensor, " d"]) -> Perceptron:
    """The perceptron with W = w, U = 0, b = 1: the same vector everywhere (arXiv 2411.04551, Lemma 3.2)."""
    return Perceptron(w.unsqueeze(1), torch.zeros_like(w).unsqueeze(0), torch.ones_like(w[:1]))


def saturating_gate(z: Float[Tensor, " d"], threshold: float, width: float, drift: Float[Tensor, " d"]) -> Perceptron:
    """Drift times clip((<z, x> - threshold) / width, 0, 1), as two neurons of one direction.

    Raises:
        ValueError: the width is not positive.
    """
    if not width > 0:
        raise ValueError(f"width: expected a positive number, got {width}")
    W = torch.stack([drift, -drift], dim=1) / width
    return Perceptron(W, torch.stack([z, z]), z.new_tensor([-threshold, -threshold - width]))


def merge(perceptrons: Sequence[Perceptron]) -> Perceptron:
    """One perceptron whose neurons are those of all the given ones: the sum of their velocities.

    Raises:
        ValueError: none is given, or activations differ.
    """
    kinds = sorted({p.activation for p in perceptrons})
    if len(kinds) != 1:
        raise ValueError(f"expected perceptrons of one activation, got {kinds}")
    W = torch.cat([p.W for p in perceptrons], dim=1)
    return Perceptron(W, torch.cat([p.U for p in perceptrons]), torch.cat([p.b for p in perceptrons]), kinds[0])


@dataclass(frozen=True, eq=False)
class Layer:
    """Heads and a perceptron held constant for a duration.

    Args:
        heads: any number.
        perceptron: or None.
        duration: positive time.
        stage: what the layer is for, such as "gather"; free text that reports and films show.

    Raises:
        ValueError: the layer is empty, dimensions differ, or the duration is not positive.
    """

    heads: Sequence[Head] = ()
    perceptron: Perceptron | None = None
    duration: float = 1.0
    stage: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(self.heads))
        dims = {h.V.shape[0] for h in self.heads} | ({self.perceptron.W.shape[0]} if self.perceptron else set())
        if not dims:
            raise ValueError("expected heads or a perceptron, got an empty layer")
        if len(dims) != 1:
            raise ValueError(f"expected heads and perceptron of one dimension, got dimensions {sorted(dims)}")
        if not 0 < self.duration < float("inf"):
            raise ValueError(f"duration: expected a positive number, got {self.duration}")

    @property
    def dim(self) -> int:
        """Dimension d of the space around the sphere."""
        return self.heads[0].V.shape[0] if self.heads else self.perceptron.W.shape[0]  # type: ignore[union-attr]

    def velocity(
        self, points: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*batch n"]
    ) -> Float[Tensor, "*batch n d"]:
        """Velocity of every token, tangent to the sphere."""
        v = torch.zeros_like(points) if self.perceptron is None else self.perceptron.velocity(points)
        for head in self.heads:
            v = v + head.velocity(points, weights)
        return sphere.tangent(points, v)

    def scaled(self, factor: float) -> "Layer":
        """V and W times `factor`; B, U, b and the duration stay (the velocity is linear in V and W only)."""
        heads = tuple(replace(h, V=factor * h.V) for h in self.heads)
        p = self.perceptron
        return replace(self, heads=heads, perceptron=None if p is None else replace(p, W=factor * p.W))

    def inverse(self) -> "Layer":
        """The layer that undoes this one: -V, -W."""
        return self.scaled(-1.0)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Layer":
        """The layer with every tensor changed by a function."""
        heads = tuple(replace(h, V=change(h.V), B=change(h.B)) for h in self.heads)
        p = self.perceptron
        if p is not None:
            p = replace(p, W=change(p.W), U=change(p.U), b=change(p.b))
        return replace(self, heads=heads, perceptron=p)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters with their names: heads.0.V, ..., perceptron.b."""
        for i, h in enumerate(self.heads):
            yield f"heads.{i}.V", h.V
            yield f"heads.{i}.B", h.B
        if self.perceptron is not None:
            for name in ("W", "U", "b"):
                yield f"perceptron.{name}", getattr(self.perceptron, name)


def balanced(layer: Layer) -> Layer:
    """The same layer with each relu neuron scaled so that its ingoing and outgoing weights are of one size, which
    makes the norm of the parameters least: relu(c s) = c relu(s) for c > 0."""
    p = layer.perceptron
    if p is None or p.activation != "relu":
        return layer
    inward = torch.sqrt(p.U.square().sum(-1) + p.b.square())
    outward = torch.linalg.vector_norm(p.W, dim=0)
    live = (inward > 0) & (outward > 0)
    c = torch.where(live, torch.sqrt(outward / torch.where(live, inward, 1.0)), 1.0)
    return replace(layer, perceptron=replace(p, W=(p.W / c).contiguous(), U=p.U * c.unsqueeze(-1), b=p.b * c))


@dataclass(frozen=True, eq=False)
class Transformer:
    """A sequence of layers.

    Args:
        layers: at least one, all of one dimension.
        metadata: how it was made; JSON values, saved with the file.

    Raises:
        ValueError: there is no layer, or dimensions differ.
        TypeError: something else than a layer is given.
    """

    layers: Sequence[Layer]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("layers: expected at least one, got none")
        for k, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise TypeError(f"layer {k}: expected a Layer, got {type(layer).__name__}")
            if layer.dim != self.layers[0].dim:
                raise ValueError(f"layer {k}: expected dimension {self.layers[0].dim}, got {layer.dim}")

    @property
    def dim(self) -> int:
        """Dimension d of the space around the sphere S^{d-1}."""
        return self.layers[0].dim

    @property
    def duration(self) -> float:
        """Total time T."""
        return self.switch_times[-1]

    @property
    def switch_times(self) -> list[float]:
        """Times at which layers begin and end: 0, ..., T (one more than there are layers)."""
        times = [0.0]
        for layer in self.layers:
            times.append(times[-1] + layer.duration)
        return times

    @property
    def switches(self) -> int:
        """Number of switches: boundaries between two layers."""
        return len(self.layers) - 1

    @property
    def stages(self) -> dict[str, int]:
        """Number of layers by stage, in order of appearance."""
        count: dict[str, int] = {}
        for layer in self.layers:
            count[layer.stage] = count.get(layer.stage, 0) + 1
        return count

    @property
    def num_parameters(self) -> int:
        """Number of entries of all V, B, W, U, b."""
        return sum(t.numel() for layer in self.layers for _, t in layer.tensors())

    @property
    def norm(self) -> float:
        """Largest over time of the Euclidean norm of all parameters of a layer (arXiv 2411.04551: L^∞ in time)."""
        return max(
            float(torch.sqrt(sum((t.detach().double().square().sum() for _, t in layer.tensors()), torch.tensor(0.0))))
            for layer in self.layers
        )

    def layer_at(self, t: float) -> Layer:
        """The layer that acts at a time; at a switch, the one that begins there.

        Raises:
            ValueError: the time is outside [0, T].
        """
        times = self.switch_times
        if not 0 <= t <= times[-1]:
            raise ValueError(f"t: expected a time in [0, {times[-1]:.6g}], got {t}")
        return self.layers[min(bisect_right(times, t), len(self.layers)) - 1]

    def velocity(
        self, points: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*batch n"], t: float
    ) -> Float[Tensor, "*batch n d"]:
        """Velocity v[mu](t, x) of every token at a time, tangent to the sphere."""
        return self.layer_at(t).velocity(points, weights)

    def even_times(self, k: int) -> list[float]:
        """`k` times from 0 to T that spend the same number of times on every layer, however short: for films.

        Raises:
            ValueError: k is less than 2.

        >>> drift = Layer(perceptron=constant_drift(torch.tensor([0.0, 1.0])), duration=1.0)
        >>> Transformer([drift, replace(drift, duration=10.0)]).even_times(5)
        [0.0, 0.5, 1.0, 6.0, 11.0]
        """
        if k < 2:
            raise ValueError(f"k: expected at least 2 times (start and end), got {k}")
        switches, layers = self.switch_times, len(self.layers)
        times = []
        for i in range(k - 1):
            layer, part = divmod(i * layers, k - 1)
            times.append(switches[layer] + part / (k - 1) * self.layers[layer].duration)
        return [*times, switches[-1]]

    def to(self, target: torch.device | torch.dtype | str) -> "Transformer":
        """The same transformer on another device, or in another dtype; a layer used twice stays one layer."""
        moved = {id(layer): layer.mapped(lambda tensor: tensor.to(target)) for layer in self.layers}
        return Transformer([moved[id(layer)] for layer in self.layers], self.metadata)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; `measureflow.load` reads it back."""
        from measureflow.files import save  # files.py stands a floor above

        save(self, path)

    def inverse(self) -> "Transformer":
        """The transformer that undoes this one: -V, -W, layers reversed."""
        return Transformer([layer.inverse() for layer in reversed(self.layers)], self.metadata)

    def then(self, other: "Transformer") -> "Transformer":
        """This transformer followed by another one."""
        return compose([self, other])

    def rescale(self, duration: float) -> "Transformer":
        """The same map in another total time: V and W (not B, U, b) are scaled.

        Raises:
            ValueError: the duration is not positive.
        """
        if not 0 < duration < float("inf"):
            raise ValueError(f"duration: expected a positive number, got {duration}")
        factor = self.duration / duration
        return Transformer(
            [replace(layer.scaled(factor), duration=layer.duration / factor) for layer in self.layers], self.metadata
        )

    def __repr__(self) -> str:
        heads = max(len(layer.heads) for layer in self.layers)
        return (
            f"Transformer(d={self.dim}, layers={len(self.layers)}, heads<={heads}, "
            f"parameters={self.num_parameters}, duration={self.duration:.6g})"
        )


def compose(transformers: Sequence[Transformer]) -> Transformer:
    """One transformer that does the given ones in order.

    Raises:
        ValueError: none is given, or dimensions differ.
    """
    if not transformers:
        raise ValueError("transformers: expected at least one, got none")
    return Transformer([layer for t in transformers for layer in t.layers])


def _check_tensors(**tensors: tuple[Tensor, tuple[str, ...]]) -> None:
    sizes: dict[str, int] = {}
    first, (leader, _) = next(iter(tensors.items()))
    for name, (tensor, axes) in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a floating-point tensor, got {what}")
        if tensor.dtype != leader.dtype:
            raise TypeError(f"{name}: expected {leader.dtype} as {first} has, got {tensor.dtype}")
        shape = tuple(tensor.shape)
        fits = len(shape) == len(axes) and all(
            sizes.setdefault(axis, size) == size for axis, size in zip(axes, shape, strict=False)
        )
        if not fits:
            expected = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
            raise ValueError(f"{name}: expected shape ({expected}), got {shape}")

"""Measures of tokens on the sphere, and pairs of them; batched, with zero-weight padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from measureflow.errors import first_row


def _to_floats(given: object) -> str:
    return "call .double()" if isinstance(given, Tensor) else "use torch.tensor(..., dtype=torch.float64)"


def length_tolerance(dtype: torch.dtype) -> float:
    """How far the length of a point may be from 1.

    A point written with 8 decimals is off by up to 1e-8, one scaled to length 1 in float32 by up to 2e-7.

    >>> length_tolerance(torch.float64)
    1e-07
    """
    return {torch.float64: 1e-7, torch.float32: 1e-5}.get(dtype, 1e-2)


def sum_tolerance(atoms: Int[Tensor, "*batch"], dtype: torch.dtype) -> Float[Tensor, "*batch"]:
    """How far the sum of so many weights may be from 1: four roundings an atom, and at least 1e-9.

    >>> sum_tolerance(torch.tensor([1000]), torch.float32)
    tensor([0.0005], dtype=torch.float64)
    """
    return (4 * torch.finfo(dtype).eps * atoms.double()).clamp(min=1e-9)


@dataclass(frozen=True, eq=False)
class TokenMeasure:
    """Weighted tokens on the sphere; any number of measures side by side.

    Args:
        points: (*batch, n, d), unit vectors.
        weights: (*batch, n), at least 0, summing to 1 per measure; None gives every atom 1/n. An atom of weight 0
            is padding: its coordinates may be anything, even NaN, and are replaced by the first basis vector.
            Weights of another dtype than the points take theirs, and are divided by their sum in it; otherwise they
            stay as they are, to the last bit.
        globe: the points are places on the Earth (d = 3), so that reports speak of km and maps have coastlines.

    Raises:
        ValueError: a point is not finite or not of length 1; a weight is negative or not finite; weights do not sum
            to 1; a measure is empty. The measure and row are named.
        TypeError: points or weights are not floating-point tensors.

    >>> mu = TokenMeasure(torch.eye(3))
    >>> mu.weights
    tensor([0.3333, 0.3333, 0.3333])
    """

    points: Float[Tensor, "*batch n d"]
    weights: Float[Tensor, "*batch n"] = None  # type: ignore[assignment]  # __post_init__ makes it a tensor
    globe: bool = False

    def __post_init__(self) -> None:
        points, weights = self.points, self.weights
        if not isinstance(points, Tensor) or not points.is_floating_point():
            what = points.dtype if isinstance(points, Tensor) else type(points).__name__
            raise TypeError(f"points: expected a floating-point tensor, got {what}; {_to_floats(points)}")
        if points.ndim < 2 or points.shape[-2] == 0 or points.shape[-1] < 2:
            raise ValueError(f"points: expected shape (*batch, n >= 1, d >= 2), got {tuple(points.shape)}")
        if weights is None:
            weights = points.new_full(points.shape[:-1], 1 / points.shape[-2])
        if not isinstance(weights, Tensor) or not weights.is_floating_point():
            what = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
            raise TypeError(f"weights: expected a floating-point tensor, got {what}; {_to_floats(weights)}")
        if weights.device != points.device:
            raise ValueError(f"weights: expected them on the points' device {points.device}, got {weights.device}")
        if weights.shape != points.shape[:-1]:
            raise ValueError(f"weights: expected shape {tuple(points.shape[:-1])}, got {tuple(weights.shape)}")
        if self.globe and points.shape[-1] != 3:
            raise ValueError(f"globe: places on the Earth have d = 3, got d = {points.shape[-1]}")
        _check_weights(weights.detach())
        padding = (weights.detach() == 0).unsqueeze(-1)
        first = torch.zeros_like(points[..., :1, :])
        first[..., 0] = 1
        points = torch.where(padding, first.detach(), points)
        _check_points(points.detach())
        if weights.dtype != points.dtype:
            # Uniform float32 weights sum to 1 within 1e-7 only, which is no rounding error in float64.
            weights = weights.to(points.dtype)
            weights = weights / weights.sum(-1, keepdim=True)
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "weights", weights)

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch: () for one measure, (N,) for N."""
        return self.points.shape[:-2]

    @property
    def dim(self) -> int:
        """Dimension d of the space around the sphere S^{d-1}."""
        return self.points.shape[-1]

    @property
    def counts(self) -> Int[Tensor, "*batch"]:
        """Number of atoms of each measure, padding left out."""
        return (self.weights > 0).sum(-1)

    @property
    def barycentre(self) -> Float[Tensor, "*batch d"]:
        """Mean of each measure in R^d, inside the ball."""
        return (self.weights.unsqueeze(-1) * self.points).sum(-2)

    def __len__(self) -> int:
        if not self.batch_shape:
            raise TypeError("this is one measure, not a batch of measures")
        return self.batch_shape[0]

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> "TokenMeasure":
        """Measures of the batch by position."""
        len(self)
        return replace(self, points=self.points[index], weights=self.weights[index])

    def __iter__(self) -> Iterator["TokenMeasure"]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        batch = "".join(f"{size}, " for size in self.batch_shape)
        globe = ", globe" if self.globe else ""
        return f"TokenMeasure({batch}atoms={_range(self.counts)}, d={self.dim}, {_short(self.points.dtype)}{globe})"

    def atoms(self) -> Float[Tensor, "k d"]:
        """The points of one measure, padding left out.

        Raises:
            ValueError: this is a batch of measures.
        """
        if self.batch_shape:
            raise ValueError(
                f"atoms: expected one measure, got a batch of shape {tuple(self.batch_shape)}; index first"
            )
        return self.points[self.weights > 0]

    def to(self, target: torch.device | torch.dtype | str) -> "TokenMeasure":
        """The same measure on another device, or in another dtype (lengths and sums restored in that dtype)."""
        points, weights = self.points.to(target), self.weights.to(target)
        if points.dtype != self.points.dtype:
            points = points / torch.linalg.vector_norm(points, dim=-1, keepdim=True)
            weights = weights / weights.sum(-1, keepdim=True)
        return replace(self, points=points, weights=weights)

    def with_points(self, points: Float[Tensor, "*batch n d"]) -> "TokenMeasure":
        """The push-forward: same weights at other points."""
        return replace(self, points=points)

    @staticmethod
    def from_ragged(
        points: Sequence[Float[Tensor, "_ d"]],
        weights: Sequence[Float[Tensor, " _"]] | None = None,
        globe: bool = False,
    ) -> "TokenMeasure":
        """A batch from measures of different sizes, padded with atoms of weight 0.

        Raises:
            ValueError: nothing is given, a measure is empty, or dimensions or numbers differ.

        >>> TokenMeasure.from_ragged([torch.eye(2), torch.eye(2)[:1]]).weights
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
        """
        if len(points) == 0:
            raise ValueError("points: expected at least one measure, got none")
        d = points[0].shape[-1] if points[0].ndim == 2 else "d"
        for i, p in enumerate(points):
            if p.ndim != 2 or len(p) == 0 or p.shape[1] != d:
                raise ValueError(f"measure {i}: expected points of shape (n >= 1, {d}), got {tuple(p.shape)}")
            if p.dtype != points[0].dtype or p.device != points[0].device:
                raise ValueError(
                    f"measure {i}: expected points in {points[0].dtype} on {points[0].device}, as in measure 0, "
                    f"got {p.dtype} on {p.device}"
                )
        given = [p.new_full((len(p),), 1 / len(p)) for p in points] if weights is None else list(weights)
        if len(given) != len(points):
            raise ValueError(f"weights: expected {len(points)} vectors, one per measure, got {len(given)}")
        for i, (p, w) in enumerate(zip(points, given, strict=True)):
            if w.shape != p.shape[:1]:
                raise ValueError(f"measure {i}: expected weights of shape ({len(p)},), got {tuple(w.shape)}")
            if w.dtype != given[0].dtype:
                raise ValueError(f"measure {i}: expected weights in {given[0].dtype}, as in measure 0, got {w.dtype}")
        pad = torch.nn.utils.rnn.pad_sequence
        return TokenMeasure(pad(list(points), batch_first=True), pad(given, batch_first=True), globe)

    def resample(self, n: int, *, generator: torch.Generator) -> "TokenMeasure":
        """`n` equal atoms a measure, drawn from its atoms; padding is never drawn.

        A measure of equal weights and at least `n` atoms is drawn from without repeats, any other with repeats, by
        weight.

        Raises:
            ValueError: `n` is less than 1.

        >>> mu = TokenMeasure.from_ragged([torch.eye(3), torch.eye(3)[:1]])
        >>> mu.resample(2, generator=torch.Generator().manual_seed(0)).counts
        tensor([2, 2])
        """
        if n < 1:
            raise ValueError(f"n: expected at least 1, got {n}")
        flat = self.weights.detach().reshape(-1, self.weights.shape[-1])
        support = flat > 0
        least = flat.masked_fill(~support, torch.inf).amin(-1)
        # Weights that were divided by their sum may differ by a rounding or two.
        equal = flat.amax(-1) - least <= 4 * torch.finfo(flat.dtype).eps * least
        once = equal & (support.sum(-1) >= n)
        index = torch.empty(len(flat), n, dtype=torch.int64, device=flat.device)
        for rows, repeats in ((once, False), (~once, True)):
            if bool(rows.any()):
                index[rows] = torch.multinomial(flat[rows], n, replacement=repeats, generator=generator)
        index = index.reshape(*self.batch_shape, n, 1).expand(*self.batch_shape, n, self.dim)
        return TokenMeasure(self.points.gather(-2, index), globe=self.globe)


def _range(counts: Tensor) -> str:
    least, most = int(counts.min()), int(counts.max())
    return str(least) if least == most else f"{least}..{most}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_weights(weights: Tensor) -> None:
    bad = ~(weights.isfinite() & (weights >= 0))
    if bool(bad.any()):
        raise ValueError(f"{first_row(bad)}: expected a weight of at least 0, got {float(weights[bad][0])}")
    total = weights.double().sum(-1)
    off = (total - 1).abs() > sum_tolerance((weights > 0).sum(-1), weights.dtype)
    if bool(off.any()):
        index = [int(i) for i in off.nonzero()[0]]
        name = f"measure {', '.join(map(str, index))}: " if index else ""
        got = float(total[off][0])
        advice = "the measure is empty" if got == 0 else "divide by the sum"
        raise ValueError(f"{name}expected weights that sum to 1, got a sum of {got:.9g}; {advice}")


def _check_points(points: Tensor) -> None:
    length = torch.linalg.vector_norm(points.double(), dim=-1)
    bad = ~((length - 1).abs() <= length_tolerance(points.dtype))
    if bool(bad.any()):
        got = float(length[bad][0])
        what = f"a length of {got:.9g}" if got == got else "a coordinate that is not a number"
        raise ValueError(f"{first_row(bad)}: expected a unit vector, got {what}; measureflow.sphere.project scales it")


@dataclass(frozen=True, eq=False)
class MeasurePairs:
    """N source measures and the N target measures that they are to be carried to.

    Args:
        source, target: batches of N measures in the same dimension; sizes may differ. Where one side is float32 and
            the other float64, both become float64.
        names: N different names, none of them empty; None gives "0", "1", ...
        coupling: (N, n) the row of the target atom that belongs to each source atom where that is known; -1 on
            padding.

    Raises:
        ValueError: numbers, dimensions or globes differ, names collide, or the coupling points nowhere; the pair is
            named.

    >>> mu = TokenMeasure(torch.eye(3).expand(2, 3, 3))
    >>> pairs = MeasurePairs(mu, mu, names=["a", "b"])
    >>> len(pairs), pairs["b"].names
    (2, ('b',))
    """

    source: TokenMeasure
    target: TokenMeasure
    names: Sequence[str] = None  # type: ignore[assignment]  # __post_init__ makes it a tuple
    coupling: Int[Tensor, "N n"] | None = None

    def __post_init__(self) -> None:
        source, target = self.source, self.target
        for side, measure in (("source", source), ("target", target)):
            if len(measure.batch_shape) != 1 or len(measure) == 0:
                shape = tuple(measure.points.shape)
                raise ValueError(f"{side}: expected a batch (N >= 1, n, d) of measures, got points of shape {shape}")
        if len(source) != len(target):
            raise ValueError(
                f"expected as many targets as sources, got {len(source)} sources and {len(target)} targets"
            )
        if source.dim != target.dim:
            raise ValueError(f"expected one dimension, got sources in d = {source.dim} and targets in d = {target.dim}")
        if source.globe != target.globe:
            globe, other = ("source", "target") if source.globe else ("target", "source")
            raise ValueError(
                f"{other}: expected places on the globe, as the {globe}; pass globe=True to both or neither"
            )
        if source.points.device != target.points.device:
            where = f"{source.points.device} and {target.points.device}"
            raise ValueError(f"expected sources and targets on one device, got {where}")
        if source.points.dtype != target.points.dtype:
            wider = torch.promote_types(source.points.dtype, target.points.dtype)
            object.__setattr__(self, "source", source.to(wider))
            object.__setattr__(self, "target", target.to(wider))
        if isinstance(self.names, str):
            raise TypeError(f"names: expected {len(source)} texts, got the single text {self.names!r}")
        names = tuple(str(i) for i in range(len(source))) if self.names is None else tuple(self.names)
        if len(names) != len(source):
            raise ValueError(f"names: expected {len(source)}, got {len(names)}")
        seen: dict[str, int] = {}
        for i, name in enumerate(names):
            if not isinstance(name, str):
                raise TypeError(f"names: expected text, got {name!r} for pair {i}")
            if not name or name.isspace():
                raise ValueError(f"names: expected text, got an empty name for pair {i}")
            if name in seen:
                raise ValueError(f"names: pairs {seen[name]} and {i} are both called {name!r}")
            seen[name] = i
        object.__setattr__(self, "names", names)
        if self.coupling is not None:
            self._check_coupling(self.coupling)
            object.__setattr__(self, "coupling", self.coupling.long())

    def _check_coupling(self, coupling: Tensor) -> None:
        shape = self.source.weights.shape
        if coupling.is_floating_point() or coupling.dtype == torch.bool:
            raise TypeError(f"coupling: expected whole numbers, got {coupling.dtype}; call .long()")
        if coupling.shape != shape:
            raise ValueError(f"coupling: expected shape {tuple(shape)}, got {tuple(coupling.shape)}")
        if coupling.device != self.source.weights.device:
            where = self.source.weights.device
            raise ValueError(f"coupling: expected it on the measures' device {where}, got {coupling.device}")
        coupling = coupling.long()
        real = self.source.weights > 0
        inside = (coupling >= 0) & (coupling < self.target.weights.shape[-1])
        hits = self.target.weights.gather(-1, coupling.clamp(0, self.target.weights.shape[-1] - 1)) > 0
        bad = torch.where(real, ~(inside & hits), coupling != -1)
        if bool(bad.any()):
            pair, row = (int(i) for i in bad.nonzero()[0])
            expected = "a row of the target" if bool(real[pair, row]) else "-1 (the source atom is padding)"
            got = int(coupling[pair, row])
            raise ValueError(f"coupling: pair {self.names[pair]!r}, row {row}: expected {expected}, got {got}")

    @property
    def dim(self) -> int:
        """Dimension d of the space around the sphere S^{d-1}."""
        return self.source.dim

    @property
    def globe(self) -> bool:
        """The points are places on the Earth."""
        return self.source.globe

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator["MeasurePairs"]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int | str | slice | Sequence[int] | Sequence[str]) -> "MeasurePairs":
        """Some of the pairs, by position or by name.

        Raises:
            IndexError: there is no pair at that position.
            KeyError: no pair has that name.
        """
        if isinstance(index, slice):
            chosen = list(range(len(self)))[index]
        else:
            several = [index] if isinstance(index, int | str) else list(index)
            chosen = [self._position(i) for i in several]
        coupling = None if self.coupling is None else self.coupling[chosen]
        names = tuple(self.names[i] for i in chosen)
        return MeasurePairs(self.source[chosen], self.target[chosen], names, coupling)

    def _position(self, index: int | str) -> int:
        if isinstance(index, str):
            if index not in self.names:
                raise KeyError(f"no pair is called {index!r}; there are {', '.join(map(repr, self.names[:8]))}")
            return self.names.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index}: there are {len(self)} pairs, 0 to {len(self) - 1}")
        return index % len(self)

    def __repr__(self) -> str:
        names = repr(self.names[0]) if len(self) == 1 else f"{self.names[0]!r} to {self.names[-1]!r}"
        marks = (", globe" if self.globe else "") + (", coupled" if self.coupling is not None else "")
        return (
            f"MeasurePairs({len(self)}, {names}, atoms={_range(self.source.counts)} -> {_range(self.target.counts)}, "
            f"d={self.dim}, {_short(self.source.points.dtype)}{marks})"
        )

    def to(self, target: torch.device | torch.dtype | str) -> "MeasurePairs":
        """The same pairs on another device, or in another dtype."""
        coupling = self.coupling
        if coupling is not None and not isinstance(target, torch.dtype):
            coupling = coupling.to(target)
        return replace(self, source=self.source.to(target), target=self.target.to(target), coupling=coupling)

"""What a construction reached, measured on the finished transformer, not on the plans that led to it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from measureflow.transformer import Transformer


@dataclass(frozen=True)
class Certificate:
    """Evidence that one transformer carries every source to its target.

    Args:
        names: of the pairs.
        w2: exact geodesic W2 (radians) per pair, between the target and the source carried by a fresh integration of
            the whole transformer with torchdiffeq's dopri8, which knows nothing of exact flows or of the plan.
        w2_exact: the same with the exact flows of `measureflow.flow`.
        best_w2: the least W2 (radians) that any map can reach, per pair: 0 unless the input was impossible.
        stages: layers by stage.
        switches, layers, parameters: counts.
        norm: largest norm of the parameters over time.
        separation: gaps and cap radii (radians) reached by disentangling.
        seconds: time taken by construction and by the check.
        seed: of the choices made.
    """

    names: tuple[str, ...]
    w2: tuple[float, ...]
    w2_exact: tuple[float, ...]
    best_w2: tuple[float, ...]
    stages: Mapping[str, int]
    switches: int
    layers: int
    parameters: int
    norm: float
    separation: Mapping[str, float]
    seconds: Mapping[str, float]
    seed: int

    @property
    def worst(self) -> float:
        """Largest W2 over the pairs (radians), by the independent integration."""
        return max(self.w2)

    @property
    def above_best(self) -> float:
        """Largest W2 over the pairs beyond the least that any map can reach (radians)."""
        return max(w2 - best for w2, best in zip(self.w2, self.best_w2, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        """A table in plain text.

        Few pairs are listed; of many the worst are.
        """
        order = sorted(range(len(self.names)), key=lambda i: -self.w2[i])[:12]
        width = max(len("pair"), *(len(self.names[i]) for i in order))
        lines = [f"one transformer, {len(self.names)} pairs, seed {self.seed}", ""]
        lines.append(f"{'pair':<{width}}  {'W2 (rad)':>9}  exact flows  least possible")
        for i in sorted(order):
            lines.append(
                f"{self.names[i]:<{width}}  {self.w2[i]:9.2e}  {self.w2_exact[i]:11.2e}  {self.best_w2[i]:14.3g}"
            )
        if len(order) < len(self.names):
            lines.append(f"({len(self.names) - len(order)} better pairs not listed)")
        stages = ", ".join(f"{stage} {count}" for stage, count in self.stages.items())
        times = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.seconds.items())
        separation = ", ".join(f"{what} {angle:.3g}" for what, angle in self.separation.items())
        lines += [
            "",
            f"layers      {self.layers} ({stages}), {self.switches} switches",
            f"parameters  {self.parameters}, norm {self.norm:.3g}",
            f"separation  {separation} (rad)",
            f"time        {times}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class Construction(Transformer):
    """A transformer written down in closed form, with its certificate (also in its metadata, which is saved)."""

    certificate: Certificate = field(kw_only=True)

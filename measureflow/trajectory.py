"""What a flow hands back: measures at the stored times, and how they were computed."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from measureflow import sphere
from measureflow.measures import TokenMeasure


@dataclass(frozen=True)
class FlowStats:
    """How a flow was computed.

    Args:
        solver: the name that was asked for.
        steps: accepted steps, all measures together; an exact flow counts as one. None where the solver (scipy's)
            does not tell.
        evaluations: how often the velocity of all tokens was computed, rejected steps included.
        off_sphere: largest | |x| - 1 | of a token before it was projected.
        seconds: wall-clock time.
    """

    solver: str
    steps: int | None
    evaluations: int
    off_sphere: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Measures at increasing times.

    Args:
        times: (T,) stored times, increasing, in the time unit of the transformer.
        points: (T, *batch, n, d) unit vectors.
        weights: (*batch, n); they do not change along a flow. Atoms of weight 0 are padding.
        globe: the points are places on the Earth.
        switch_times: times at which layers begin and end, one more than there are layers.
        stages: what each layer is for.
        stats: how the flow was computed.

    Raises:
        ValueError: numbers of times, points, weights, layers and stages do not fit together.
    """

    times: Float[Tensor, " T"]
    points: Float[Tensor, "T *batch n d"]
    weights: Float[Tensor, "*batch n"]
    globe: bool
    switch_times: Sequence[float]
    stages: Sequence[str]
    stats: FlowStats

    def __post_init__(self) -> None:
        object.__setattr__(self, "switch_times", tuple(self.switch_times))
        object.__setattr__(self, "stages", tuple(self.stages))
        if len(self.times) == 0 or len(self.points) != len(self.times):
            raise ValueError(f"points: expected one set per time, got {len(self.points)} for {len(self.times)} times")
        if self.points.shape[1:-1] != self.weights.shape:
            raise ValueError(
                f"weights: expected shape {tuple(self.points.shape[1:-1])}, got {tuple(self.weights.shape)}"
            )
        if len(self.switch_times) != len(self.stages) + 1:
            raise ValueError(
                f"switch_times: expected {len(self.stages) + 1} for {len(self.stages)} stages, "
                f"got {len(self.switch_times)}"
            )

    def __len__(self) -> int:
        """Number of stored times."""
        return len(self.times)

    def __getitem__(self, index: int) -> TokenMeasure:
        """The measure (or batch of measures) at a stored time, by position."""
        return TokenMeasure(self.points[index], self.weights, self.globe)

    def __iter__(self) -> Iterator[TokenMeasure]:
        return (self[k] for k in range(len(self)))

    @property
    def start(self) -> TokenMeasure:
        """The measure at the first stored time."""
        return self[0]

    @property
    def end(self) -> TokenMeasure:
        """The measure at the last stored time."""
        return self[-1]

    def at(self, t: float) -> TokenMeasure:
        """The measure at any time between the first and the last stored one.

        Between two stored times each token is put on the shorter great-circle arc: the error is of second order in
        the time between them, so store more times (`flow(..., times=...)`) for a closer look.

        Raises:
            ValueError: the time is outside the stored ones, or a token jumped to its antipode between two of them,
                so that no arc is the shorter one; the token is named.
        """
        times = self.times.tolist()
        if not times[0] <= t <= times[-1]:
            raise ValueError(f"t: expected a time in [{times[0]:.6g}, {times[-1]:.6g}], the stored ones, got {t}")
        after = bisect_right(times, t)
        if times[after - 1] == t:
            return self[after - 1]
        begin, end = times[after - 1], times[after]
        try:
            points = sphere.geodesic(self.points[after - 1], self.points[after], (t - begin) / (end - begin))
        except ValueError as error:
            raise ValueError(
                f"between the stored times {begin:.6g} and {end:.6g}, {error}; store more times"
            ) from error
        return TokenMeasure(points, self.weights, self.globe)

    def stage_at(self, t: float) -> str:
        """Stage of the layer that acts at a time; at a switch, of the layer that begins there.

        Raises:
            ValueError: the time is outside the transformer's.
        """
        if not self.switch_times[0] <= t <= self.switch_times[-1]:
            raise ValueError(f"t: expected a time in [0, {self.switch_times[-1]:.6g}], got {t}")
        return self.stages[min(bisect_right(self.switch_times, t) - 1, len(self.stages) - 1)]

"""What only this field can go wrong with; everything else is a ValueError or a TypeError."""

from torch import Tensor


class MeasureflowError(Exception):
    """Base of the errors that are about measures and transformers, not about arguments."""


class NoTransportMapError(MeasureflowError):
    """No map carries these sources to these targets: one atom would have to become two."""


class NotSeparatedError(MeasureflowError):
    """The measures could not be moved apart, so one transformer cannot treat them differently."""


class NotConvergedError(MeasureflowError):
    """A solver or a construction stopped before it reached what was asked."""


class FlowError(MeasureflowError):
    """The flow could not be continued: time, layer and measure are named."""


class FileFormatError(MeasureflowError, ValueError):
    """A file is truncated, foreign or wrong in a row; file and line are named."""


class MissingExtraError(MeasureflowError, ImportError):
    """An optional dependency is needed; the command that installs it is named."""


def first_row(mask: Tensor) -> str:
    """Name the first True entry of a (*batch, n) mask, for an error: `measure 2, row 5`.

    >>> import torch
    >>> first_row(torch.tensor([False, True])), first_row(torch.tensor(True))
    ('row 1', 'the only row')
    """
    place = [int(i) for i in mask.nonzero()[0]]
    if not place:
        return "the only row"
    *batch, row = place
    parts = [f"measure {', '.join(map(str, batch))}"] if batch else []
    return ", ".join([*parts, f"row {row}"])

"""Which atom goes to which goal."""

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from measureflow import sphere


def assign(
    points: Float[Tensor, "N n d"], goals: Float[Tensor, "N n d"], kinds: Int[Tensor, "N n"]
) -> Int[Tensor, "N n"]:
    """The row of the goal for each atom that makes the sum of squared distances least, measure by measure.

    Straight paths of such an assignment do not cross. Only atoms of one kind may swap goals. Both clouds are centred
    and scaled first, so that a cap is compared with a cap of another size by its shape. The loop over measures is
    around scipy's assignment, which has no batched form.
    """
    alone = (kinds.unsqueeze(-1) == kinds.unsqueeze(-2)).sum(-1) == 1
    if bool(alone.all()):
        return torch.arange(kinds.shape[1], device=kinds.device).expand_as(kinds)
    cost = torch.cdist(_standard(points), _standard(goals)).square()
    # More than any assignment costs, so that a forbidden swap is never worth it.
    cost = cost + (kinds.unsqueeze(-1) != kinds.unsqueeze(-2)) * (cost.amax() * cost.shape[-1] + 1)
    columns = [linear_sum_assignment(c)[1] for c in cost.detach().cpu().numpy()]
    return torch.from_numpy(np.stack(columns)).to(kinds.device)


def _standard(cloud: Float[Tensor, "N n d"]) -> Float[Tensor, "N n d"]:
    cloud = cloud - cloud.mean(1, keepdim=True)
    size = cloud.square().sum(-1).mean(-1).sqrt().reshape(-1, 1, 1)
    return cloud / size.clamp(min=torch.finfo(cloud.dtype).tiny)


def rows(points: Float[Tensor, "N m d"], index: Int[Tensor, "N n"]) -> Float[Tensor, "N n d"]:
    """The rows of each measure by their numbers."""
    return points.gather(1, index.unsqueeze(-1).expand(-1, -1, points.shape[-1]))


def nearest_other(points: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
    """Angle from each point to the nearest different one (radians); infinite where there is none."""
    between = sphere.pairwise_distance(points, points)
    return between.masked_fill(between == 0, torch.inf).amin(-1)

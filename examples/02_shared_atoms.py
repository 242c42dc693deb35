# %% [markdown]
# # Why attention: shared atoms
#
# A perceptron moves a token by where it is. If two measures share an atom, a transformer without attention (V = 0)
# carries that atom to one place, whichever measure it belongs to; where the two targets have no atom in common it
# must fail. Attention lets a token feel its own measure. The smallest witness has three points on the circle
# (arXiv 2411.04551, introduction).

# %%
import math
from pathlib import Path

import torch

import measureflow as mf

FIGURES = Path(__file__).parents[1] / "figures"

# %% [markdown]
# ## The witness
# mu = (δ_(3/5,4/5) + δ_(4/5,3/5))/2 and nu = (δ_(3/5,4/5) + δ_(5/13,12/13))/2 share the point (3/5, 4/5). Their targets
# are two different points each, none in common.

# %%
shared, only_mu, only_nu = torch.tensor([[3 / 5, 4 / 5], [4 / 5, 3 / 5], [5 / 13, 12 / 13]], dtype=torch.float64)


def on_circle(*degrees: float) -> torch.Tensor:
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


source = mf.TokenMeasure(torch.stack([torch.stack([shared, only_mu]), torch.stack([shared, only_nu])]))
target = mf.TokenMeasure(torch.stack([on_circle(150, 170), on_circle(-60, -90)]))
witness = mf.MeasurePairs(source, target, names=["mu", "nu"])
theta = mf.construct(witness)
print(theta.certificate)

# %% [markdown]
# ## What V = 0 can do at best
# Whatever the perceptrons, the shared atom has one image z. Half of each measure sits on it, so
# W2(mu)² + W2(nu)² >= ½ min_z [ min_j d(z, a_j)² + min_j d(z, b_j)² ] for target atoms a_j and b_j, and the least is
# taken where z is the middle of the nearest two: a lower bound for every transformer without attention.

# %%
nearest = mf.sphere.pairwise_distance(target.points[0], target.points[1]).min()
bound = float(nearest) / 2 / math.sqrt(2)
print(f"without attention some pair has W2 >= {bound:.3f} rad, however large the perceptrons")
print(f"with attention: W2 <= {theta.certificate.worst:.1e} rad")

# %% [markdown]
# Take the attention out of the constructed transformer and watch it fail.

# %%
without = mf.Transformer(
    [
        mf.Layer(perceptron=layer.perceptron, duration=layer.duration, stage=layer.stage)
        for layer in theta.layers
        if layer.perceptron is not None
    ]
)
failed = mf.transport.wasserstein(mf.push_forward(without, source), target)
print(f"the same transformer with V = 0: W2 = {', '.join(f'{w:.2f}' for w in failed.tolist())} rad")
assert float(failed.max()) >= bound > 0.1

# %% [markdown]
# ## On the sphere
# Four measures with half of their atoms in common go to four clusters each. The stages show how: attention pulls each
# measure to its own centre, and from then on the shared atoms are in four different places.

# %%
pairs = mf.datasets.shared_atoms(4, 24, 3, seed=0)
theta = mf.construct(pairs)
print(theta.certificate)
path = mf.flow(theta, pairs.source, theta.even_times(300))
mf.plotting.draw_stages(
    path,
    FIGURES / "02_shared_atoms.png",
    targets=pairs.target,
    names=[f"measure {name}" for name in pairs.names],
    title="Four measures with half of their atoms in common: attention tells them apart",
)

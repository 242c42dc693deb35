# %% [markdown]
# # Letters on the sphere
#
# Five letters, clouds of points around the equator, become five other letters under one transformer. Nothing is
# trained: every layer is written down, and run backwards the same layers turn the new letters into the old ones.

# %%
from pathlib import Path

import measureflow as mf

FIGURES = Path(__file__).parents[1] / "figures"

pairs = mf.datasets.letters("ABCDE", "FGHIJ", atoms=64)
theta = mf.construct(pairs)
print(theta.certificate)

# %% [markdown]
# ## The film
# Frames are placed so that tokens move by the same amount from each to the next: most of the transformer's time goes
# into parking and restoring, in which the picture changes little.

# %%
path = mf.flow(theta, pairs.source, theta.even_times(300))
mf.animate(
    path,
    FIGURES / "04_letters_on_the_sphere.gif",
    targets=pairs.target,
    names=pairs.names,
    seconds=8,
    fps=10,
    size=(360, 360),
    turn=360,
    progress=False,
)

# %% [markdown]
# ## The picture

# %%
mf.plotting.draw_stages(
    path,
    FIGURES / "04_letters_on_the_sphere.png",
    targets=pairs.target,
    names=pairs.names,
    title="Five letters become five others",
)

# %% [markdown]
# ## Backwards

# %%
back = mf.push_forward(theta.inverse(), mf.push_forward(theta, pairs.source))
error = float(mf.sphere.distance(back.points, pairs.source.points).max())
print(f"there and back: every point within {error:.1e} rad of where it was")
assert error < 1e-6

# %% [markdown]
# # Five seasons of storms, one transformer
#
# A tropical storm is born somewhere and dies somewhere else. The births of a season are a measure on the Earth, its
# deaths another one. We write down one transformer whose flow carries the births of each of five seasons to the deaths
# of the same season, after Geshkovski, Rigollet and Ruiz-Balet, "Measure-to-measure interpolation using Transformers"
# (arXiv 2411.04551, Theorem 1.2); nothing is trained.

# %%
from pathlib import Path

import measureflow as mf

FIGURES = Path(__file__).parents[1] / "figures"
KM = mf.sphere.EARTH_RADIUS_KM

pairs = mf.datasets.storms(years=range(2020, 2025))
for name, source in zip(pairs.names, pairs.source, strict=True):
    print(f"{name}: {int(source.counts)} storms")

# %% [markdown]
# ## Construct
# The certificate is measured on the finished transformer: W2 per season after an independent integration by
# torchdiffeq, which knows nothing of the plan. A radian is 6,371 km, so 1e-9 rad is 6 mm.

# %%
theta = mf.construct(pairs, seed=0)
print(theta.certificate)

# %% [markdown]
# ## Evaluate
# Beside the transformer stand rules that know less: leave every storm where it was born, move all to the mean of
# the deaths, take the deaths of the other seasons, or those of the nearest births of other seasons; and how far two
# halves of one season are from each other.

# %%
report = mf.evaluate(theta, pairs)
print(report)

# %% [markdown]
# ## What it does not do
# The construction answers for the seasons that it was given. Another season is a new measure, which attention steers
# elsewhere: it does not forecast. Layers made for other measures have no exact flow on these, and kilometres need no
# twelve digits, hence the solver.

# %%
unseen = mf.datasets.storms(years=range(2015, 2020))
away = mf.evaluate(
    lambda births: mf.push_forward(theta, births, solver="dopri5", rtol=1e-6, atol=1e-8), unseen, train=pairs
).methods()
print("unseen seasons, mean W2 (km): " + ", ".join(f"{who} {float(w2.mean()) * KM:.0f}" for who, w2 in away.items()))

# %% [markdown]
# ## Backwards
# The velocity is linear in V and W: the layers in reverse order with -V and -W carry the storms back to their births.
# The way back stretches what the way here has squeezed, and rounding errors with it.

# %%
back = mf.push_forward(theta.inverse(), mf.push_forward(theta, pairs.source))
real = pairs.source.weights > 0
error = mf.sphere.distance(back.points, pairs.source.points)[real].max()
print(f"there and back: {float(error) * KM * 1000:.2g} m at most")

# %% [markdown]
# ## Draw
# Each season is gathered into a small cap (disentangle), the caps are led to where those of the targets are (route),
# the storms inside each are led to their targets' places (resize, match), and the targets' own gathering is undone
# (restore).

# %%
path = mf.flow(theta, pairs.source, theta.even_times(400))
shown = {"targets": pairs.target, "names": pairs.names}
mf.plotting.draw_map(pairs, FIGURES / "01_storms_map.png")
mf.plotting.draw_stages(path, FIGURES / "01_storms.png", **shown)
mf.animate(path, FIGURES / "01_storms.gif", seconds=8, fps=8, size=(420, 420), progress=False, **shown)
for file in sorted(FIGURES.glob("01_storms*")):
    print(f"wrote figures/{file.name}, {file.stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# # Clusters form
#
# Tokens under self-attention (V = I, B = beta I) move together. Three facts about how, each computed with
# `mf.flow` and held against a formula:
#
# 1. an energy never falls, and its rate is known (Geshkovski, Letrouit, Polyanskiy and Rigollet,
#    "A mathematical perspective on Transformers");
# 2. tokens at equal angles stay at equal angles, and their cosine follows one scalar equation, in closed form
#    at beta = 0;
# 3. at large beta clusters live long before they merge, so that the energy climbs a staircase
#    ("Dynamic metastability in the self-attention model").

# %%
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.integrate import solve_ivp

import measureflow as mf

FIGURE = Path(__file__).parents[1] / "figures" / "03_clusters_form.png"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#8E4585", "#5A5A5A"  # after Okabe and Ito
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 2}


def attention(d: int, beta: float, duration: float) -> mf.Transformer:
    identity = torch.eye(d, dtype=torch.float64)
    return mf.Transformer([mf.Layer([mf.Head(identity, beta * identity)], duration=duration)])


def partition(points: torch.Tensor, beta: float) -> torch.Tensor:
    """Z_i: the mean over j of e^{beta <x_i, x_j>}."""
    return torch.exp(beta * points @ points.mT).mean(-1)


def energy(points: torch.Tensor, beta: float) -> torch.Tensor:
    """(1/2 beta) ∬ e^{beta <x, y>} mu(dx) mu(dy), as a share of its largest value, that of a single cluster."""
    return partition(points, beta).mean(-1) / math.exp(beta)


# %% [markdown]
# ## 1. The energy never falls
# Twelve random starts of 32 tokens on S², all moved at once. Along the softmax flow
# dE/dt = mean over i of Z_i |x_i'|²: the measured slope of the energy and the formula agree.

# %%
beta, duration = 2.0, 16.0
starts = mf.TokenMeasure(mf.sphere.uniform(12, 32, 3, generator=torch.Generator().manual_seed(0)))
theta = attention(3, beta, duration)
path = mf.flow(theta, starts, times=321)
climb = energy(path.points, beta)

speed = torch.stack([theta.velocity(x, path.weights, 0.0) for x in path.points]).square().sum(-1)
rate = (partition(path.points, beta) * speed).mean(-1) * 2 * beta / math.exp(beta)
step = float(path.times[1])
# Simpson's rule, with the rate in the middle of every second step.
gained = (rate[:-2:2] + 4 * rate[1::2] + rate[2::2]) * step / 3
error = float((climb[2::2] - climb[:-2:2] - gained).abs().max())
print(f"energy: smallest step {float((climb[1:] - climb[:-1]).min()):.1e}, formula off by {error:.1e} at most")

# %% [markdown]
# ## 2. Equal angles stay equal
# With all cosines equal to r, r' = 2 e^{beta r} (1 - r) ((n - 1) r + 1) / (e^beta + (n - 1) e^{beta r}).
# At beta = 0 this has the solution r = (1 - u) / (1 + (n - 1) u), u = e^{-2t} for orthogonal starts; for n = 2 it
# is tanh t.

# %%
n, horizon = 8, 4.0


def slope(_: float, r: np.ndarray, b: float) -> np.ndarray:
    grown = np.exp(b * (r - 1))
    return 2 * grown * (1 - r) * ((n - 1) * r + 1) / (1 + (n - 1) * grown)


def by_scalar_equation(b: float, times: torch.Tensor) -> torch.Tensor:
    solution = solve_ivp(
        slope, (0, horizon), [0.0], args=(b,), t_eval=times.numpy(), method="DOP853", rtol=1e-12, atol=1e-14
    )
    return torch.as_tensor(solution.y[0])


def closed_form(times: torch.Tensor) -> torch.Tensor:
    u = torch.exp(-2 * times)
    return (1 - u) / (1 + (n - 1) * u)


cosines = {}
for b in (0.0, 1.0, 3.0):
    frame = mf.TokenMeasure(torch.eye(n, dtype=torch.float64))
    equal = mf.flow(attention(n, b, horizon), frame, times=33)
    products = equal.points @ equal.points.mT
    cosines[b] = products[:, 0, 1]
    spread = float((products[:, ~torch.eye(n, dtype=torch.bool)] - cosines[b][:, None]).abs().max())
    off = float((cosines[b] - by_scalar_equation(b, equal.times)).abs().max())
    print(f"equal angles, beta = {b:g}: cosines differ by {spread:.1e}, scalar equation off by {off:.1e}")

off = float((cosines[0.0] - closed_form(equal.times)).abs().max())
print(f"equal angles, beta = 0: closed form off by {off:.1e}")

# %% [markdown]
# ## 3. A staircase
# Five tokens on the circle, beta = 4. Each merger takes far longer than the one before; in between almost nothing
# moves.

# %%
five = mf.TokenMeasure(mf.sphere.uniform(5, 2, generator=torch.Generator().manual_seed(186)))
moments = [0.0, *torch.logspace(-2, math.log10(400), 400, dtype=torch.float64).tolist()[:-1], 400.0]
slow = mf.flow(attention(2, 4.0, 400.0), five, times=moments)
angles = torch.atan2(slow.points[..., 1], slow.points[..., 0])
# Turned so that no token crosses the seam, and in degrees from the place where all end.
angles = torch.rad2deg(torch.remainder(angles - angles[-1, 0] + math.pi, 2 * math.pi) - math.pi)
stairs = energy(slow.points, 4.0)

order = angles.sort(-1).values
gaps = torch.cat([order.diff(dim=-1), order[:, :1] + 360 - order[:, -1:]], dim=-1)
clusters = (gaps > 8).sum(-1).clamp(min=1)  # tokens closer than 8 degrees are one cluster
mergers = {int(c): moments[int((clusters <= c).nonzero()[0, 0])] for c in range(4, 0, -1)}
print("clusters left at time: " + ", ".join(f"{c} at {t:.2g}" for c, t in mergers.items()))

# %%
plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 13})
figure, axes = plt.subplot_mosaic(
    [["energy", "angles"], ["equal", "stairs"]], figsize=(11, 7.6), layout="constrained", gridspec_kw={"wspace": 0.06}
)

ax = axes["energy"]
ax.plot(path.times, climb, color=BLUE, lw=1.6, alpha=0.75)
ax.set(xlabel="time", ylabel="energy / largest value", ylim=(0, 1.03), xlim=(0, duration))
ax.set_title("The energy never falls", loc="left", weight="bold")
ax.text(0.97, 0.06, "12 starts, 32 tokens on S², β = 2", transform=ax.transAxes, ha="right", color=GREY, bbox=LABEL)

ax = axes["equal"]
marks = zip(
    cosines.items(), (BLUE, ORANGE, GREEN), ("o", "s", "^"), ((0.95, 0.62), (1.62, 0.55), (2.75, 0.3)), strict=True
)
for (b, r), color, marker, place in marks:
    ax.plot(equal.times, r, marker, color=color, ms=6, mfc="white", mew=1.6)
    ax.annotate(f"β = {b:g}", place, color=color, weight="bold", ha="left" if b else "right")
fine = torch.linspace(0, horizon, 200, dtype=torch.float64)
ax.plot(fine, closed_form(fine), color=BLUE, lw=1.8)
for b, color in ((1.0, ORANGE), (3.0, GREEN)):
    ax.plot(fine, by_scalar_equation(b, fine), color=color, lw=1.8, ls="--")
ax.plot([], [], "o", color=GREY, mfc="white", mew=1.6, label="flow of 8 tokens in R⁸")
ax.plot([], [], color=GREY, label="closed form")
ax.plot([], [], color=GREY, ls="--", label="scalar equation")
ax.legend(frameon=False, loc="lower right", fontsize=11)
ax.set(xlabel="time", ylabel="cosine of any two tokens", xlim=(0, horizon), ylim=(0, 1.03))
ax.set_title("Equal angles stay equal", loc="left", weight="bold")

for name in ("angles", "stairs"):
    axes[name].set(xscale="log", xlim=(1e-2, 400), xlabel="time")
    for t in mergers.values():
        axes[name].axvline(t, color=GREY, lw=0.8, ls=":")
ax = axes["angles"]
styles = zip(angles.T, (BLUE, ORANGE, GREEN, PURPLE, GREY), ("-", "--", "-.", (0, (6, 2)), "-"), strict=True)
for token, color, line in styles:
    ax.plot(moments, token, color=color, ls=line, lw=2)
ax.set(ylabel="angle of each token (degrees)", ylim=(-185, 185), yticks=(-180, -90, 0, 90, 180))
ax.set_title("Clusters wait, then merge", loc="left", weight="bold")

ax = axes["stairs"]
ax.plot(moments, stairs, color=PURPLE, lw=2.4)
ax.set(ylabel="energy / largest value", ylim=(0, 1.08))
borders = [1e-2, *mergers.values(), 400.0]
for count, begin, end in zip(range(5, 0, -1), borders[:-1], borders[1:], strict=True):
    ax.text(
        math.sqrt(begin * end), 1.02, "5 clusters" if count == 5 else str(count), ha="center", color=GREY, weight="bold"
    )
ax.set_title("The energy climbs a staircase", loc="left", weight="bold")
ax.text(0.97, 0.06, "5 tokens on the circle, β = 4", transform=ax.transAxes, ha="right", color=GREY, bbox=LABEL)

FIGURE.parent.mkdir(exist_ok=True)
figure.savefig(FIGURE, dpi=150)
print(f"wrote {FIGURE.relative_to(FIGURE.parents[1])}")

"""Attention between tokens and measures: A_B[mu](x) = ∫ p(<B x, y>) y mu(dy), for every kernel p of one table.

How to choose a kernel: `softmax` is the transformer's and the paper's; take `unnormalised` where the flow should be
the gradient flow of the interaction energy, `sinkhorn` where every key should be attended to by its share, `hardmax`
for the limit of sharp softmax, `linear` or `sigmoid` for keys that should not compete. How to choose a method: there
is `exact`, one dense evaluation up to a budget of scores and blocks beyond it, and `auto` takes it.
"""

from measureflow.attention.exact import attend
from measureflow.attention.kernels import KERNELS, Kernel, get_kernel

__all__ = ["KERNELS", "Kernel", "attend", "get_kernel"]

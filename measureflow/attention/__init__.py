"""Attention between tokens and measures."""

from measureflow.attention.exact import attend
from measureflow.attention.kernels import KERNELS, Kernel, get_kernel

__all__ = ["KERNELS", "Kernel", "attend", "get_kernel"]

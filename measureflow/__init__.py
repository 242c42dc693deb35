"""measureflow: transformers as measure maps on the sphere.

Construct or fit one transformer that carries N measures to N targets, watch the tokens flow, and measure how far off
the result is.

>>> import measureflow as mf
>>> pairs = mf.datasets.clusters(2, 4, 3, seed=0)
>>> theta = mf.construct(pairs)
>>> bool(mf.transport.wasserstein(mf.push_forward(theta, pairs.source), pairs.target).max() < 1e-7)
True
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from measureflow import attention, datasets, errors, sphere, transport
from measureflow.construct import Certificate, Construction, construct
from measureflow.datasets import read_pairs, write_pairs
from measureflow.evaluate import Report, evaluate
from measureflow.files import load, save
from measureflow.flow import flow, push_forward
from measureflow.measures import MeasurePairs, TokenMeasure
from measureflow.trajectory import FlowStats, Trajectory
from measureflow.transformer import (
    Head,
    Layer,
    Perceptron,
    Transformer,
    compose,
    constant_drift,
    saturating_gate,
)

if TYPE_CHECKING:
    from measureflow import plotting
    from measureflow.plotting import animate

__version__ = version("measureflow")

__all__ = [
    "Certificate",
    "Construction",
    "FlowStats",
    "Head",
    "Layer",
    "MeasurePairs",
    "Perceptron",
    "Report",
    "TokenMeasure",
    "Trajectory",
    "Transformer",
    "animate",
    "attention",
    "compose",
    "constant_drift",
    "construct",
    "datasets",
    "errors",
    "evaluate",
    "flow",
    "load",
    "plotting",
    "push_forward",
    "read_pairs",
    "saturating_gate",
    "save",
    "sphere",
    "transport",
    "write_pairs",
]


def __getattr__(name: str) -> Any:
    # Drawing is imported when first asked for: matplotlib takes as long to load as everything else but torch.
    if name in ("animate", "plotting"):
        plotting = import_module("measureflow.plotting")
        return plotting if name == "plotting" else plotting.animate
    raise AttributeError(f"module 'measureflow' has no attribute {name!r}")

"""`pytest --typecheck` checks the shapes and types of every call with jaxtyping and beartype.

Tests marked `bad_input` are left out then: they look at the library's own errors, which the checker would pre-empt.
"""

import sys

import pytest
import torch

if "--typecheck" in sys.argv:
    from jaxtyping import install_import_hook

    install_import_hook("measureflow", "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--typecheck", action="store_true", help="check shapes and types of every call")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    if not config.getoption("--slow"):
        left_out.append("slow")
    if config.getoption("--typecheck"):
        left_out.append("bad_input")
    gone = [item for item in items if any(item.get_closest_marker(mark) for mark in left_out)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)

"""`pytest --typecheck` checks the shapes and types of every call with jaxtyping and beartype.

Tests marked `bad_input` are left out then: they look at the library's own errors, which the checker would pre-empt.
"""

import os
import sys
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

# How long one example takes says nothing on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

if "--typecheck" in sys.argv:
    from jaxtyping import install_import_hook

    install_import_hook("measureflow", "numeric_tower.check")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--typecheck", action="store_true", help="check shapes and types of every call")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--only-slow", action="store_true", help="run the tests marked slow and no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only_slow = config.getoption("--only-slow")

    def left_out(item: pytest.Item) -> bool:
        slow = item.get_closest_marker("slow") is not None
        if slow != only_slow and not (slow and config.getoption("--slow")):
            return True
        return config.getoption("--typecheck") and item.get_closest_marker("bad_input") is not None

    gone = [item for item in items if left_out(item)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # CI installs every program that a test can want, so there a skip hides something.
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("MEASUREFLOW_CI"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped under MEASUREFLOW_CI: {report.longrepr}"
    return report


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)

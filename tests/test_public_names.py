"""Every name that the package promises exists and says what it is."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import measureflow as mf


def modules() -> list[str]:
    found = (module.name for module in pkgutil.walk_packages(mf.__path__, "measureflow."))
    return ["measureflow", *(name for name in found if not name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_modules_say_what_they_are(name: str) -> None:
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", modules())
def test_promised_names_exist_and_have_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    promised = getattr(module, "__all__", [])
    assert sorted(set(promised)) == sorted(promised), "a name stands twice"
    for word in promised:
        thing = getattr(module, word)
        if inspect.ismodule(thing) or callable(thing):
            assert inspect.getdoc(thing), f"{name}.{word} has no docstring"
            # A dataclass without a docstring gets its signature as one.
            assert not inspect.getdoc(thing).startswith(f"{word}("), f"{name}.{word} has no docstring"


def test_star_import_works() -> None:
    names: dict[str, object] = {}
    exec("from measureflow import *", names)
    assert set(mf.__all__) <= set(names)


def test_the_face_is_the_documented_one() -> None:
    functions = {
        "flow",
        "push_forward",
        "construct",
        "evaluate",
        "animate",
        "read_pairs",
        "write_pairs",
        "save",
        "load",
    }
    classes = {"TokenMeasure", "MeasurePairs", "Head", "Perceptron", "Layer", "Transformer", "Trajectory"}
    rooms = {"sphere", "attention", "transport", "datasets", "plotting", "errors"}
    assert functions | classes | rooms <= set(mf.__all__)


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'flows'"):
        _ = mf.flows


def test_importing_does_not_load_what_only_some_work_needs() -> None:
    heavy = ("matplotlib", "PIL", "pyarrow", "ot")
    code = f"import sys, measureflow; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


def test_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert mf.__version__ == version("measureflow")

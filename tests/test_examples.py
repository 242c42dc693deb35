"""Every example runs from start to end, away from the folder it stands in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parents[1].joinpath("examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_runs_and_draws(script: Path, tmp_path: Path) -> None:
    # A copy draws into a folder of its own, so that a test changes no committed figure.
    copy = tmp_path / "examples" / script.name
    copy.parent.mkdir()
    copy.write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    figures = tmp_path / "figures"
    figures.mkdir()
    environment = os.environ | {"MPLBACKEND": "Agg"}
    done = subprocess.run([sys.executable, copy], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    drawn = [file for file in figures.iterdir() if file.stem.startswith(script.stem)]
    assert drawn, f"{script.name} drew nothing named after it"
    assert all(file.stat().st_size > 5000 for file in drawn)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_opens_as_a_notebook_and_its_figure_is_committed(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n# # "), "the first cell is a title"
    assert "\n# %%\n" in text
    figures = list(Path(__file__).parents[1].joinpath("figures").glob(f"{script.stem}*"))
    assert figures, "run `make figures` and commit the picture"

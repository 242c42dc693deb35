"""Every command and snippet in the README runs as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.split(" ")[0] == program]


def run(arguments: list[str | Path], folder: Path) -> str:
    binaries = str(Path(sys.executable).parent)
    environment = os.environ | {"MPLBACKEND": "Agg", "PATH": os.pathsep.join([binaries, os.environ["PATH"]])}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
def test_snippet_then_commands(tmp_path: Path) -> None:
    # The snippet writes the pairs and the transformer that the commands speak of.
    (snippet,) = blocks("python")
    (tmp_path / "snippet.py").write_text(snippet, encoding="utf-8")
    out = run([sys.executable, "snippet.py"], tmp_path)
    assert "one transformer, 3 pairs" in out
    assert "identity" in out
    for file in re.findall(r'"(\w+\.\w+)"', snippet):
        assert (tmp_path / file).stat().st_size > 0
    for line in commands("measureflow"):
        run(shlex.split(line), tmp_path)
        for file in re.findall(r"(?:-o|--json|--plot) (\S+)", line):
            assert (tmp_path / file).stat().st_size > 0, f"{line}: {file} was not written"
    assert (tmp_path / "pairs.parquet").exists()
    assert (tmp_path / "measureflow-demo").is_dir()


def test_snippet_is_ten_lines() -> None:
    (snippet,) = blocks("python")
    assert len([line for line in snippet.splitlines() if line.strip()]) == 10


def test_every_command_of_the_command_line_is_shown() -> None:
    from measureflow.cli import app

    shown = {line.split()[1] for line in commands("measureflow")}
    assert shown == {command.name or command.callback.__name__ for command in app.registered_commands}


def test_make_targets_exist() -> None:
    lines = commands("make")
    assert lines == ["make demo", "make test"]
    for line in [*lines, *re.findall(r"`(make \w+)`", README)]:
        run([*shlex.split(line), "--dry-run"], ROOT)


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_calls_in_the_text_exist() -> None:
    import measureflow as mf

    for path in set(re.findall(r"\bmf((?:\.\w+)+)", README)):
        thing: object = mf
        for name in path[1:].split("."):
            thing = getattr(thing, name)


def test_extras_in_the_install_line_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (listed,) = re.findall(r'pip install -e "\.\[(.*?)\]"', README)
    assert set(listed.split(",")) <= set(extras)

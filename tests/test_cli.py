"""The command line as a user meets it: what it prints, writes and exits with."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import measureflow as mf
from measureflow.cli import app, main

COMMANDS = [command.callback.__name__ for command in app.registered_commands]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> tuple[int, str, str]:
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        signal.signal(signal.SIGTERM, before)
        printed = capsys.readouterr()
        return stop.value.code, printed.out, printed.err

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pairs and the transformer constructed for them."""
    folder = tmp_path_factory.mktemp("made")
    pairs = mf.datasets.clusters(2, 4, 3, target_clusters=2, seed=0)
    mf.write_pairs(pairs, folder / "pairs.csv")
    mf.save(mf.construct(pairs), folder / "theta.safetensors")
    return folder


def one_line(text: str) -> bool:
    return text.startswith("measureflow: ") and text.count("\n") == 1 and text.endswith("\n")


def test_all_commands_are_there() -> None:
    assert COMMANDS == ["demo", "construct", "evaluate", "flow", "animate", "convert", "info"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(run: Run, command: str) -> None:
    code, out, err = run(command, "--help")
    assert code == 0
    assert not err
    assert f"measureflow {command} " in out.partition("Example")[2].replace("\n", " ")


def test_no_arguments_show_the_commands(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_version(run: Run) -> None:
    assert run("--version")[:2] == (0, f"measureflow {mf.__version__}\n")


def test_construct_evaluate_flow_animate(run: Run, made: Path, tmp_path: Path) -> None:
    pairs, theta = str(made / "pairs.csv"), "theta.safetensors"
    code, out, _ = run("construct", pairs, "-o", theta, "--seed", "0")
    assert code == 0
    assert "wrote theta.safetensors" in out
    given = mf.read_pairs(pairs)
    end = mf.push_forward(mf.load(tmp_path / theta), given.source)
    assert float(mf.transport.wasserstein(end, given.target).max()) < 1e-7  # the bound
    again = dict(mf.load(made / "theta.safetensors").layers[0].tensors())
    assert all(torch.equal(tensor, again[name]) for name, tensor in mf.load(theta).layers[0].tensors())

    code, out, _ = run("evaluate", theta, pairs, "--json", "report.json")
    assert code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["names"] == ["0", "1"]
    assert report["map"]["w2"]["mean"] < 1e-7
    assert "identity" in out

    code, _, _ = run("flow", theta, pairs, "-o", "path.npz", "--times", "7")
    assert code == 0
    with np.load(tmp_path / "path.npz", allow_pickle=False) as path:
        assert path["points"].shape == (7, 2, 4, 3)
        assert path["pair"].tolist() == ["0", "1"]
        assert len(path["times"]) == len(path["stage"]) == 7
        assert np.array_equal(path["points"][0], given.source.points.numpy())
        # Reading the stored end back is the same as pushing forward, to the rounding of the pieces in between.
        assert np.abs(path["points"][-1] - end.points.numpy()).max() < 1e-7

    code, _, _ = run("animate", theta, pairs, "-o", "film.gif", "--seconds", "0.2", "--size", "96", "--fps", "10")
    assert code == 0
    assert (tmp_path / "film.gif").read_bytes().startswith(b"GIF8")


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_convert_there_and_back_is_bit_for_bit(run: Run, made: Path, tmp_path: Path, suffix: str) -> None:
    assert run("convert", str(made / "pairs.csv"), f"pairs{suffix}")[0] == 0
    assert run("convert", f"pairs{suffix}", "back.csv")[0] == 0
    assert (tmp_path / "back.csv").read_bytes() == (made / "pairs.csv").read_bytes()


def test_info_tells_how_a_transformer_was_made(run: Run, made: Path) -> None:
    code, out, _ = run("info", str(made / "theta.safetensors"))
    assert code == 0
    theta = mf.load(made / "theta.safetensors")
    assert all(word in out for word in ("S^2", "measureflow.construct", str(theta.num_parameters), "largest W2"))


def test_info_describes_pairs(run: Run, tmp_path: Path) -> None:
    mf.write_pairs(mf.datasets.storms(years=[2023, 2024]), tmp_path / "storms.csv")
    code, out, _ = run("info", "storms.csv")
    assert code == 0
    assert all(word in out for word in ("globe", "2023, 2024", "92 to 100 atoms", "coupling  known"))


def test_p46_brackets_in_names_and_paths_are_shown(run: Run, tmp_path: Path) -> None:
    pairs = mf.datasets.clusters(2, 4, 3, target_clusters=2, seed=0)
    named = mf.MeasurePairs(pairs.source, pairs.target, ["[bold]a", "pair[/b]"])
    mf.write_pairs(named, tmp_path / "[a].csv")
    code, out, _ = run("info", "[a].csv")
    assert code == 0
    assert "[bold]a, pair[/b]" in out
    code, out, _ = run("construct", "[a].csv", "-o", "[b]x.safetensors")
    assert code == 0
    assert "[bold]a" in out
    assert "wrote [b]x.safetensors" in out
    _, out, _ = run("evaluate", "[b]x.safetensors", "[a].csv")
    assert "pair[/b]" in out
    code, _, err = run("info", "[red]x[/nope].csv")
    assert code == 2
    assert "[red]x[/nope].csv" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["contruct"], "construct"),
        (["construct"], "PAIRS"),
        (["construct", "none.csv", "-o", "theta.safetensors"], "none.csv: there is no such file"),
        (["construct", "none.csv", "-o", "theta.pt"], ".safetensors"),
        (["construct", "none.csv", "-o", "nowhere/theta.safetensors"], "there is no folder nowhere"),
        (["construct", "none.csv"], "--output"),
        (["construct", "none.csv", "-o", "theta.safetensors", "--sed", "1"], "--seed"),
        (["construct", "none.csv", "-o", "theta.safetensors", "--seed", "one"], "--seed"),
        (["flow", "a.safetensors", "b.csv", "-o", "path.npz", "--times", "1"], "--times"),
        (["animate", "a.safetensors", "b.csv", "-o", "film.avi"], ".mp4 or .gif"),
        (["convert", "none.csv", "pairs.txt"], ".csv or .parquet or .npz"),
        (["info", "broken.safetensors"], "broken.safetensors"),
        (["info", "broken.csv"], "broken.csv"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_usage_and_bad_files_are_one_line_and_2(
    run: Run, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"not a model")
    (tmp_path / "broken.csv").write_text("pair,side,x0,x1\na,source,1,0\na,target,0,0\n")
    before = sorted(tmp_path.iterdir())
    code, out, err = run(*arguments)
    assert code == 2
    assert not out
    assert one_line(err)
    assert expected in err
    assert sorted(tmp_path.iterdir()) == before


def test_impossible_pairs_are_one_line_and_1_and_allow_inexact_builds_the_best(run: Run, tmp_path: Path) -> None:
    split = tmp_path / "split.csv"
    split.write_text("pair,side,x0,x1,x2\n[s],source,1,0,0\n[s],target,0,1,0\n[s],target,0,0,1\n")
    code, _, err = run("construct", "split.csv", "-o", "theta.safetensors")
    assert code == 1
    assert one_line(err)
    assert "[s]" in err
    assert not (tmp_path / "theta.safetensors").exists()
    assert run("construct", "split.csv", "-o", "theta.safetensors", "--allow-inexact")[0] == 0
    assert (tmp_path / "theta.safetensors").exists()


def test_debug_lets_the_error_through(run: Run) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        main(["info", "none.csv", "--debug"])


def test_an_unexpected_error_is_one_line_and_1(run: Run, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: Path) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(mf, "read_pairs", broken)
    code, _, err = run("info", str(made / "pairs.csv"))
    assert code == 1
    assert one_line(err)
    assert "RuntimeError: two lines" in err
    assert "--debug" in err


def test_float32_transformers_take_float64_pairs(run: Run, made: Path, tmp_path: Path) -> None:
    mf.save(mf.load(made / "theta.safetensors").to(torch.float32), tmp_path / "half.safetensors")
    code, _, err = run("flow", "half.safetensors", str(made / "pairs.csv"), "-o", "path.npz", "--times", "3")
    assert code == 0, err
    with np.load(tmp_path / "path.npz") as path:
        assert path["points"].dtype == np.float32


@pytest.mark.parametrize("columns", ["20", "400"])
def test_narrow_and_wide_terminals(run: Run, made: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run("info", str(made / "theta.safetensors"))[0] == 0
    assert run("evaluate", str(made / "theta.safetensors"), str(made / "pairs.csv"))[0] == 0
    assert run("construct", "--help")[0] == 0


def test_ctrl_c_leaves_one_line_130_and_no_file(tmp_path: Path) -> None:
    mf.write_pairs(mf.datasets.storms(years=range(2015, 2025)), tmp_path / "storms.csv")
    command = [sys.executable, "-m", "measureflow", "construct", "storms.csv", "-o", "theta.safetensors"]
    # A shell starts background jobs with Ctrl-C ignored, and CI may run in one.
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        assert process.stderr is not None
        # The first line of progress shows that it is at work; it has far to go.
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert first.startswith("construct: ")
    assert process.returncode == 130
    assert err.splitlines()[-1] == "measureflow: interrupted; no file was left half-written"
    assert "Traceback" not in err
    assert [file.name for file in tmp_path.iterdir()] == ["storms.csv"]


def test_a_reader_who_leaves_is_no_error(made: Path) -> None:
    command = [sys.executable, "-m", "measureflow", "info", str(made / "theta.safetensors")]
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_output_in_any_encoding(made: Path, encoding: str) -> None:
    command = [sys.executable, "-m", "measureflow", "evaluate", made / "theta.safetensors", made / "pairs.csv"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    process = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_quick_demo_writes_all_it_names(run: Run, tmp_path: Path) -> None:
    code, out, err = run("demo", "--quick", "-o", "story[1]", "--quiet")
    assert code == 0, err
    files = sorted(file.name for file in (tmp_path / "story[1]").iterdir())
    expected = ["error.png", "map.png", "pairs.csv", "paths.png", "report.json", "stages.png", "theta.safetensors"]
    assert [name for name in files if not name.startswith("storms.")] == expected
    assert len(files) == len(expected) + 1
    assert all(f"story[1]/{name}" in out for name in files)

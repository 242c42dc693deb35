"""The command line: measureflow demo, construct, evaluate, flow, animate, convert, info."""

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import measureflow as mf
from measureflow.errors import MeasureflowError
from measureflow.files import atomic_write
from measureflow.progress import progress_over

FIGURES = (".png", ".pdf", ".svg")
FILMS = (".mp4", ".gif")
TABLES = (".csv", ".parquet", ".npz")
DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="measureflow",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="With any command, --debug shows the trace of an error. Exit codes: 0 done, 1 the work failed, 2 wrong "
    "usage or a bad file, 130 interrupted. One thread is used, or as many as OMP_NUM_THREADS says.",
)

PairsFile = Annotated[Path, typer.Argument(metavar="PAIRS", help="Pairs, as .csv, .parquet or .npz.")]
ThetaFile = Annotated[Path, typer.Argument(metavar="THETA", help="A transformer, as .safetensors.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write, whole or not at all.")]
Seed = Annotated[int, typer.Option(help="Of the random choices; equal seeds give equal results.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


@app.callback(invoke_without_command=True)
def face(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Transformers as measure maps on the sphere: construct, flow, evaluate, animate."""
    if version:
        _say(f"measureflow {mf.__version__}")
        raise typer.Exit


@app.command(epilog="Examples: measureflow demo; measureflow demo --quick -o storms")
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")] = Path("measureflow-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Twelve storms a season and a short film.")] = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """See it all: five seasons of storms, from birth to death."""
    # It loads matplotlib, which the other commands can do without.
    import_module("measureflow.demo").run(output, quick=quick, seed=seed, say=_say, progress=not quiet)


@app.command(epilog="Example: measureflow construct pairs.csv -o theta.safetensors")
def construct(
    pairs: PairsFile,
    output: Output,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Where no map is exact, build the best one.")
    ] = False,
    match: Annotated[
        str, typer.Option(help="free: equal atoms go to the nearest targets; given: as the match column says.")
    ] = "free",
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Write one transformer that carries every source to its target.

    The certificate that is shown says how near it comes, by an integration of its own.
    """
    _check_outputs({output: (".safetensors",)})
    theta = mf.construct(mf.read_pairs(pairs), match=match, allow_inexact=allow_inexact, seed=seed, progress=not quiet)
    mf.save(theta, output)
    _say(str(theta.certificate))
    _tell_written(output)


@app.command(epilog="Example: measureflow evaluate theta.safetensors pairs.csv --json report.json --plot error.png")
def evaluate(
    theta: ThetaFile,
    pairs: PairsFile,
    train: Annotated[
        Path | None, typer.Option(help="Pairs that the baselines learn from; without it each pair has all the others.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers here.")] = None,
    plot: Annotated[Path | None, typer.Option(help=f"Draw the errors here ({', '.join(FIGURES)}).")] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Measure how far off the targets a transformer ends.

    Beside it stand rules that have learned nothing, and sampling noise.
    """
    _check_outputs({file: ends for file, ends in ((json, (".json",)), (plot, FIGURES)) if file is not None})
    transformer, given = _read(theta, pairs)
    past = None if train is None else mf.read_pairs(train)

    def carried(source: mf.TokenMeasure) -> mf.TokenMeasure:
        return mf.push_forward(transformer, source, progress=not quiet)

    report = mf.evaluate(carried, given, train=past, seed=seed)
    _say(report.table())
    _say(f"\n{report}")
    if json is not None:
        report.to_json(json)
        _tell_written(json)
    if plot is not None:
        report.plot(plot)
        _tell_written(plot)


@app.command(epilog="Example: measureflow flow theta.safetensors pairs.csv -o path.npz --times 100")
def flow(
    theta: ThetaFile,
    pairs: PairsFile,
    output: Output,
    times: Annotated[int, typer.Option(min=2, help="Number of times to store, evenly over the layers.")] = 100,
    solver: Annotated[
        str, typer.Option(help="exact, euler, rk4, or a name of torchdiffeq's, such as dopri5.")
    ] = "exact",
    quiet: Quiet = False,
) -> None:
    """Move the sources, and store the path.

    Arrays: times (T), points (T, N, n, d), weights (N, n), pair (N names), stage (T names).
    """
    _check_outputs({output: (".npz",)})
    transformer, given = _read(theta, pairs)
    path = mf.flow(transformer, given.source, transformer.even_times(times), solver=solver, progress=not quiet)
    with atomic_write(output) as partial:
        np.savez_compressed(
            partial,
            times=path.times.numpy(),
            points=path.points.numpy(),
            weights=path.weights.numpy(),
            pair=np.array(given.names),
            stage=np.array([path.stage_at(t) for t in path.times.tolist()]),
        )
    _tell_written(output)


@app.command(epilog="Example: measureflow animate theta.safetensors pairs.csv -o storms.mp4")
def animate(
    theta: ThetaFile,
    pairs: PairsFile,
    output: Output,
    seconds: Annotated[float, typer.Option(help="Length of the film.")] = 12.0,
    fps: Annotated[float, typer.Option(help="Frames a second, at most 50 in a gif.")] = 25.0,
    size: Annotated[int, typer.Option(help="Width and height in pixels.")] = 720,
    pace: Annotated[
        str, typer.Option(help="distance: tokens move evenly from frame to frame; time: the flow's own time.")
    ] = "distance",
    title: Annotated[str | None, typer.Option(help="A line above the picture.")] = None,
    quiet: Quiet = False,
) -> None:
    """Film the flow of the sources, as .mp4 or .gif."""
    _check_outputs({output: FILMS})
    transformer, given = _read(theta, pairs)
    path = mf.flow(transformer, given.source, transformer.even_times(400), progress=not quiet)
    mf.animate(
        path,
        output,
        targets=given.target,
        names=given.names,
        seconds=seconds,
        fps=fps,
        size=(size, size),
        pace=pace,
        title=title,
        progress=not quiet,
    )
    _tell_written(output)


@app.command(epilog="Example: measureflow convert pairs.csv pairs.parquet")
def convert(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="Pairs, as .csv, .parquet or .npz.")],
    target: Annotated[Path, typer.Argument(metavar="TO", help="The file to write, as .csv, .parquet or .npz.")],
    quiet: Quiet = False,
) -> None:
    """Rewrite pairs in another format, bit for bit."""
    _check_outputs({target: TABLES})
    with progress_over("convert", 2, shown=not quiet) as advance:
        pairs = mf.read_pairs(source)
        advance("read")
        mf.write_pairs(pairs, target)
        advance("written")
    _tell_written(target)


@app.command(epilog="Examples: measureflow info theta.safetensors; measureflow info pairs.csv")
def info(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A transformer (.safetensors), or pairs.")],
) -> None:
    """Say what a file holds and how it was made."""
    rows = _about_theta(mf.load(file)) if file.suffix == ".safetensors" else _about_pairs(mf.read_pairs(file))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(str(value)))
    _say(table)


def _about_theta(theta: mf.Transformer) -> dict[str, Any]:
    stages = ", ".join(f"{stage or 'no stage'} {count}" for stage, count in theta.stages.items())
    rows: dict[str, Any] = {
        "what": f"transformer on S^{theta.dim - 1}",
        "layers": f"{len(theta.layers)} ({stages}), {theta.switches} switches",
        "parameters": f"{theta.num_parameters}, norm {theta.norm:.4g}",
        "duration": f"{theta.duration:.6g}",
    }
    for name, value in theta.metadata.items():
        if name == "certificate" and isinstance(value, dict) and value.get("w2"):
            rows["pairs"] = _some(value.get("names", []))
            rows["largest W2"] = f"{max(value['w2']):.2e} rad, as certified when it was made"
            rows["seed"] = value.get("seed")
        else:
            rows[name.replace("_", " ")] = value
    return rows


def _about_pairs(pairs: mf.MeasurePairs) -> dict[str, Any]:
    def atoms(measure: mf.TokenMeasure) -> str:
        least, most = int(measure.counts.min()), int(measure.counts.max())
        return f"{least} atoms each" if least == most else f"{least} to {most} atoms"

    return {
        "what": f"pairs of measures on S^{pairs.dim - 1}" + (", places on the globe" if pairs.globe else ""),
        "pairs": f"{len(pairs)}: {_some(pairs.names)}",
        "sources": atoms(pairs.source),
        "targets": atoms(pairs.target),
        "coupling": "not known" if pairs.coupling is None else "known",
        "numbers": str(pairs.source.points.dtype).removeprefix("torch."),
    }


def _some(names: Any) -> str:
    return ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")


def _read(theta: Path, pairs: Path) -> tuple[mf.Transformer, mf.MeasurePairs]:
    """The transformer and the pairs, these in the dtype of the transformer."""
    transformer = mf.load(theta)
    _, tensor = next(transformer.layers[0].tensors())
    return transformer, mf.read_pairs(pairs).to(tensor.dtype)


def _check_outputs(files: dict[Path, tuple[str, ...]]) -> None:
    """Refuse before any work what could not be written after it."""
    for file, suffixes in files.items():
        if file.suffix.lower() not in suffixes:
            raise ValueError(f"{file}: expected a file name that ends in {' or '.join(suffixes)}")
        if not file.parent.is_dir():
            raise FileNotFoundError(f"{file}: there is no folder {file.parent}; create it first")


def _say(what: RenderableType) -> None:
    # Text from files is shown as it is: no markup, no highlighting, no line breaks put in.
    if isinstance(what, str):
        what = Text(what)
    Console(soft_wrap=isinstance(what, Text)).print(what)


def _tell_written(file: Path) -> None:
    size = file.stat().st_size
    _say(f"wrote {file} ({f'{size / 1e6:.1f} MB' if size >= 1e6 else f'{size / 1e3:.1f} kB'})")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        # Names that the terminal has no letters for are shown by their codes.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if "OMP_NUM_THREADS" not in os.environ:
        # On a busy machine threads that wait for each other at every small matrix made a construction ten times
        # slower; on a quiet one a second thread gains little.
        torch.set_num_threads(1)
    # A polite kill is handled like Ctrl-C, so that partial files are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(_guarded(lambda: app(given or ["--help"], prog_name="measureflow", standalone_mode=False), debug))


def _guarded(work: Callable[[], Any], debug: bool) -> int:
    """The exit code of some work, with one line on stderr where it is not 0."""
    try:
        outcome = work()
        # Here rather than at exit, so that a reader who has gone is met inside the guard.
        sys.stdout.flush()
    except KeyboardInterrupt:
        outcome = INTERRUPTED
    except (BrokenPipeError, SystemExit) as stop:
        # Typer makes an exit of a broken pipe. The reader of our output has gone, as `head` does: nothing is wrong.
        if not isinstance(stop, BrokenPipeError) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE
    except Exception as error:
        if debug:
            raise
        return _complain(*_judge(error))
    if outcome == INTERRUPTED:
        return _complain("interrupted; no file was left half-written", INTERRUPTED)
    return outcome if isinstance(outcome, int) else DONE


def _judge(error: Exception) -> tuple[str, int]:
    """What to say about an error, and the exit code."""
    if isinstance(error, typer.TyperException):
        return f"{error.format_message()} (see measureflow --help)", WRONG_INPUT
    if isinstance(error, ValueError | FileNotFoundError | IsADirectoryError):
        return str(error), WRONG_INPUT
    if isinstance(error, MeasureflowError | OSError):
        return str(error), FAILED
    return f"unexpected {type(error).__name__}: {error}; --debug shows where", FAILED


def _complain(message: str, code: int) -> int:
    print("measureflow:", " ".join(message.split()), file=sys.stderr)
    return code

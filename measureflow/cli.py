"""The command line: measureflow demo, construct, evaluate, flow, animate, convert, info."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import click
import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import measureflow as mf
from measureflow.errors import FileFormatError, MeasureflowError, MissingExtraError
from measureflow.files import atomic_write

app = typer.Typer(
    name="measureflow",
    help="Transformers as measure maps on the sphere: construct, flow, evaluate, animate.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

PairsFile = Annotated[Path, typer.Argument(metavar="PAIRS", help="Pairs as .csv, .parquet or .npz.")]
ThetaFile = Annotated[Path, typer.Argument(metavar="THETA", help="A transformer, .safetensors.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write; replaced whole or not at all.")]
Seed = Annotated[int, typer.Option(help="Of the random choices; equal seeds give equal results.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def _say(text: str | Table) -> None:
    # Text from files is shown as it is: no markup, no highlighting.
    console = Console(soft_wrap=isinstance(text, str))
    console.print(text if isinstance(text, Table) else Text(text))


def _wrote(file: Path) -> None:
    _say(f"wrote {file} ({_size(file)})")


def _size(file: Path) -> str:
    size = file.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


@app.command(epilog="Example: measureflow demo -o storms-demo")
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")] = Path("measureflow-demo"),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Five seasons of tropical storms, carried from where they were born to where they died: the whole story."""
    from measureflow.demo import run

    run(output, seed=seed, say=_say, progress=not quiet)


@app.command(epilog="Example: measureflow construct pairs.csv -o theta.safetensors")
def construct(
    pairs: PairsFile,
    output: Output,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Build the best map where no map is exact.")
    ] = False,
    match: Annotated[str, typer.Option(help="free, or given: follow the file's match column.")] = "free",
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Write down one transformer that carries every source to its target, and certify it."""
    _check_output(output, (".safetensors",))
    theta = mf.construct(
        mf.read_pairs(pairs), match=match, allow_inexact=allow_inexact, seed=seed, progress=not quiet
    )
    mf.save(theta, output)
    _say(str(theta.certificate))
    _wrote(output)


@app.command(epilog="Example: measureflow evaluate theta.safetensors pairs.csv --json report.json --plot error.png")
def evaluate(
    theta: ThetaFile,
    pairs: PairsFile,
    train: Annotated[
        Path | None, typer.Option(help="Pairs that the baselines may learn from; else the others of PAIRS.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the errors here (.png, .pdf, .svg).")] = None,
    seed: Seed = 0,
) -> None:
    """Measure how far the carried sources are from their targets, beside baselines and sampling noise."""
    learn = None if train is None else mf.read_pairs(train)
    report = mf.evaluate(mf.load(theta), mf.read_pairs(pairs), train=learn, seed=seed)
    _say(report.table())
    if json is not None:
        report.to_json(json)
        _wrote(json)
    if plot is not None:
        report.plot(plot)
        _wrote(plot)


@app.command(epilog="Example: measureflow flow theta.safetensors pairs.csv -o path.npz --times 100")
def flow(
    theta: ThetaFile,
    pairs: PairsFile,
    output: Output,
    times: Annotated[int, typer.Option(min=2, help="Number of times to store, evenly over the layers.")] = 100,
    solver: Annotated[str, typer.Option(help="exact, rk4, dopri5, ...")] = "exact",
    quiet: Quiet = False,
) -> None:
    """Move the sources under a transformer and store the path: arrays times, points, weights, pair, stage."""
    import numpy as np

    _check_output(output, (".npz",))
    transformer, given = mf.load(theta), mf.read_pairs(pairs)
    path = mf.flow(transformer, given.source, transformer.even_times(times), solver=solver, progress=not quiet)
    with atomic_write(output) as temporary:
        np.savez_compressed(
            temporary,
            times=path.times.numpy(),
            points=path.points.numpy(),
            weights=path.weights.numpy(),
            pair=np.array(given.names),
            stage=np.array([path.stage_at(t) for t in path.times.tolist()]),
        )
    _wrote(output)


@app.command(epilog="Example: measureflow animate theta.safetensors pairs.csv -o storms.mp4")
def animate(
    theta: ThetaFile,
    pairs: PairsFile,
    output: Output,
    seconds: Annotated[float, typer.Option(help="Length of the film.")] = 12.0,
    fps: Annotated[float, typer.Option(help="Frames a second.")] = 25.0,
    pace: Annotated[
        str, typer.Option(help="distance: tokens move evenly from frame to frame; time: the flow's own time.")
    ] = "distance",
    quiet: Quiet = False,
) -> None:
    """Film the flow of the sources, with their targets, as .mp4 or .gif."""
    _check_output(output, (".mp4", ".gif"))
    transformer, given = mf.load(theta), mf.read_pairs(pairs)
    path = mf.flow(transformer, given.source, transformer.even_times(400), progress=not quiet)
    mf.animate(
        path,
        output,
        targets=given.target,
        names=given.names,
        seconds=seconds,
        fps=fps,
        pace=pace,
        progress=not quiet,
    )
    _wrote(output)


@app.command(epilog="Example: measureflow convert pairs.csv pairs.parquet")
def convert(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="Pairs as .csv, .parquet or .npz.")],
    target: Annotated[Path, typer.Argument(metavar="TO", help="Pairs as .csv, .parquet or .npz.")],
) -> None:
    """Rewrite pairs in another format, every coordinate and weight bit for bit."""
    mf.write_pairs(mf.read_pairs(source), target)
    _wrote(target)


@app.command(epilog="Example: measureflow info theta.safetensors")
def info(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A transformer (.safetensors) or pairs.")],
) -> None:
    """Say what a file holds and how it was made."""
    table = Table(show_header=False, box=None)
    rows = _about_theta(mf.load(file)) if file.suffix == ".safetensors" else _about_pairs(mf.read_pairs(file))
    for name, value in rows.items():
        table.add_row(Text(name), Text(str(value)))
    _say(table)


def _about_theta(theta: mf.Transformer) -> dict[str, Any]:
    stages = ", ".join(f"{stage or 'unnamed'} {count}" for stage, count in theta.stages.items())
    rows: dict[str, Any] = {
        "what": f"transformer on S^{theta.dim - 1}",
        "layers": f"{len(theta.layers)} ({stages})",
        "switches": theta.switches,
        "parameters": theta.num_parameters,
        "norm": f"{theta.norm:.4g}",
        "duration": f"{theta.duration:.6g}",
    }
    certificate = theta.metadata.get("certificate")
    if certificate:
        rows["pairs"] = ", ".join(certificate["names"][:12])
        rows["largest W2"] = f"{max(certificate['w2']):.3g} rad (certificate)"
        rows["seed"] = certificate["seed"]
    made = {k: v for k, v in theta.metadata.items() if k != "certificate"}
    return rows | {k.replace("_", " "): v for k, v in made.items()}


def _about_pairs(pairs: mf.MeasurePairs) -> dict[str, Any]:
    def sizes(measure: mf.TokenMeasure) -> str:
        low, high = int(measure.counts.min()), int(measure.counts.max())
        return f"{low} atoms each" if low == high else f"{low} to {high} atoms"

    return {
        "what": f"{len(pairs)} pairs of measures on S^{pairs.dim - 1}" + (", on the globe" if pairs.globe else ""),
        "names": ", ".join(pairs.names[:12]) + (", ..." if len(pairs) > 12 else ""),
        "sources": sizes(pairs.source),
        "targets": sizes(pairs.target),
        "coupling": "known" if pairs.coupling is not None else "not known",
    }


def _check_output(file: Path, suffixes: tuple[str, ...]) -> None:
    if file.suffix not in suffixes:
        raise ValueError(f"{file}: expected a name that ends in {' or '.join(suffixes)}")
    if not file.parent.is_dir():
        raise ValueError(f"{file}: the folder {file.parent} does not exist")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the work failed, 2 wrong usage or a bad file, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    sys.exit(_guarded(lambda: app(given, standalone_mode=False), debug))


def _guarded(work: Callable[[], Any], debug: bool) -> int:
    try:
        outcome = work()
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted; nothing half-written is left", 130)
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does; nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.UsageError as error:
        if debug:
            raise
        hint = f"; try `measureflow {error.ctx.info_name if error.ctx and error.ctx.parent else ''} --help`"
        return _complain(error.format_message() + hint.replace("  ", " "), 2)
    except (FileFormatError, FileNotFoundError, ValueError, TypeError, IsADirectoryError, PermissionError) as error:
        if debug:
            raise
        return _complain(str(error), 2)
    except (MeasureflowError, MissingExtraError, OSError, torch.OutOfMemoryError) as error:
        if debug:
            raise
        return _complain(str(error), 1)
    return outcome if isinstance(outcome, int) else 0


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"measureflow: {line}", file=sys.stderr)
    return code


def _terminate(*_: Any) -> None:
    raise KeyboardInterrupt


# A polite kill is handled like Ctrl-C, so that temporary files are removed.
signal.signal(signal.SIGTERM, _terminate)

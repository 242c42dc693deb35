"""The demonstration: one transformer carries five seasons of tropical storms from birth to death."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from measureflow.construct import construct
from measureflow.datasets import storms
from measureflow.evaluate import evaluate
from measureflow.files import save
from measureflow.flow import flow
from measureflow.sphere import EARTH_RADIUS_KM

SEASONS = range(2015, 2020)


def run(folder: Path, *, seed: int, say: Callable[[str | Table], None], progress: bool) -> list[Path]:
    """Construct, certify, evaluate, draw and film; the files written, all in `folder`.

    Raises:
        OSError: the folder cannot be made or written.
    """
    from measureflow.errors import MissingExtraError
    from measureflow.plotting import animate, draw_map, draw_sphere, draw_stages

    began = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    pairs = storms(years=SEASONS)
    say(f"{len(pairs)} seasons, {int(pairs.source.counts.sum())} tropical storms: where they were born and where they died")
    theta = construct(pairs, seed=seed, progress=progress)
    say(str(theta.certificate))
    say(f"            largest W2 on the globe: {theta.certificate.worst * EARTH_RADIUS_KM * 1e6:.2g} mm\n")
    files = {"theta.safetensors": "the transformer"}
    save(theta, folder / "theta.safetensors")

    report = evaluate(theta, pairs, seed=seed)
    say(report.table())
    report.to_json(folder / "report.json")
    report.plot(folder / "error.png")
    files |= {"report.json": "errors, baselines and noise", "error.png": "the same, drawn"}

    path = flow(theta, pairs.source, theta.even_times(400), progress=progress)
    draw_map(pairs, folder / "storms.png")
    draw_sphere(path, folder / "paths.png", targets=pairs.target, names=pairs.names)
    draw_stages(path, folder / "stages.png", targets=pairs.target, names=pairs.names)
    files |= {
        "storms.png": "births and deaths on the map",
        "paths.png": "the paths that the transformer takes",
        "stages.png": "the construction, stage by stage",
    }
    try:
        film = animate(path, folder / "storms.mp4", targets=pairs.target, names=pairs.names, progress=progress)
    except MissingExtraError as error:
        say(f"{error}; filming as gif instead")
        film = animate(
            path, folder / "storms.gif", targets=pairs.target, names=pairs.names, fps=10, size=(480, 480), progress=progress
        )
    files[film.name] = "the film"
    width = max(map(len, files))
    say("")
    for name, what in files.items():
        say(f"{str(folder / name):<{len(str(folder)) + 1 + width}}  {what}")
    say(f"\ndone in {time.perf_counter() - began:.0f} s")
    return [folder / name for name in files]

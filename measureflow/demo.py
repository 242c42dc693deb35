"""The demonstration: one transformer carries five seasons of tropical storms from birth to death."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import RenderableType

from measureflow.construct import construct
from measureflow.datasets import storms, write_pairs
from measureflow.errors import MissingExtraError
from measureflow.evaluate import evaluate
from measureflow.files import save
from measureflow.flow import flow
from measureflow.plotting import animate, draw_map, draw_sphere, draw_stages
from measureflow.plotting.movie_files import check_movie_file
from measureflow.sphere import EARTH_RADIUS_KM

SEASONS = range(2020, 2025)


def run(
    folder: Path, *, quick: bool = False, seed: int = 0, say: Callable[[RenderableType], None], progress: bool
) -> None:
    """Construct, certify, evaluate, draw and film; everything is written in `folder`.

    Args:
        folder: made where it is missing.
        quick: twelve storms a season and a short film.
        seed: of the construction and of the report.
        say: shows a line of text or a table.
        progress: show bars.

    Raises:
        OSError: the folder cannot be made or written.
    """
    began = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}

    def place(name: str, what: str) -> Path:
        written[name] = what
        return folder / name

    pairs = storms(years=SEASONS, atoms=12 if quick else None)
    count = int(pairs.source.counts.sum())
    say(f"{count} tropical storms of {len(pairs)} seasons, from where they were born to where they died\n")
    write_pairs(pairs, place("pairs.csv", "births and deaths"))

    theta = construct(pairs, seed=seed, progress=progress)
    save(theta, place("theta.safetensors", "the transformer"))
    say(f"{theta.certificate}\n")
    say(f"largest W2 on the globe: {theta.certificate.worst * EARTH_RADIUS_KM * 1e6:.3g} mm\n")

    report = evaluate(theta, pairs, seed=seed)
    say(report.table())
    report.to_json(place("report.json", "errors, baselines and sampling noise"))
    report.plot(place("error.png", "the same, drawn"))

    path = flow(theta, pairs.source, theta.even_times(120 if quick else 400), progress=progress)
    shown = {"targets": pairs.target, "names": pairs.names}
    draw_map(pairs, place("map.png", "births and deaths on the map"))
    draw_sphere(path, place("paths.png", "the paths that the transformer takes"), **shown)
    draw_stages(path, place("stages.png", "the construction, stage by stage"), **shown)

    film = "storms.mp4"
    try:
        check_movie_file(folder / film, 25)
    except MissingExtraError as error:
        say(f"\n{error}; filming as gif")
        film = "storms.gif"
    pixels = 240 if quick else 720 if film.endswith("mp4") else 480
    rate = 25 if film.endswith("mp4") else 12
    animate(
        path,
        place(film, "the film"),
        seconds=3 if quick else 12,
        fps=rate,
        size=(pixels, pixels),
        progress=progress,
        **shown,
    )

    width = max(len(str(folder / name)) for name in written)
    say("")
    for name, what in written.items():
        say(f"{folder / name!s:<{width}}  {what}")
    say(f"\ndone in {time.perf_counter() - began:.0f} s")

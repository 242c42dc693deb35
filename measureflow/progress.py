"""Progress of long work, on stderr: a bar at a terminal, a line per stage elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 1.0  # seconds before anything is shown


@contextmanager
def progress_over(title: str, total: int, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each of `total` steps, with the name of the stage that the step belongs to.

    Nothing appears in the first second, so that quick work stays quiet.

    >>> with progress_over("flow", 2) as advance:
    ...     advance("gather")
    ...     advance("match")
    """
    console = Console(stderr=True)
    if not shown:
        yield lambda stage: None
    elif console.is_terminal:
        yield from _bar(console, title, total)
    else:
        yield _lines(console, title, total)


def _bar(console: Console, title: str, total: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task, began = bar.add_task(title, total=total), time.perf_counter()

    def advance(stage: str) -> None:
        bar.update(task, advance=1, description=escape(f"{title}: {stage}" if stage else title))
        if not bar.live.is_started and time.perf_counter() - began > PATIENCE:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


def _lines(console: Console, title: str, total: int) -> Callable[[str], None]:
    began, done, last = time.perf_counter(), 0, None

    def advance(stage: str) -> None:
        nonlocal done, last
        done += 1
        elapsed = time.perf_counter() - began
        if elapsed > PATIENCE and stage != last:
            line = f"{title}: {stage or 'layers'}, {done} of {total}, {elapsed:.0f} s"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            last = stage

    return advance

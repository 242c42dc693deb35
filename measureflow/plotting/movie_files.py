"""Frames into files: mp4 by ffmpeg, gif by pillow; equal frames give equal bytes."""

import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray
from PIL import Image

from measureflow.errors import MissingExtraError

PACK = np.array([65536, 256, 1], dtype=np.int32)

Frame = UInt8[ndarray, "height width 3"]


def write_mp4(
    file: Path, frames: Iterator[Frame], fps: float | int, samples: Sequence[Frame], colours: Sequence[str]
) -> None:
    """H.264 in 4:2:0, which every browser and player shows; width and height of the frames must be even.

    Raises:
        MissingExtraError: there is no ffmpeg.
        OSError: ffmpeg stopped; its last line is quoted.
    """
    height, width = samples[0].shape[:2]
    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -framerate {fps:.6g} -i -"
    # The matrix from RGB is named in the file: players guess another one below 720 lines than above.
    matrix = "-vf scale=out_color_matrix=bt709:flags=accurate_rnd"
    matrix += " -colorspace bt709 -color_primaries bt709 -color_trc bt709"
    # One thread, and no encoder's name or date in the file: the same bytes on every run.
    codec = "-an -c:v libx264 -preset medium -crf 17 -pix_fmt yuv420p -threads 1 -flags:v +bitexact -fflags +bitexact"
    options = f"-y -loglevel error {source} {matrix} {codec} -movflags +faststart"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([ffmpeg(), *options.split(), str(file)], stdin=subprocess.PIPE, stderr=log)
        pipe: Any = process.stdin
        try:
            with suppress(BrokenPipeError):  # ffmpeg has stopped: its log says why
                for frame in frames:
                    pipe.write(frame.tobytes())
        except BaseException:
            process.kill()
            raise
        finally:
            with suppress(BrokenPipeError):
                pipe.close()
            failed = process.wait() != 0
        if failed:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise OSError(f"ffmpeg could not write the movie: {lines[-1]}; a file name that ends in .gif works without")


def write_gif(
    file: Path, frames: Iterator[Frame], fps: float | int, samples: Sequence[Frame], colours: Sequence[str]
) -> None:
    """A gif that repeats for ever, of one palette for all frames, so that colours do not flicker.

    The palette holds the first 128 of `colours` as they are, and means of those in `samples`.

    Durations are whole hundredths of a second, spread so that the whole lasts as asked. Equal frames in a row are
    stored as one that lasts longer.
    """
    exact = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours][:128], dtype=np.uint8)
    board = Image.fromarray(np.concatenate(samples))
    mixed = board.quantize(256 - len(exact), Image.Quantize.MEDIANCUT).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([*exact.reshape(-1).tolist(), *mixed])
    images = _timed((_indexed(frame, palette, exact) for frame in frames), fps)
    next(images).save(file, format="GIF", save_all=True, append_images=images, loop=0, optimize=False)


def _indexed(frame: Frame, palette: Image.Image, exact: UInt8[ndarray, "k 3"]) -> Image.Image:
    image = Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE)
    # Pillow looks colours up in steps of 4, and so may miss the white of the page by a little.
    index, packed = np.array(image), frame.astype(np.int32) @ PACK
    for k, colour in enumerate(exact.astype(np.int32) @ PACK):
        index[packed == colour] = k
    image.putdata(index.reshape(-1))
    return image


def _timed(images: Iterator[Image.Image], fps: float | int) -> Iterator[Image.Image]:
    for i, image in enumerate(images):
        image.info["duration"] = 10 * (round(100 * (i + 1) / fps) - round(100 * i / fps))  # milliseconds
        yield image


WRITERS: dict[str, Callable[[Path, Iterator[Frame], float | int, Sequence[Frame], Sequence[str]], None]] = {
    ".mp4": write_mp4,
    ".gif": write_gif,
}


def ffmpeg() -> str:
    """Path of ffmpeg: the one on the PATH, else the one that imageio-ffmpeg carries.

    Raises:
        MissingExtraError: there is neither.
    """
    if found := shutil.which("ffmpeg"):
        return found
    try:
        return importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(
            "mp4 needs ffmpeg, and there is none: pip install measureflow[mp4], or give a file name that ends in .gif"
        ) from error


def check_movie_file(file: str | os.PathLike[str], fps: float | int) -> None:
    """Refuse, before anything is drawn, a movie that could not be written.

    Raises:
        ValueError: the suffix is unknown, or a gif of more than 50 frames a second is asked for.
        MissingExtraError: an mp4 is asked for and there is no ffmpeg.
        OSError: the folder is missing.
    """
    suffix = Path(file).suffix.lower()
    if suffix not in WRITERS:
        raise ValueError(f"{file}: expected a file name that ends in one of {', '.join(WRITERS)}")
    if suffix == ".gif" and fps > 50:
        raise ValueError(f"fps: a gif shows at most 50 frames a second, got {fps:g}")
    folder = Path(file).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{file}: there is no folder {folder}; create it first")
    if suffix == ".mp4":
        ffmpeg()

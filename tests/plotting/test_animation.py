import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from stories import along_the_equator, at_rest, clusters

from measureflow import sphere
from measureflow.errors import MissingExtraError
from measureflow.plotting import animate, frame_times, movie_files
from measureflow.plotting.movie_files import WRITERS, ffmpeg

SMALL = {"size": (96, 96), "seconds": 0.4, "fps": 20, "progress": False}  # 8 frames


def read(file: Path, width: int, height: int) -> np.ndarray:
    """All frames of a movie as (frames, height, width, 3)."""
    if file.suffix == ".gif":
        with Image.open(file) as image:
            return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
    command = [ffmpeg(), "-loglevel", "error", "-i", str(file), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def shows(frame: np.ndarray, colour: tuple[int, int, int]) -> int:
    """Number of pixels that are nearly of a colour."""
    return int((np.abs(frame.astype(int) - colour).max(-1) < 40).sum())


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("d", [2, 3, 5])
def test_frames_are_as_many_and_as_large_as_asked_for(suffix, d, tmp_path):
    path = clusters(d)
    file = animate(path, tmp_path / f"m{suffix}", targets=path.end, names=["a_b", "$c$"], title="t", turn=40, **SMALL)
    assert file == tmp_path / f"m{suffix}"
    frames = read(file, 96, 96)
    assert frames.shape == (8, 96, 96, 3)
    assert (frames[0] != frames[-1]).any()
    assert [entry.name for entry in tmp_path.iterdir()] == [f"m{suffix}"]


@pytest.mark.parametrize("suffix", WRITERS)
def test_p42_frames_are_even_and_equal_whatever_the_settings(suffix, tmp_path):
    path = clusters(3, globe=True)
    options = SMALL | {"size": (501, 333), "seconds": 0.15}
    plain = animate(path, tmp_path / f"plain{suffix}", **options)
    settings = {"savefig.bbox": "tight", "figure.dpi": 37, "savefig.dpi": 50, "figure.figsize": (3, 9), "font.size": 40}
    with matplotlib.rc_context(settings):
        before = dict(matplotlib.rcParams)
        other = animate(path, tmp_path / f"other{suffix}", **options)
        assert dict(matplotlib.rcParams) == before
    assert read(plain, 502, 334).shape == (3, 334, 502, 3)
    assert plain.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("suffix", WRITERS)
def test_equal_arguments_give_equal_bytes(suffix, tmp_path):
    path = clusters(3)
    a = animate(path, tmp_path / f"a{suffix}", targets=path.start, **SMALL)
    b = animate(path, tmp_path / f"b{suffix}", targets=path.start, **SMALL)
    assert a.read_bytes() == b.read_bytes()
    c = animate(path, tmp_path / f"c{suffix}", targets=path.start, **SMALL, turn=10)
    assert a.read_bytes() != c.read_bytes()


def test_p41_mp4_without_ffmpeg_is_one_line_and_leaves_no_file(tmp_path, monkeypatch):
    def no_module(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(movie_files.shutil, "which", lambda name: None)
    monkeypatch.setattr(movie_files.importlib, "import_module", no_module)
    with pytest.raises(MissingExtraError, match=r"pip install measureflow\[mp4\].*\.gif") as caught:
        animate(clusters(3), tmp_path / "m.mp4", **SMALL)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert animate(clusters(3), tmp_path / "m.gif", **SMALL).exists()


def test_ffmpeg_that_fails_is_named_and_the_old_file_stays(tmp_path, monkeypatch):
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\necho 'Unknown encoder libx264' >&2\nexit 1\n")
    program.chmod(0o755)
    file = tmp_path / "m.mp4"
    file.write_bytes(b"old")
    monkeypatch.setattr(movie_files.shutil, "which", lambda name: str(program))
    with pytest.raises(OSError, match=r"Unknown encoder libx264.*\.gif"):
        animate(clusters(3), file, **SMALL)
    assert file.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("globe", [True, False])
def test_p44_a_token_is_seen_in_front_and_not_behind_in_each_frame(globe, tmp_path):
    token = sphere.from_lonlat(torch.zeros(1).double(), torch.zeros(1).double())
    path = at_rest(token, globe=globe)
    options = SMALL | {"seconds": 1.2, "size": (200, 200)}
    file = animate(path, tmp_path / "m.gif", view=(0, 0), turn=360, trail=0, **options)
    frames = read(file, 200, 200)
    assert len(frames) == 24
    for i, frame in enumerate(frames):
        seen_from = 360 * (i / 23 - 0.5)  # longitude of the middle of the page
        front = abs(seen_from) < 85
        behind = abs(seen_from) > 95
        blue = shows(frame, (0, 114, 178))
        assert blue > 2 if front else not behind or blue == 0, (i, seen_from, blue)


@pytest.mark.parametrize("pace", ["distance", "time"])
def test_frames_run_from_start_to_end_and_stand_still_there(pace):
    path = clusters(3)
    times = frame_times(path, 100, pace)
    assert len(times) == 100
    assert times[:4] == [0.0] * 4
    assert times[-11:] == [1.5] * 11
    assert (np.diff(times) >= 0).all()


def test_pace_by_distance_moves_tokens_evenly_and_passes_over_rest():
    # The token stands for 90 % of the time, then sails 60 degrees in two unequal pieces.
    longitudes = torch.tensor([0.0, 0.0, 0.0, 20.0, 60.0]).double()
    path = along_the_equator(longitudes, torch.tensor([0.0, 50.0, 90.0, 92.0, 100.0]).double())
    times = frame_times(path, 50, "distance")
    steps = np.diff([float(sphere.to_lonlat(path.at(t).points)[0]) for t in times])
    moving = steps[1:-5]
    np.testing.assert_allclose(moving, 60 / (50 - 1 - 5 - 1), rtol=1e-9)
    by_time = np.diff(frame_times(path, 50, "time"))
    np.testing.assert_allclose(by_time[1:-5], 100 / 43, rtol=1e-9)


def test_pace_by_distance_is_bounded_where_tokens_turn():
    path = clusters(3, times=12)  # coarse: tokens turn at stored times
    m = 200 - 6 - 20
    places = [path.at(t).points for t in frame_times(path, 200, "distance")]
    steps = np.array([float(sphere.distance(x, y).mean()) for x, y in pairwise(places)])
    whole = float(sphere.distance(path.points[:-1], path.points[1:]).mean((-1, -2)).sum())
    bound = whole / (m - 1)
    assert (steps <= bound * (1 + 1e-9)).all()
    # Frames on either side of a stored time are closer: there are 10 of those.
    assert (np.abs(steps - bound) < 1e-9 * bound).sum() >= m - 1 - 10


def test_mp4_names_its_colours_and_keeps_them(tmp_path):
    token = sphere.from_lonlat(torch.zeros(1).double(), torch.zeros(1).double())
    file = animate(at_rest(token), tmp_path / "m.mp4", view=(0, 0), **SMALL | {"size": (720, 720)})
    about = subprocess.run([ffmpeg(), "-i", str(file)], capture_output=True, text=True, check=False).stderr
    assert "bt709" in about
    frame = read(file, 720, 720)[0].astype(int)
    assert (frame[:5, :5] == 255).all()
    # The inner pixels of the dot, read by the matrix named in the file: 8 bits and crf 17 leave a few units.
    assert (np.abs(frame - [0, 114, 178]).max(-1) <= 6).sum() > 10


def test_trails_follow_great_circles_between_frames(tmp_path):
    # 120 degrees over the North Pole in 4 frames: by chords the trail would stay far from the pole.
    ends = sphere.from_lonlat(torch.tensor([90.0, -90.0]).double(), torch.tensor([30.0, 30.0]).double())
    path = replace(at_rest(torch.eye(3).double()[:1]), points=ends[:, None])
    options = {"size": (400, 400), "seconds": 0.4, "fps": 10, "progress": False}
    file = animate(path, tmp_path / "m.gif", view=(0, 0), turn=0, trail=1, **options)
    frame = read(file, 400, 400)[-1]
    blue = (frame[..., 2].astype(int) - frame[..., 0] > 30).any(-1)
    disc = np.flatnonzero((frame < 255).any((1, 2)))
    # Seen from the equator the path is a part of the rim: it reaches the top of the ball.
    assert np.flatnonzero(blue)[0] - disc[0] <= 3


def test_one_stored_time_is_a_movie_that_stands_still(tmp_path):
    path = at_rest(torch.eye(3).double())
    once = replace(path, times=path.times[:1], points=path.points[:1])
    for number in (once, replace(once, points=once.points[:, None], weights=once.weights[None])):
        assert frame_times(number, 3, "distance") == [0.0] * 3
        assert len(read(animate(number, tmp_path / "m.gif", turn=50, **SMALL), 96, 96)) == 8


def test_one_frame_of_what_does_not_move(tmp_path):
    path = at_rest(torch.eye(3).double())
    assert frame_times(path, 5, "distance") == frame_times(path, 5, "time") == [0.0, 0.25, 0.5, 0.75, 1.0]
    file = animate(path, tmp_path / "m.gif", size=(64, 64), seconds=0.04, fps=25, progress=False)
    assert len(read(file, 64, 64)) == 1


def test_gif_lasts_as_long_as_asked_for(tmp_path):
    file = animate(clusters(3), tmp_path / "m.gif", size=(64, 64), seconds=1, fps=30, progress=False)
    with Image.open(file) as image:
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
    assert len(durations) == 30
    assert sum(durations) == 1000


def test_page_of_a_gif_is_white(tmp_path):
    frames = read(animate(clusters(3, globe=True), tmp_path / "m.gif", **SMALL), 96, 96)
    assert (frames[:, 0, 0] == 255).all()


def test_stage_and_time_stand_on_the_frame(monkeypatch, tmp_path):
    drawn = []
    original = matplotlib.text.Text.draw
    monkeypatch.setattr(
        matplotlib.text.Text, "draw", lambda self, renderer: (drawn.append(self.get_text()), original(self, renderer))
    )
    animate(clusters(3), tmp_path / "m.gif", names=["a_$b$", "[c]"], **SMALL)
    assert {"cluster", "drift", "t = 0.00", "t = 1.50", "a_$b$", "[c]"} <= set(drawn)


@pytest.mark.bad_input
def test_bad_input_is_named(tmp_path):
    path = clusters(3)
    with pytest.raises(ValueError, match=r"m\.webm: .*\.mp4, \.gif"):
        animate(path, tmp_path / "m.webm", **SMALL)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        animate(path, tmp_path / "missing" / "m.gif", **SMALL)
    with pytest.raises(ValueError, match="are no frames"):
        animate(path, tmp_path / "m.gif", seconds=0.01, fps=10)
    with pytest.raises(ValueError, match="seconds, fps: expected positive"):
        animate(path, tmp_path / "m.gif", seconds=-1)
    with pytest.raises(ValueError, match="pace: expected 'distance' or 'time', got 'even'"):
        animate(path, tmp_path / "m.gif", pace="even")
    with pytest.raises(ValueError, match=r"size: .* 64 pixels"):
        animate(path, tmp_path / "m.gif", size=(10, 720))
    with pytest.raises(ValueError, match="at most 50 frames a second"):
        animate(path, tmp_path / "m.gif", fps=60)
    with pytest.raises(ValueError, match="trail, turn"):
        animate(path, tmp_path / "m.gif", trail=-1)
    with pytest.raises(ValueError, match="targets: expected 2"):
        animate(path, tmp_path / "m.gif", targets=path.start[0])
    with pytest.raises(TypeError, match="expected the Trajectory that `flow` returns, got TokenMeasure"):
        animate(path.start, tmp_path / "m.gif")
    with pytest.raises(ValueError, match="size: expected width and height"):
        animate(path, tmp_path / "m.gif", size=96)
    for view in ((float("nan"), 0), (0, 91)):
        with pytest.raises(ValueError, match=r"view: expected a finite longitude and a latitude in \[-90, 90\]"):
            animate(path, tmp_path / "m.gif", view=view)
    points = path.points.clone()
    points[3, 0, 1, 2] = float("inf")
    with pytest.raises(ValueError, match=r"^time 0\.155172, measure 0, row 1: expected a finite point"):
        animate(replace(path, points=points), tmp_path / "m.gif")
    assert list(tmp_path.iterdir()) == []


def test_a_token_that_jumps_to_its_antipode_is_named(tmp_path):
    path = along_the_equator(torch.tensor([0.0, 180.0]).double(), torch.tensor([0.0, 1.0]).double())
    with pytest.raises(ValueError, match=r"antipodal.*store more times"):
        animate(path, tmp_path / "m.gif", **SMALL)
    assert list(tmp_path.iterdir()) == []

"""Figures and movies of measures on the sphere, for white pages and colour-blind readers.

The figure functions return a matplotlib `Figure` that pyplot does not know, save it where a file is given, and leave
matplotlib's settings as they were. All of them do their own orthographic projection: matplotlib's 3-d axes cannot tell
what is behind a surface.
"""

from measureflow.plotting.animation import animate, frame_times
from measureflow.plotting.circle import draw_circle
from measureflow.plotting.earth_map import draw_map
from measureflow.plotting.sphere import draw_sphere
from measureflow.plotting.stages import draw_stages
from measureflow.plotting.style import pair_colours

__all__ = ["animate", "draw_circle", "draw_map", "draw_sphere", "draw_stages", "frame_times", "pair_colours"]

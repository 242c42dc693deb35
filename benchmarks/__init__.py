"""Side-by-side timings of measureflow and of the plain way to do the same; `make bench` runs them all."""

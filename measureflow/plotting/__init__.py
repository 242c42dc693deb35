"""Figures and movies of measures on the sphere."""

"""Data-parallel coordinates of ranks."""

from __future__ import annotations

COORDINATES = {"apart": (0, 1, 2, 3), "pairs": (0, 0, 1, 1), "apart in pairs": (0, 1, 0, 1), "together": (0, 0, 0, 0)}
"""Data-parallel coordinate of each rank."""

"""The cells of the grid: a pairwise selection, thinned out where a cell costs much and shows little that is new."""

from __future__ import annotations

from typing import Any

from areal.tests.grid.layouts import FACTORS, OFTEN, OFTEN_IN_JAX, Cell, Layout, fits
from areal.tests.grid.pairwise import pairwise_rows

KINDS = ("fsdp:d1", "fsdp:d2", "fsdp:c2", "fsdp:t2", "fsdp:p2")
"""A layout of each kind of parallelism, with a cell of compiled layers, where a rank takes up to a minute, and one of an adapter in float64."""

ON_FOUR_RANKS = ("plain", "lora")
"""Options that every layout of four ranks meets; the others meet each of its kinds of parallelism on two ranks."""


def grid_cells() -> list[Cell]:
    """Return the cells of the grid.

    Layouts of one and two ranks meet every value of every other factor. Layouts of four ranks meet two dtypes and
    :data:`ON_FOUR_RANKS`. Those of JAX, which compiles for each cell, meet adapters on two ranks, :data:`OFTEN_IN_JAX` every
    option, and float64 on four. Values of the other factors meet each other on any layout.
    """
    factors = {**FACTORS, "options": tuple(name for name in FACTORS["options"] if name != "compile")}
    cells = [Cell(**row) for row in pairwise_rows(factors, fits, OFTEN, _has_to_meet)]
    layouts = {layout.backend: layout for layout in reversed(FACTORS["layout"])}
    return cells + [Cell(layouts[name], options=option) for name in KINDS for option in ("compile", "lora")]


def _has_to_meet(a: str, value: Any, b: str, other: Any) -> bool:
    """Return False for a layout and a value that need not occur in one cell."""
    if "layout" not in (a, b):
        return True
    layout, factor, value = (value, b, other) if a == "layout" else (other, a, value)
    assert isinstance(layout, Layout)
    if layout.world > 2:
        if factor == "dtype":
            return value == "float64" or (value == "bfloat16" and layout.engine != "jax")
        return factor == "options" and value in ON_FOUR_RANKS and layout.engine != "jax"
    if layout.engine == "jax" and layout.world == 2:
        return factor == "options" and (value == "lora" or layout.backend in OFTEN_IN_JAX)
    return True

"""Layouts: the table in the documentation, and the coordinates of ranks."""

from pathlib import Path

import pytest
import torch

from areal.api import ParallelDims
from areal.engine.registry import layout_table

PAGE = Path(__file__).parents[4] / "docs" / "layouts.md"


def test_documented_layout_table_equals_generated_table() -> None:
    assert layout_table(["fsdp", "megatron", "jax"]) in PAGE.read_text()


def test_unsupported_letters_are_blank_in_layout_table() -> None:
    rows = {
        line.split("|")[1].strip(): line.split("|")[3:-1] for line in layout_table(["fsdp", "megatron"]).splitlines()
    }
    assert [cell.strip() for cell in rows["`r`"]] == ["yes", ""]
    assert [cell.strip() for cell in rows["`p`"]] == ["yes", "yes"]


@pytest.mark.parametrize("layout", ["d4c2", "p2d3t2", "r2d2p2c2t2", "e2d2", "(attn:d2p2t2|ffn:d1p2e4)"])
def test_coordinates_are_those_of_the_mesh(layout: str) -> None:
    dims = ParallelDims.parse(f"x:{layout}")
    ranks = torch.arange(dims.world_size).view(dims.pp, dims.dp, dims.cp, dims.tp)
    for rank in range(dims.world_size):
        place = tuple(dims.coordinates(rank)[axis] for axis in ("pp", "dp", "cp", "tp"))
        assert ranks[place] == rank

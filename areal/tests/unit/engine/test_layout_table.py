"""The table of layouts in the documentation equals the one generated from the code."""

from pathlib import Path

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

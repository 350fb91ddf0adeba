"""The table of layouts in the documentation equals the one generated from the code."""

from pathlib import Path

from areal.engine.registry import layout_table

PAGE = Path(__file__).parents[4] / "docs" / "layouts.md"


def test_the_page_has_the_table_of_the_code() -> None:
    assert layout_table(["fsdp", "megatron"]) in PAGE.read_text()


def test_what_an_engine_has_not_is_left_open() -> None:
    rows = {
        line.split("|")[1].strip(): line.split("|")[3:-1] for line in layout_table(["fsdp", "megatron"]).splitlines()
    }
    assert [cell.strip() for cell in rows["`r`"]] == ["yes", ""]
    assert [cell.strip() for cell in rows["`p`"]] == ["yes", "yes"]

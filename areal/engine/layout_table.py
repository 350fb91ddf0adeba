"""What each installed engine can combine, as the table in ``docs/layouts.md``: ``python -m areal.engine.layout_table``."""

from __future__ import annotations

from areal.api.parallel import LETTERS
from areal.engine.registry import engine_class, engine_names


def layout_table(names: list[str] | None = None) -> str:
    """A Markdown table with a row for each letter of a layout and a column for each engine.

    Args:
        names: of the engines; all that are installed by default.
    """
    chosen = engine_names() if names is None else names
    engines = {name: engine_class(name) for name in chosen}
    rows = [["letter", "", *(f"`{name}`" for name in engines)], ["---"] * (2 + len(engines))]
    for letter, meaning in LETTERS.items():
        has = ["yes" if letter in _letters(engine) else "" for engine in engines.values()]
        rows.append([f"`{letter}`", meaning, *has])
    hybrid = ["yes" if {"e", "t"} <= _letters(engine) else "" for engine in engines.values()]
    rows.append(["`(attn:…\\|ffn:…)`", "experts laid out apart from attention", *hybrid])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _letters(engine: type) -> frozenset[str]:
    return getattr(engine, "layout_letters", frozenset())


if __name__ == "__main__":
    print(layout_table())

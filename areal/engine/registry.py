"""Engines by name, from this package or any other that declares an entry point in the group ``areal.engines``."""

from __future__ import annotations

from importlib.metadata import entry_points

from areal.api.config import TrainEngineConfig
from areal.api.engine import TrainEngine
from areal.api.parallel import LETTERS

GROUP = "areal.engines"


def engine_names() -> list[str]:
    """The engines that are installed."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def engine_class(name: str) -> type[TrainEngine]:
    """The engine class of that name.

    Raises:
        ValueError: there is none, or what it needs is not installed.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise ValueError(f"no engine is called {name!r}; installed are {sorted(points)} (entry point group '{GROUP}')")
    try:
        return points[name].load()
    except ImportError as error:
        raise ValueError(
            f"the engine {name!r} needs what is not installed ({error}): pip install 'areal[{name}]'"
        ) from error


def create_engine(config: TrainEngineConfig) -> TrainEngine:
    """The engine that ``config.backend`` names, not yet initialized.

    Raises:
        ValueError: there is no such engine, or it has not the layout that is asked for.
    """
    return engine_class(config.dims.backend)(config)  # type: ignore[call-arg]


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

"""Engines by name, from this package or any other that declares an entry point in the group ``areal.engines``."""

from __future__ import annotations

import contextlib

from areal.api.config import TrainEngineConfig
from areal.api.engine import TrainEngine
from areal.api.parallel import LETTERS
from areal.engine.options import engine_config
from areal.entry_points import ENGINE_GROUP as GROUP
from areal.entry_points import registered_entry, registered_names


def engine_names() -> list[str]:
    """Return the names of the registered engines. A dependency of one may be missing."""
    return registered_names(GROUP)


def installed_engines() -> dict[str, type[TrainEngine]]:
    """Import and return the engines whose dependencies are installed, by name."""
    found: dict[str, type[TrainEngine]] = {}
    for name in engine_names():
        with contextlib.suppress(ValueError):
            found[name] = engine_class(name)
    return found


def engine_class(name: str) -> type[TrainEngine]:
    """Import and return the engine class of that name.

    Raises:
        ValueError: there is no such engine, packages disagree about its name, or a dependency of the engine is not installed.
    """
    entry = registered_entry(GROUP, name)
    if entry is None:
        raise ValueError(f"no engine is called {name!r}; installed are {engine_names()} (entry point group '{GROUP}')")
    try:
        return entry.load()
    except ImportError as error:
        raise ValueError(
            f"the engine {name!r} needs what is not installed ({error}): pip install 'areal[{name}]'"
        ) from error


def create_engine(config: TrainEngineConfig) -> TrainEngine:
    """Create the engine that ``config.backend`` names. It is not initialized.

    Raises:
        ValueError: there is no such engine, or it does not support the layout or an option of ``config``.
    """
    engine = engine_class(config.dims.backend)
    # Here too, for engines that do not derive from the template, which does the same.
    return engine(engine_config(engine, config))  # type: ignore[call-arg]


def layout_table(names: list[str] | None = None) -> str:
    """Format a Markdown table with a row for each letter of a layout and a column for each engine.

    Args:
        names: names of engines. Defaults to all engines whose dependencies are installed.
    """
    engines = installed_engines() if names is None else {name: engine_class(name) for name in names}
    rows = [["letter", "parallelism", *(f"`{name}`" for name in engines)], ["---"] * (2 + len(engines))]
    for letter, meaning in LETTERS.items():
        has = ["yes" if letter in _letters(engine) else "" for engine in engines.values()]
        rows.append([f"`{letter}`", meaning, *has])
    hybrid = ["yes" if {"e", "t"} <= _letters(engine) else "" for engine in engines.values()]
    rows.append(["`(attn:…\\|ffn:…)`", "another layout for experts than for attention", *hybrid])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _letters(engine: type) -> frozenset[str]:
    return getattr(engine, "layout_letters", frozenset())


if __name__ == "__main__":
    print(layout_table())

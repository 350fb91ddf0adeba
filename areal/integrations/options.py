"""Options of other frameworks that an adapter does not support."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def check_options(options: Mapping[str, tuple[Any, Collection[Any]]], adapter: str, way_out: str) -> None:
    """Raise for the first option with a value that the adapter would ignore.

    Args:
        options: value of each option, and the values that the adapter supports.
        adapter: option that selects the adapter, for the message.
        way_out: end of the message.

    Raises:
        ValueError: names the option, its value, the supported values and the way out.
    """
    for name, (value, supported) in options.items():
        if value not in supported:
            values = " or ".join(map(repr, supported))
            raise ValueError(f"{name} = {value!r} with {adapter}, which supports {values}: {way_out}")

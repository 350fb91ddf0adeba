"""Types of the parameters of tools, and values of parameters in text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

Kinds = frozenset[str]
"""JSON types that a value may have; empty if they are not known."""

Types = dict[str, dict[str, Kinds]]
"""JSON types of the parameters of each tool."""

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def types_of(tool: Mapping[str, Any]) -> dict[str, Kinds]:
    """Return the types of the parameters of a tool.

    Args:
        tool: the tool's JSON schema.
    """
    entries = tool["function"].get("parameters", {}).get("properties", {})
    return {name: _kinds(entry) for name, entry in entries.items()}


def read_value(text: str, kinds: Kinds, quoted: bool) -> Any:
    """Return a value that a template wrote: strings as they are, others as JSON or with Python's constants.

    Where a string and other types are possible, text that is none of the others is a string.

    Args:
        quoted: strings are written as JSON, too.

    Raises:
        ValueError: the text is no JSON, and the value cannot be a string.
    """
    constants = {"True": True, "False": False, "None": None, "null": None}
    word = text.strip()
    if not quoted and "string" in kinds and kinds <= {"string", "null"}:
        return None if "null" in kinds and word in ("None", "null") else text
    if word in constants:
        return constants[word]
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if kinds and "string" not in kinds:
        raise ValueError(f"a parameter of the type {' or '.join(sorted(kinds))} has the value {text[:100]!r}")
    return text


def _kinds(schema: Any) -> Kinds:
    """Return the types that a JSON schema names: by ``type``, by its alternatives, or by the values that it lists."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if named is not None:
        return frozenset([named] if isinstance(named, str) else named)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        each = [_kinds(alternative) for alternative in alternatives]
        return frozenset().union(*each) if all(each) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return frozenset("null" if value is None else _JSON_TYPES[type(value)] for value in values)

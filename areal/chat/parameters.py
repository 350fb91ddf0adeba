"""Types of the parameters of tools, and values of parameters in text."""

from __future__ import annotations

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
    try:
        value = constants[word] if word in constants else json.loads(text)
    except ValueError:
        if kinds and "string" not in kinds:
            names = " or ".join(sorted(kinds))
            raise ValueError(f"a parameter of the type {names} has the value {text[:100]!r}") from None
        return text
    if quoted or "string" not in kinds:
        return value
    others = kinds - {"string"} | ({"integer"} if "number" in kinds else set())
    return value if _kind_of(value) in others else text


def _kind_of(value: Any) -> str:
    return "null" if value is None else _JSON_TYPES[type(value)]


def _kinds(schema: Any) -> Kinds:
    """Return the types that a JSON schema names: by ``type``, by its alternatives, or by the values that it lists.

    ``nullable`` adds ``null``: transformers writes it for an optional parameter of a function.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    kinds = _named(schema)
    return kinds | {"null"} if kinds and schema.get("nullable") else kinds


def _named(schema: Mapping[str, Any]) -> Kinds:
    named = schema.get("type")
    if named is not None:
        return frozenset([named] if isinstance(named, str) else named)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        each = [_kinds(alternative) for alternative in alternatives]
        return frozenset().union(*each) if all(each) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return frozenset(map(_kind_of, values))

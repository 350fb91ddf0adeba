"""Secrets among settings, such as the key of a server: they are used, and no record or tracker has them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from areal.recipes.config import RunConfig, toml_value

_SECRET = re.compile(
    r"(^|[_-])(api[_-]?key|access[_-]?key|token|secret|password|passwd|credentials?|authorization)$", re.I
)
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")


def public_settings(config: RunConfig, *, changed_only: bool = False) -> dict[str, Any]:
    """Return settings as JSON values, without those whose name is that of a secret, and URLs without user and password.

    Args:
        config: settings of a run.
        changed_only: leave out those that are defaults.
    """
    settings: dict[str, Any] = _public(config.model_dump(mode="json", exclude_defaults=changed_only))
    return settings


def public_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line with ``***`` in place of secrets."""
    shown = []
    for argument in arguments:
        key, equals, text = _USER_OF_URL.sub("", argument).partition("=")
        value, name = toml_value(text), key.rpartition(".")[2]
        if equals and _SECRET.search(name):
            text = "***"
        elif _public(value) != value:
            text = json.dumps(_public(value), default=str)
        shown.append(f"{key}{equals}{text}")
    return shown


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(each) for name, each in value.items() if not _SECRET.search(str(name))}
    if isinstance(value, list):
        return [_public(each) for each in value]
    return _USER_OF_URL.sub("", value) if isinstance(value, str) else value
